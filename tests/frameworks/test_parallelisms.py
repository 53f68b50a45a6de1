"""Tests of flexcp together with the rest of a training stack, on real ranks with a Hugging Face model: the loss is
always that of one process.

The parts are FSDP2, activation checkpointing (full and selective), torch.compile (with few compilations although token
counts change), gradient accumulation, mixed precision, tensor and sequence parallelism, two models in one process, and
evaluation between training steps.
"""

from __future__ import annotations

from functools import cache

import pytest
from parallel_runs import (
    STEPS,
    Longer,
    side_by_side,
    with_a_compiled_model,
    with_accumulation,
    with_checkpointing,
    with_evaluation,
    with_everything,
    with_fsdp,
    with_mixed_precision,
    with_selective_checkpointing,
    with_tensor_parallelism,
)
from torch import nn

from flexcp.frameworks import fsdp
from flexcp.measure.ranks import RankPool
from lib.model_runs import Run, Trained, make_config, make_plan, train_alone


@cache
def alone(family: str = "llama", dtype: str = "float64", steps: int = STEPS) -> Trained:
    return train_alone(Run(family, dtype=dtype, steps=steps))


def check(found: list[float], right: Trained, relative: float = 1e-9) -> None:
    assert found == pytest.approx(right.losses, rel=relative, abs=0)


# --- FSDP2, recompute, accumulation, precision ------------------------------------------------------------------------


def test_fsdp2_with_other_token_counts_on_every_rank(pool: RankPool) -> None:
    for losses in pool.run(with_fsdp, Run("llama", ranks=3, steps=STEPS), ranks=3):
        check(losses, alone())


def test_sum_gradients_needs_a_sharded_model() -> None:
    with pytest.raises(ValueError, match=r"Linear is sharded: call fully_shard first"):
        fsdp.sum_gradients(nn.Linear(2, 2))


def test_full_recompute_runs_attention_again(pool: RankPool) -> None:
    for *losses, calls in pool.run(with_checkpointing, Run("gpt_oss", ranks=2, steps=STEPS), ranks=2):
        check(losses, alone("gpt_oss"))
        assert calls == 4


def test_selective_recompute_can_keep_attention_by_its_name(pool: RankPool) -> None:
    for *losses, calls in pool.run(with_selective_checkpointing, Run("llama", ranks=2, steps=STEPS), ranks=2):
        check(losses, alone())
        assert calls == 2, "attention ran again though its results were kept"


def test_gradient_accumulation_over_micro_batches(pool: RankPool) -> None:
    for losses in pool.run(with_accumulation, Run("mistral", ranks=2, steps=STEPS), ranks=2):
        check(losses, alone("mistral"))


def test_mixed_precision_attends_in_bfloat16(pool: RankPool) -> None:
    for losses in pool.run(with_mixed_precision, Run("llama", ranks=2, dtype="float32", steps=STEPS), ranks=2):
        check(losses, alone(dtype="float32"), relative=2e-3)
        assert losses != pytest.approx(alone(dtype="float32").losses, rel=1e-7), "nothing ran in bfloat16"


# --- tensor and sequence parallelism ----------------------------------------------------------------------------------


@pytest.mark.parametrize("sequence", [False, True], ids=["tensor", "tensor and sequence"])
def test_heads_split_over_another_mesh_axis(pool: RankPool, sequence: bool) -> None:
    for losses in pool.run(with_tensor_parallelism, Run("llama", ranks=2, steps=STEPS), sequence)[:4]:
        check(losses, alone())


# --- torch.compile ----------------------------------------------------------------------------------------------------


def test_recompute_compile_and_fsdp2_together_compile_few_times(pool: RankPool) -> None:
    """Token counts change from step to step; the two layers share compiled code."""
    run = Longer("llama", ranks=2, steps=8)
    counts = {tuple(make_plan(run, make_config("llama"), n).placement.tokens.tolist()) for n in range(run.steps)}
    assert len(counts) > 4
    assert min(min(c) for c in counts) > 1
    right = train_alone(run)
    for *losses, calls, compilations in pool.run(with_everything, run, ranks=2):
        check(losses, right)
        assert calls == 4
        assert compilations <= 1 + 3


def test_a_whole_model_compiles_without_a_graph_break(pool: RankPool) -> None:
    """One rank is enough: the layers of test_recompute_compile_and_fsdp2_together_compile_few_times already have what
    several ranks add to a graph.
    """
    [found] = pool.run(with_a_compiled_model, Longer("llama", ranks=1, steps=4), ranks=1)
    plain, compiled, compilations = found
    assert compiled == pytest.approx(plain, rel=1e-12)
    assert len(set(plain)) == 4
    assert compilations <= 2


# --- several models and plans in one process --------------------------------------------------------------------------


def test_two_models_with_different_steps_in_one_process(pool: RankPool) -> None:
    runs = [Run("llama", "zigzag", ranks=3, steps=STEPS), Run("gemma2", "blocks", ranks=3, steps=STEPS)]
    for first, second in pool.run(side_by_side, runs, ranks=3):
        check(first, alone())
        check(second, alone("gemma2"))


def test_evaluation_under_another_plan_between_training_steps(pool: RankPool) -> None:
    for trained, evaluated in pool.run(with_evaluation, Run("llama", ranks=2, steps=STEPS), ranks=2):
        check(trained, alone())
        check(evaluated, alone())

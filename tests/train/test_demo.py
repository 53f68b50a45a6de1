"""Tests of ``flexcp demo``: training under a plan has the loss of one process without flexcp, and the demo reports
whether the losses agree.
"""

from __future__ import annotations

import io
import math
from dataclasses import replace

import pytest
import torch
from rich.console import Console

from flexcp.measure.ranks import RankPool
from flexcp.train.demo import (
    DemoConfig,
    Result,
    agree,
    batch_lengths,
    make_plan,
    run_demo,
    show,
    train_alone,
    train_on_ranks,
)
from flexcp.train.gpt import Gpt, GptConfig

SMALL = DemoConfig(ranks=2, steps=3, tokens=512, strategies=("zigzag", "blocks"))


@pytest.fixture(scope="module")
def alone(pool: RankPool) -> list[float]:
    losses, _ = pool.run(train_alone, SMALL, ranks=1)[0]
    return losses


@pytest.mark.parametrize("strategy", ["dp", "zigzag", "blocks"])
def test_losses_are_those_of_one_process(pool: RankPool, alone: list[float], strategy: str) -> None:
    shown: list[float] = []
    answers = pool.run(train_on_ranks, SMALL, strategy, ranks=2, on_item=shown.append)
    for losses, seconds in answers:
        assert losses == pytest.approx(alone, rel=1e-5)
        assert seconds > 0
    assert shown == answers[0][0]


def test_training_learns(alone: list[float]) -> None:
    assert len(alone) == SMALL.steps
    assert alone[0] == pytest.approx(math.log(256), rel=0.05), "an untrained model guesses"
    assert alone[-1] < alone[0] - 0.3


@pytest.mark.parametrize("tokens", [1, 2, 17, 100, 512, 4096, 5000])
def test_a_batch_has_exactly_its_tokens(tokens: int) -> None:
    for step in range(20):
        lengths = batch_lengths(replace(SMALL, tokens=tokens), step)
        assert sum(lengths) == tokens
        assert min(lengths) >= 1
    batches = [batch_lengths(replace(SMALL, tokens=4096), step) for step in range(2)]
    assert batches[0] != batches[1]
    assert max(batches[0]) > 4 * sorted(batches[0])[len(batches[0]) // 2], "the tail is not long"


def test_plans_are_for_float32_on_the_ranks_asked_for() -> None:
    plan = make_plan(SMALL, "zigzag", 1)
    assert (plan.ranks, plan.shape.dtype, plan.strategy) == (2, "float32", "zigzag")
    assert plan.batch.lengths.tolist() == batch_lengths(SMALL, 1)


def test_the_model_sees_positions_and_only_its_attention_mixes_tokens() -> None:
    torch.manual_seed(0)
    model = Gpt(GptConfig(vocabulary=16, layers=2, heads=2, kv_heads=1, head_dim=4))
    tokens, positions = torch.tensor([1, 2, 3, 4]), torch.arange(4)

    def own_value(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        assert (q.shape, k.shape, v.shape) == ((4, 2, 4), (4, 1, 4), (4, 1, 4))
        return v.repeat_interleave(2, 1) * (q * k.repeat_interleave(2, 1)).sum(-1, keepdim=True)

    logits = model(tokens, positions, own_value)
    assert logits.shape == (4, 16)
    other = model(torch.tensor([1, 9, 3, 4]), positions, own_value)
    assert torch.equal(logits[[0, 2, 3]], other[[0, 2, 3]])
    assert not torch.equal(logits[1], other[1])


def test_rotary_positions_are_relative() -> None:
    from flexcp.train.gpt import _rotated

    q, k = (torch.randn(1, 1, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(s)) for s in (0, 1))

    def score(i: int, j: int) -> float:
        return float((_rotated(q, torch.tensor([i])) * _rotated(k, torch.tensor([j]))).sum())

    assert score(5, 2) == pytest.approx(score(105, 102))
    assert score(5, 2) != pytest.approx(score(5, 3))


def test_the_whole_demo_reports_every_strategy() -> None:
    text = io.StringIO()
    config = DemoConfig(ranks=2, steps=2, tokens=256, strategies=("dp", "ring"))
    console = Console(file=text, width=200)
    results = run_demo(config, console)
    show(results, config, console)
    assert [r.name for r in results] == ["one process", "dp", "ring"]
    assert agree(results)
    assert all(len(r.losses) == 2 and r.step_ms > 0 for r in results)
    assert results[1].bytes == 0 < results[2].bytes
    assert results[1].compute_imbalance > 1
    moved = [make_plan(config, "ring", s) for s in range(2)]
    assert results[2].bytes == sum(p.bytes().sum() + p.bytes(backward=True).sum() for p in moved) / 2
    for words in ("one process", "dp", "ring", "loss error", "bytes a layer", f"{results[2].losses[-1]:.6f}"):
        assert words in text.getvalue()


def test_agreement_needs_every_strategy_within_the_tolerance() -> None:
    right = Result("one process", [1.0], 1.0)
    assert agree([right, replace(right, error=9e-6)])
    assert not agree([right, replace(right, error=2e-5), right])
    assert set(right.as_json()) >= {"name", "losses", "step_ms", "bytes", "error"}

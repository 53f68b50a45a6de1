"""Tests of loss shares: a rank's share of the loss gives the batch's gradients, whether gradients are summed or
averaged over ranks, and a share made for the other reduction is refused with a clear message.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from averaging_runs import (
    RUN,
    Small,
    bound,
    run_after_a_failure,
    run_apart,
    run_huggingface,
    run_replicas,
    run_small,
    run_summed_between,
    run_unwrapped,
    tokens,
    warned,
    warned_of_two_steps,
)

import flexcp
from flexcp.executor.losses.averaging import Gradients, untrue_replicas
from flexcp.frameworks.pipeline import PlannedMicroBatches
from flexcp.measure.ranks import RankError, RankPool
from lib.model_runs import train_alone


@pytest.mark.parametrize(
    ("gradients", "wrapping"),
    [
        ("summed", "none"),
        ("averaged", "none"),
        ("averaged", "DDP"),
        ("averaged", "torch hook"),
        ("averaged", "compiled"),
        ("averaged", "FSDP2"),
        ("summed", "FSDP2 summed"),
        ("summed", "own hook"),
        ("summed", "no_sync"),
    ],
)
def test_gradients_are_those_of_one_process(two: RankPool, gradients: Gradients, wrapping: str) -> None:
    right = run_small(None, "summed")
    for found in two.run(run_small, gradients, wrapping):
        assert found["loss"] == pytest.approx(right["loss"], rel=1e-12)
        for name, gradient in right["gradients"].items():
            torch.testing.assert_close(found["gradients"][name], gradient, atol=1e-12, rtol=1e-10)


@pytest.mark.parametrize("wrapping", ["DDP", "torch hook", "compiled"])
def test_shares_that_ddp_would_average_are_refused_by_name(two: RankPool, wrapping: str) -> None:
    for found in two.run(run_small, "summed", wrapping):
        assert found["refused"].startswith("DistributedDataParallel averages gradients over the 2 ranks")
        assert "1/2" in found["refused"]
        assert "gradients='averaged'" in found["refused"]


@pytest.mark.parametrize(
    ("gradients", "wrapping", "words"),
    [
        ("summed", "FSDP2", r"FSDP2, without .* averages .* 1/2 of .*gradients='averaged'"),
        ("summed", "FSDP2 compiled", r"FSDP2, without .* averages .* 1/2 of .*gradients='averaged'"),
        (
            "averaged",
            "FSDP2 summed",
            r"FSDP2, after .* or set_gradient_divide_factor.* sums .* 2 times .*'summed'",
        ),
        (
            "averaged",
            "FSDP2 summed late",
            r"FSDP2, after .* sums .* 2 times .*before the forward, .*gradients='summed'",
        ),
    ],
)
def test_shares_that_fsdp2_would_reduce_otherwise_are_refused_by_name(
    two: RankPool, gradients: Gradients, wrapping: str, words: str
) -> None:
    for found in two.run(run_small, gradients, wrapping):
        assert re.match(words, found["refused"])


@pytest.mark.parametrize("gradients", ["summed", "averaged"])
@pytest.mark.parametrize("how", ["before the root", "before a head"])
def test_a_model_that_fsdp2_sums_in_part_is_refused_in_one_line(two: RankPool, gradients: Gradients, how: str) -> None:
    """Both ``gradients="summed"`` and ``gradients="averaged"`` would be wrong for such a model."""
    for said in two.run(run_summed_between, gradients, how):
        assert said.startswith("some FSDP2 modules of this model sum gradients and others average them: call ")
        assert "sum_gradients(model) after the last fully_shard" in said


def test_frozen_modules_have_no_gradients_to_sum(two: RankPool) -> None:
    assert two.run(run_summed_between, "summed", "before a frozen head") == [None, None]


def assert_times_the_mean(found: dict[str, Any], factor: float, replicas: int) -> None:
    """Check that a rank's gradients are ``factor`` times the mean of the replicas' gradients."""
    for name, gradient in mean_of_replicas(replicas).items():
        torch.testing.assert_close(found["gradients"][name], factor * gradient, atol=1e-12, rtol=1e-10)


def mean_of_replicas(count: int) -> dict[str, torch.Tensor]:
    """Return the mean of the replicas' gradients, each computed as on one process."""
    found: list[dict[str, torch.Tensor]] = []
    for replica in range(count):
        model, step, stream = Small(), bound(None), tokens().roll(replica)
        step.loss(model(step.shard(stream), step), step.labels(stream)).backward()
        found.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    return {name: torch.stack([each[name] for each in found]).mean(0) for name in found[0]}


@pytest.mark.parametrize(
    ("how", "replicas"),
    [("flat", 2), ("HSDP", 2), ("own loss", 2), ("alone", 4), ("divided", 1), ("averaged", None)],
)
def test_replicas_that_are_said_have_the_mean_of_their_gradients(four: RankPool, how: str, replicas: int) -> None:
    for found in four.run(run_replicas, how, replicas):
        assert found["warnings"] == []
        assert_times_the_mean(found, 1, 4 if how == "alone" else 2)


@pytest.mark.parametrize("how", ["flat", "HSDP", "own loss", "alone"])
def test_a_sum_over_replicas_is_warned_of_once(four: RankPool, how: str) -> None:
    ranks, replicas = (1, 4) if how == "alone" else (2, 2)
    for found in four.run(run_replicas, how, None):
        [said] = found["warnings"]
        assert f"sums gradients over 4 ranks, of which {ranks} share this batch" in said
        assert f"fsdp.sum_gradients(model, replicas={replicas})" in said
        assert_times_the_mean(found, replicas, replicas)


@pytest.mark.parametrize(("how", "said"), [("flat", 4), ("HSDP", 4), ("own loss", 4), ("alone", 2)])
def test_a_wrong_number_of_replicas_is_warned_of_once(four: RankPool, how: str, said: int) -> None:
    ranks, replicas = (1, 4) if how == "alone" else (2, 2)
    for found in four.run(run_replicas, how, said):
        [words] = found["warnings"]
        assert f"summed over 4 ranks, of which {ranks} share this batch, so that there are {replicas} replicas" in words
        assert f"the gradient is {replicas / said:g} times the mean of theirs" in words
        assert_times_the_mean(found, replicas / said, replicas)


def test_replicas_that_are_none_are_named_as_such() -> None:
    words = untrue_replicas(2, 4, 4)
    assert "all 4 ranks that they are summed over share this batch, so that there are no replicas" in words
    assert words.endswith("the gradient is 0.5 times that of the batch. Call fsdp.sum_gradients(model)")


def test_replicas_divide_the_ranks(four: RankPool) -> None:
    with pytest.raises(RankError, match=r"replicas=3 does not divide the 4 ranks that the model is sharded over"):
        four.run(run_replicas, "flat", 3)


@pytest.mark.parametrize(
    ("wrapping", "who"),
    [
        ("DDP over dp", "DistributedDataParallel"),
        ("DDP over one", "DistributedDataParallel"),
        ("FSDP2 over dp", "FSDP2"),
        ("a frozen layer over all", "FSDP2"),
    ],
)
def test_a_wrapper_over_other_ranks_is_warned_of_once(four: RankPool, wrapping: str, who: str) -> None:
    for found in four.run(run_apart, wrapping):
        [said] = found["warnings"]
        assert said.startswith(f"{who} reduces gradients over 1 of the 2 ranks that share this batch")
        assert "without a process group, or fully_shard with a mesh that has both axes" in said
        assert not found["same"]


@pytest.mark.parametrize("wrapping", ["none", "DDP"])
def test_a_wrapper_over_all_ranks_and_none_are_not_warned_of(four: RankPool, wrapping: str) -> None:
    for found in four.run(run_apart, wrapping):
        assert found["warnings"] == [] and found["same"] == (wrapping == "DDP")


WRAPPED_WHOLE = ["none", "DDP", "DDP of both", "FSDP2", "FSDP2 of tied weights", "FSDP2 of a layer, frozen head"]


@pytest.mark.parametrize(
    ("wrapping", "outside"),
    [
        ("FSDP2 of a layer", ["again.weight", "again.bias"]),
        ("FSDP2 without a parameter", ["again.weight"]),
        ("DDP of a layer", ["again.weight", "again.bias"]),
    ],
)
def test_parameters_outside_of_wrappers_are_warned_of_once(two: RankPool, wrapping: str, outside: list[str]) -> None:
    for found in two.run(run_unwrapped, wrapping):
        [said] = found["warnings"]
        assert found["apart"] == outside
        some = f"{len(outside)} trained parameters of Deep, such as {outside[0]}, are outside of DDP and FSDP2"
        one = f"{outside[0]}, a trained parameter of FSDPDeep, is outside of DDP and FSDP2"
        assert said.startswith(some if len(outside) > 1 else one)
        assert "or fully_shard(model) after fully_shard of its layers" in said


@pytest.mark.parametrize("wrapping", WRAPPED_WHOLE)
def test_models_that_are_wrapped_whole_or_not_at_all_are_not_warned_of(two: RankPool, wrapping: str) -> None:
    for found in two.run(run_unwrapped, wrapping):
        assert found["warnings"] == [] and bool(found["apart"]) == (wrapping == "none")


@pytest.mark.parametrize("wrapping", ["none", "FSDP2 summed"])
def test_a_forward_that_failed_is_not_taken_for_the_next_models(two: RankPool, wrapping: str) -> None:
    """If an exception ends the forward of an FSDP2 module, FSDP2 keeps marking that forward as running."""
    right = run_small(None, "summed")
    for found in two.run(run_after_a_failure, "summed", wrapping):
        assert found.get("refused") is None
        for name, gradient in right["gradients"].items():
            torch.testing.assert_close(found["gradients"][name], gradient, atol=1e-12, rtol=1e-10)
    for found in two.run(run_after_a_failure, "averaged", "FSDP2 summed"):
        assert found["refused"].startswith("FSDP2, after"), "the model that runs is still seen"


def test_one_process_may_say_either(two: RankPool) -> None:
    assert run_small(None, "averaged")["loss"] == run_small(None, "summed")["loss"]
    step = flexcp.bind(flexcp.Planner(2, 2, 8, cluster=flexcp.cluster("cpu", 1, 1))([3]))
    with pytest.raises(ValueError, match=r"gradients='mean' is neither 'summed' nor 'averaged'"):
        step.loss(torch.zeros(3, 4), torch.zeros(3, dtype=torch.long), gradients="mean")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("gradients", "wrapper"),
    [("averaged", "DDP"), ("averaged", "DDP, registered"), ("averaged", "FSDP2"), ("summed", "FSDP2 summed")],
)
def test_a_hugging_face_loss_can_be_averaged(two: RankPool, gradients: Gradients, wrapper: str) -> None:
    right = train_alone(RUN)
    for found in two.run(run_huggingface, gradients, wrapper):
        assert found["loss"] == pytest.approx(right.losses[0], rel=1e-6), "Transformers takes its loss in float32"
        torch.testing.assert_close(found["gradient"], right.gradients[0]["lm_head.weight"], atol=1e-7, rtol=1e-5)


@pytest.mark.parametrize(
    ("gradients", "wrapper", "words"),
    [
        ("summed", "DDP", r"DistributedDataParallel averages .* 1/2 of .*gradients='averaged'"),
        ("summed", "DDP, registered", r"DistributedDataParallel averages .* 1/2 of .*gradients='averaged'"),
        ("averaged", "DDP, another count", r"num_items_in_batch=99 is not what flexcp made .*To accumulate gradients"),
        ("averaged", "DDP, own count", r"num_items_in_batch=9 beside a step on 2 ranks does not say how gradients are"),
        ("averaged", "FSDP2, own count", r"num_items_in_batch=9 beside a step on 2 ranks does not say how gradients"),
        ("summed", "FSDP2", r"FSDP2, without .* averages .* 1/2 of .*gradients='averaged'"),
        (
            "averaged",
            "FSDP2 summed",
            r"FSDP2, after .* or set_gradient_divide_factor.* sums .* 2 times .*'summed'",
        ),
        (
            "averaged",
            "FSDP2 summed late",
            r"FSDP2, after .* sums .* 2 times .*before the forward, .*gradients='summed'",
        ),
    ],
)
def test_a_hugging_face_loss_that_is_reduced_otherwise_is_refused(
    two: RankPool, gradients: Gradients, wrapper: str, words: str
) -> None:
    for found in two.run(run_huggingface, gradients, wrapper):
        assert re.match(words, found["refused"])


@pytest.mark.parametrize("taken", ["own", "own, beside an evaluation"])
def test_a_loss_of_ones_own_under_ddp_is_warned_of_where_ranks_hold_different_counts(two: RankPool, taken: str) -> None:
    for found in two.run(warned, taken):
        assert found["warnings"], "python's own filter shows one of them"
        assert re.match(
            r"DistributedDataParallel averages gradients over ranks that hold \d+ to \d+ tokens", found["warnings"][0]
        )
        assert "If it is the mean over this rank's own rows, the gradient is not the batch's" in found["warnings"][0]
        assert "this rank's sum / the labels of all ranks x ranks, the gradient is right" in found["warnings"][0]
        assert "step.loss(logits, labels, gradients='averaged')" in found["warnings"][0]
        assert "step.share(total, count, gradients='averaged')" in found["warnings"][0]
        assert len(set(found["warnings"])) == 1
        assert len(found["warnings"]) <= 2, "once a step"


def test_one_token_more_is_a_difference(two: RankPool) -> None:
    for found in two.run(warned, "one more"):
        assert "ranks that hold 16 to 17 tokens" in found["warnings"][0]


@pytest.mark.parametrize("taken", ["step.loss", "step.share", "gathered"])
def test_whoever_says_how_the_loss_is_divided_is_not_warned_and_is_right(two: RankPool, taken: str) -> None:
    right = run_small(None, "summed")
    for found in two.run(warned, taken):
        assert found["warnings"] == []
        for name, gradient in right["gradients"].items():
            torch.testing.assert_close(found["gradients"][name], gradient, atol=1e-12, rtol=1e-10)


@pytest.mark.parametrize("taken", ["two batches", "equal counts"])
def test_what_may_be_right_is_not_warned_of(two: RankPool, taken: str) -> None:
    """The backward of the shares of two batches together, and a rank's own mean if all ranks hold equally many rows."""
    assert [found["warnings"] for found in two.run(warned, taken)] == [[], []]


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_model_of_two_steps_has_one_loss(two: RankPool, reentrant: bool) -> None:
    """This also holds where reentrant checkpointing runs backwards of its own inside the backward of the loss."""
    assert two.run(warned_of_two_steps, True, reentrant) == [[], []]
    for found in two.run(warned_of_two_steps, False, reentrant):
        assert len(found) == 2, "of both steps"


@pytest.mark.parametrize("wrapper", ["DDP", "DDP, registered", "DDP, compiled", "DDP, as a tuple", "DDP, own loss"])
def test_a_hugging_face_loss_is_said_where_it_is_trained_on(two: RankPool, wrapper: str) -> None:
    """The keywords of ``huggingface.inputs`` are not enough: a user's own mean over the logits is warned of."""
    for found in two.run(run_huggingface, "averaged", wrapper):
        assert len(found["warnings"]) == (1 if wrapper == "DDP, own loss" else 0)


def test_frameworks_that_know_their_loss_say_so_before_a_backward() -> None:
    plan = flexcp.Planner(2, 2, 8, cluster=flexcp.cluster("cpu", 1, 1))([3, 4])
    assert all(step.losses.settled for step in PlannedMicroBatches([([0, 1], plan)]).steps)

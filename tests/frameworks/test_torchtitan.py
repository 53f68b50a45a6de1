"""Tests of the torchtitan adapter with torchtitan's own trainer, models, FSDP2, recomputation, checkpoints and metrics
on CPU ranks.

The reference run uses dense attention inside each rank's own rows; in the run with flexcp both ranks share all
documents.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torchtitan_runs import SAVED, STEPS, Case, trained

from flexcp.measure.ranks import RankPool

SAME = ("loss_metrics/global_avg_loss", "grad_norm", "n_tokens_seen", "step")


def numbers(run: dict[str, Any]) -> list[list[float]]:
    """Return the numbers that runs with and without flexcp both log in every step."""
    return [[float(entry[name]) for name in SAME] for entry in run["logged"]]


def assert_same(ours: dict[str, Any], theirs: dict[str, Any], first: int = 0) -> None:
    """Check losses, gradient norms and token counts from a step on."""
    for mine, right in zip(numbers(ours), numbers(theirs)[first:], strict=True):
        assert mine == pytest.approx(right, rel=1e-5)


def test_torchtitans_trainer_trains_the_same_model(two: RankPool, tmp_path: Path) -> None:
    """The first layer has a window. At the end a run is resumed from a checkpoint."""
    theirs = two.run(trained, str(tmp_path / "theirs"), Case(ours=False))[0]
    assert len(theirs["logged"]) == len({entry[SAME[0]] for entry in theirs["logged"]}) == STEPS
    case = Case(ours=True, recompute="selective", checkpoints=True)
    ours = two.run(trained, str(tmp_path / "ours"), case)
    for rank in ours:
        assert_same(rank, theirs)
        assert rank["calls"] == rank["layers"], "attention ran again though selective checkpointing keeps its results"
        for entry in rank["logged"]:
            assert 1 <= entry["flexcp/token_balance"] < 1.5
            assert 1 <= entry["flexcp/attention_balance"] < 2
            assert entry["loss_metrics/global_max_loss"] == entry["loss_metrics/global_avg_loss"]
    for saved in (tmp_path / "ours" / "checkpoint").glob("step-*"):
        if saved.name != f"step-{SAVED}":
            shutil.rmtree(saved)
    assert_same(two.run(trained, str(tmp_path / "ours"), case)[0], theirs, first=SAVED)


def test_gpt_oss_has_its_windows_and_sinks(two: RankPool, tmp_path: Path) -> None:
    theirs = two.run(trained, str(tmp_path / "theirs"), Case(ours=False, model="gpt_oss", steps=3))[0]
    assert len({entry[SAME[0]] for entry in theirs["logged"]}) == 3
    assert theirs["sinks moved"] == [True, True]
    for rank in two.run(trained, str(tmp_path / "ours"), Case(ours=True, model="gpt_oss", steps=3)):
        assert_same(rank, theirs)
        assert rank["calls"] == rank["layers"] == 2
        for mine, right in zip(rank["sinks"], theirs["sinks"], strict=True):
            torch.testing.assert_close(mine, right, atol=1e-5, rtol=1e-5)


def test_a_window_that_flexcp_does_not_see_is_refused() -> None:
    from flexcp.frameworks.torchtitan import window_of

    def layer(seen: int, said: int | None) -> Any:
        return SimpleNamespace(inner_attention=SimpleNamespace(window=seen), sliding_window_size=said)

    assert [window_of(layer(128, 128)), window_of(layer(0, None)), window_of(layer(16, None))] == [128, 0, 16]
    with pytest.raises(NotImplementedError, match=r"sliding_window_size=128.*attn_backend='varlen'"):
        window_of(layer(0, 128))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"context_parallel_degree": 2}, "set context_parallel_degree and pipeline_parallel_degree to 1"),
        ({"pipeline_parallel_degree": 2}, "set context_parallel_degree and pipeline_parallel_degree to 1"),
        ({"validator": True}, "torchtitan's validator makes batches of its own.*; disable it"),
    ],
)
def test_what_torchtitan_would_do_otherwise_is_refused(change: dict[str, Any], words: str) -> None:
    from flexcp.frameworks.torchtitan import FlexcpTrainer

    degrees = {"context_parallel_degree": 1, "pipeline_parallel_degree": 1, **change}
    validator = SimpleNamespace(enable=degrees.pop("validator", False))
    config: Any = SimpleNamespace(parallelism=SimpleNamespace(**degrees), validator=validator)
    with pytest.raises(NotImplementedError, match=words):
        FlexcpTrainer(config)

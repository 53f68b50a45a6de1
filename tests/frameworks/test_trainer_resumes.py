"""Tests that runs under TRL, Lightning and Megatron-Core resume where they stopped, in the middle of an epoch, and have
the losses of an uninterrupted run; under TRL and Lightning also those of one process.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from resume_runs import SAVED, STEPS, Found, dpo, grpo, lightning, megatron, sft

from flexcp.measure.ranks import RankPool


def assert_it_goes_on(resumed: Found, whole: Found) -> None:
    """Check that the ten losses after a resume are those of the run that was not interrupted."""
    assert len(set(whole.losses)) == STEPS, "steps that cannot be told apart prove nothing"
    assert SAVED % whole.epoch, "the checkpoint is in the middle of an epoch"
    assert SAVED // whole.epoch < (STEPS - 1) // whole.epoch, "and the next begins after it"
    assert len(resumed.losses) == STEPS - SAVED == 10
    assert resumed.losses == pytest.approx(whole.losses[SAVED:], rel=1e-6)


@pytest.mark.parametrize("run", [sft, dpo, grpo, lightning], ids=["sft", "dpo", "grpo", "lightning"])
def test_a_run_goes_on_in_the_middle_of_an_epoch(two: RankPool, tmp_path: Path, run: Callable[..., Found]) -> None:
    pytest.importorskip("lightning" if run is lightning else "trl")
    plain = run(None, str(tmp_path / "plain"), False)
    whole = two.run(run, str(tmp_path / "ours"), False)[0]
    assert whole.losses == pytest.approx(plain.losses, rel=1e-5)
    assert whole.evaluated == pytest.approx(plain.evaluated, rel=1e-5)
    for resumed in two.run(run, str(tmp_path / "ours"), True):
        assert_it_goes_on(resumed, whole)
        assert resumed.evaluated == pytest.approx(whole.evaluated[-1:], rel=1e-6)


def test_rollouts_that_the_model_generates_go_on(two: RankPool, tmp_path: Path) -> None:
    pytest.importorskip("trl")
    whole = two.run(grpo, str(tmp_path), False, True)[0]
    for resumed in two.run(grpo, str(tmp_path), True, True):
        assert_it_goes_on(resumed, whole)


def test_megatron_goes_on_from_its_distributed_checkpoint(two: RankPool, tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    whole = two.run(megatron, str(tmp_path), False)[0]
    for resumed in two.run(megatron, str(tmp_path), True):
        assert_it_goes_on(resumed, whole)

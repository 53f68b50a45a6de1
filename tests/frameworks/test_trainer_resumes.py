"""Tests that runs under TRL and Lightning resume where they stopped, in the middle of an epoch, and have the evaluation
losses of one process.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from resume_runs import SAVED, STEPS, Found, lightning, sft

from flexcp.measure.ranks import RankPool


@pytest.mark.parametrize("run", [sft, lightning], ids=["trl", "lightning"])
def test_a_run_goes_on_in_the_middle_of_an_epoch(two: RankPool, tmp_path: Path, run: Callable[..., Found]) -> None:
    pytest.importorskip({"sft": "trl"}.get(run.__name__, run.__name__))
    plain = run(None, str(tmp_path / "plain"), False)
    whole = two.run(run, str(tmp_path / "ours"), False)[0]
    assert len(set(whole.losses)) == STEPS, "steps that cannot be told apart prove nothing"
    assert whole.losses == pytest.approx(plain.losses, rel=1e-5)
    assert whole.evaluated == pytest.approx(plain.evaluated, rel=1e-5)
    assert SAVED % whole.epoch, "the checkpoint is in the middle of an epoch"
    assert SAVED // whole.epoch < (STEPS - 1) // whole.epoch, "and the next begins after it"
    for resumed in two.run(run, str(tmp_path / "ours"), True):
        assert len(resumed.losses) == STEPS - SAVED == 10
        assert resumed.losses == pytest.approx(whole.losses[SAVED:], rel=1e-6)
        assert resumed.evaluated[-1] == pytest.approx(plain.evaluated[-1], rel=1e-5)

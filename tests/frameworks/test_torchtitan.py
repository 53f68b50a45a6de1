"""Proves the torchtitan adapter with torchtitan's own trainer, models, FSDP2 and checkpointing on CPU ranks: the same losses as theirs.

Their side attends densely inside each rank's own rows; ours shares the documents of both ranks.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from torchtitan_runs import STEPS, trained

from flexcp.measure.ranks import RankPool


def test_torchtitans_trainer_trains_the_same_model(two: RankPool, tmp_path: Path) -> None:
    theirs = two.run(trained, str(tmp_path), False, "none")[0]
    assert len(theirs["losses"]) == STEPS
    assert len(set(theirs["losses"])) == STEPS
    for ours in two.run(trained, str(tmp_path), True, "selective"):
        assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-5)
        assert ours["calls"] == ours["layers"], "attention ran again though selective checkpointing keeps its results"

"""Tests that a training run that is killed with signal 9 and resumed gives bitwise the same samples and losses.
``make data`` kills runs at twenty moments.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lib.resume import disturbed, undisturbed


@pytest.mark.parametrize(("ranks", "kills", "steps"), [(1, 3, 32), (2, 1, 14)])
def test_a_killed_run_ends_with_the_same_samples_and_losses(ranks: int, kills: int, steps: int, tmp_path: Path) -> None:
    expected = undisturbed(tmp_path / "whole", ranks, steps)
    found = disturbed(tmp_path / "killed", ranks, steps, kills, seed=ranks)
    assert found.lines == expected
    assert len(found.moments) == kills
    lines = [json.loads(line) for line in expected]
    assert [line["step"] for line in lines] == list(range(1, steps + 1))
    assert len({line["loss"] for line in lines}) == steps

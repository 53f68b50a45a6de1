"""Tests of the file of work lists that benchmarks/gpu.py makes on one machine and times on another."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import flexcp
import gpu
from flexcp.data.lengths import draw_lengths
from flexcp.executor.run.rank_program import rank_program
from flexcp.measure.kernels.lists import program_lists


def test_lists_read_from_the_file_are_those_of_the_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "DATA", (("web", 8),))
    monkeypatch.setattr(gpu, "PACKS", 1)
    monkeypatch.setattr(gpu, "TOKENS_PER_RANK", 1024)
    file = tmp_path / "plans.npz"
    np.savez_compressed(file, **gpu.plan_work())
    made = dict(np.load(file))
    plan = flexcp.Planner(32, 8, 128, cluster=flexcp.cluster("h100", 1, 8))(draw_lengths("web", 8 * 1024, 0))
    compared, finishing = 0, 0
    for rank in range(0, 8, 2):
        for backward in (False, True):
            slots = program_lists(rank_program(plan, rank, 0, backward), backward)
            lists = [x for slot in slots for x in slot]
            read = gpu.rank_lists(made, f"web/8/0/{rank}/{int(backward)}/")
            assert len(read) == len(lists) > 0
            for mine, theirs in zip(read, lists, strict=True):
                for name, b in vars(theirs).items():
                    a = getattr(mine, name)
                    assert (a is None) == (b is None)
                    assert a is None or np.array_equal(a, b), name
                compared += 1
                finishing += theirs.finishes is not None
    assert compared > finishing > 0

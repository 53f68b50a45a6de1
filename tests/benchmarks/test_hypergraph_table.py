"""Tests of the hypergraph benchmark on one small sample: its ratio is the one of its byte columns, the hypergraph's
plan moves no more bytes than ``blocks``, and its imbalances are at most 1.05.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mtkahypar")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.delitem(sys.modules, "hypergraph", raising=False)
    import hypergraph

    assert len(hypergraph.CASES) == 16
    lines = hypergraph.table([("lambda", "longtail", 1)], repeats=1)
    assert lines[0].count("|") == lines[1].count("|") == lines[2].count("|")
    cells = [cell.strip() for cell in lines[2].split("|")[1:-1]]
    assert cells[:3] == ["lambda", "longtail", "1x8"]
    blocks, ours, ratio = (float(cell) for cell in cells[3:6])
    assert ours <= blocks
    assert ratio == pytest.approx(ours / blocks, abs=0.01)
    assert all(float(x) <= 1.0505 for cell in cells[6:8] for x in cell.split("/"))
    assert 1 <= int(cells[8]) <= 160
    assert lines[-1].startswith("hypergraph moves at most")

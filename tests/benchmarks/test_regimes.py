"""Proves the regimes on one small batch: the gain is static over auto, and the page names every regime."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from flexcp.clusters import cluster

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_one_cell_and_its_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    for name in ("regimes", "simulated"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import regimes

    regime = regimes.REGIMES[0]
    cell = regimes.simulated_cell(regime, cluster("h100", 1, 4), "web", 4096)
    assert cell.gain == cell.static[0] / cell.auto[0] > 0.8
    assert cell.static[1].partition(":")[0] in regimes.STATIC
    text = regimes.page({regime: [cell]})
    assert f"| {regime.words} | 1 | {cell.gain:.2f} | {cell.gain:.2f} | {cell.gain:.2f} |" in text
    assert f"| 1x4 | 4,096 | web | {cell.static[0] / 1e6:,.1f} ({cell.static[1]}) |" in text
    assert len({each.name for each in regimes.REGIMES}) == len(regimes.REGIMES) == 6

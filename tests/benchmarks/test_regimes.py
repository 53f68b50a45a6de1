"""Tests of ``benchmarks/regimes.py`` (when flexcp pays) on one small batch: the gain is the time of the best static
method over that of ``auto``, and the page has the row of a regime.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from flexcp.clusters import cluster
from flexcp.planners.static.dealing import method_of

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_one_cell_and_its_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    for name in ("regimes", "simulated"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import regimes

    regime = regimes.REGIMES[0]
    cell = regimes.simulated_cell(regime, cluster("h100", 1, 4), "web", 4096)
    assert cell.gain == cell.of_batch[0][0] / cell.auto[0] > 0.8
    names = [name for _, name in (*cell.of_batch, *cell.fixed)]
    assert [name.endswith("@load") for name in names] == [False, True, False, True]
    assert all(method_of(name) in regimes.STATIC for name in names)
    assert all(one[0] <= 1.01 * other[0] for one, other in zip(cell.of_batch, cell.fixed, strict=True))
    text = regimes.page({regime: [cell]}, ["## Heads"])
    assert "\n## Heads\n" in text
    gains = " | ".join(f"{x:.2f}" for x in cell.gains[1:])
    assert f"| {regime.words} | 1 | {cell.gain:.2f} | {cell.gain:.2f} | {cell.gain:.2f} | {gains} |" in text
    assert f"| 1x4 | 4,096 | web | {cell.of_batch[0][0] / 1e6:,.1f} ({cell.of_batch[0][1]}) |" in text
    assert len({each.name for each in regimes.REGIMES}) == len(regimes.REGIMES) == 7


def test_a_regime_under_tensor_parallelism_is_that_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import regimes

    step = next(each for each in regimes.REGIMES if each.tp > 1)
    assert step.experiment(step.clusters[0]).shape == step.shape == regimes.ONE
    assert [str(where) for where in step.clusters] == ["h100:8x1", "h100:16x1", "h100:32x1"]


def test_a_gain_is_at_most_that_of_the_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import regimes_heads

    for heads in regimes_heads.SETTINGS:
        gain, most = regimes_heads.gains(heads.shape, cluster("h100", 2, 2), "web", 4096)
        assert 0.99 < gain <= most
    single = [where for heads in regimes_heads.SETTINGS[:2] for where in heads.clusters]
    assert {(where.nodes, where.ranks_per_node) for where in single} == {(32, 1), (64, 1)}
    assert {where.ranks_per_node for where in regimes_heads.SETTINGS[2].clusters} == {2}

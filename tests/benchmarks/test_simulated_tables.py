"""Tests of the simulated tables on samples: in a few cells no static method is faster than ``auto``, as ``make auto``
demands of all cells, and ``groups`` beats fixed grids.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from flexcp.clusters import cluster
from flexcp.shape import Shape

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def load(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.delitem(sys.modules, name, raising=False)
    return __import__(name)


@pytest.mark.parametrize(
    ("where", "lengths", "mask", "whole_step"),
    [
        ("h100:1x8", "web", "causal", True),
        ("a100:2x4", "half", "causal", False),
        ("a100:2x4", "longtail", "shared question", True),
        ("h100:2x4", "video", "lambda", True),
    ],
)
def test_auto_is_behind_no_static_method(
    where: str, lengths: str, mask: str, whole_step: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = load("auto", monkeypatch)
    cells = module.cells_of(module.Setting(where, 4096, mask, whole_step), lengths, (0, 1))
    assert [cell.broken for cell in cells] == [[], []]
    for cell in cells:
        assert cell.floor <= min(cell.auto[0], *(ns for ns, _ in cell.baselines))
        assert cell.share == pytest.approx((cell.headroom - cell.headroom / cell.gains[0]) / (cell.headroom - 1))
        assert [name.endswith("@load") for _, name in cell.baselines] == [False, True, False, True]
        # Entry 0 is the best method of this batch, entry 2 the method fixed for the run.
        assert cell.baselines[0][0] <= cell.baselines[2][0] * 1.05
    text = module.page(cells, [])
    assert f"| 2 | {module.summary('', cells)[2]} |" in text and "By lengths" in text


def test_a_static_method_ahead_of_auto_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    module = load("auto", monkeypatch)
    baselines = ((1000, "usp"), (994, "usp:8,2@load"), (900, "ring"), (900, "ring:2@load"))
    cell = module.Cell(module.SETTINGS[0], "web", 0, (1000, "groups"), baselines, 500)
    assert len(cell.broken) == 1 and "usp:8,2@load is faster than auto (groups) by 0.6%" in cell.broken[0]
    assert cell.share == 0 and cell.headroom == 2
    assert cell.broken[0] in module.page([cell], []) and "In no batch" not in module.page([cell], [])


def test_settings_are_those_of_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    module = load("auto", monkeypatch)
    assert len(module.SETTINGS) == len({s.words for s in module.SETTINGS}) == 15
    assert len(module.LENGTHS) == 7 and len(module.SEEDS) == 3


def test_groups_beat_the_best_fixed_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    module = load("groups", monkeypatch)
    monkeypatch.setattr(module, "SEEDS", 2)
    rings, static, gap, _, degrees = module.compare(cluster("h100", 2, 8), "libra256k", 8192)
    assert rings > 1.1 and static > 0.95 and 1.0 <= gap < 1.2  # static: any kind, most often usp
    assert {1, 8} <= degrees, "whole documents, and teams of a node"
    monkeypatch.setattr(module, "SHAPE", Shape(8, 1, 128, 128))
    degrees = module.compare(cluster("h100", 2, 8), "libra256k", 8192)[-1]
    assert any(d & (d - 1) for d in degrees), "degrees are not only powers of two"

"""Proves the simulated tables on samples: what `make auto` demands holds in a few cells, and `groups` beats fixed grids where it should."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from flexcp.clusters import cluster

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def load(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.delitem(sys.modules, name, raising=False)
    return __import__(name)


@pytest.mark.parametrize(
    ("nodes", "lengths", "mask"),
    [
        (1, "web", "causal"),
        (1, "equal", "full"),
        (4, "libra256k", "shared question"),
        (4, "video", "modality"),
        (4, "images", "lambda"),
        (4, "longtail", "causal"),
    ],
)
def test_auto_is_behind_nobody(nodes: int, lengths: str, mask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cell = load("auto", monkeypatch).measure(nodes, lengths, mask)
    assert cell.broken == []
    assert cell.bound <= cell.auto <= cell.static[0]
    if lengths == "equal":
        assert cell.choice == "dp"


def test_auto_notices_when_it_is_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = load("auto", monkeypatch).Cell("web", "causal", "ring", 110, (100, "usp"), (101, "groups"), 90, 1.0)
    assert len(cell.broken) == 2


def test_groups_beat_the_best_fixed_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    module = load("groups", monkeypatch)
    monkeypatch.setattr(module, "SEEDS", 2)
    rings, static, gap, _, degrees = module.compare(cluster("h100", 2, 8), "libra256k", 8192)
    assert rings > 1.1 and static > 0.95 and 1.0 <= gap < 1.2  # static: any kind, most often usp
    assert any(d & (d - 1) for d in degrees), "degrees are not only powers of two"

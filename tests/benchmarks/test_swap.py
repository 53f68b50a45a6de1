"""Tests of ``benchmarks/swap.py``: a sample of its batches, in which no static method is faster in the same layout, and
what its page says of faster ones.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

import swap
from swap import Cell, cells, page, row

CELL = Cell("attention, 8 / 1 heads", "h100:4x8", "zigzag", gain=2.0, loader=1.5, dynamic=True)


@pytest.mark.parametrize("what", swap.KINDS)
def test_no_static_method_is_faster_in_the_same_layout(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last batch is one for which the closed form of a static method is above its simulated time."""
    monkeypatch.setattr(swap, "TOKENS", (32_768,))
    found = cells(what, "h100:1x8", ("web", "longalign"), (0,))
    assert [cell.layout for cell in found] == ["contiguous", "zigzag"] * 2
    assert all(cell.gain >= 1 and cell.loader > 0.99 for cell in found)
    assert any(cell.dynamic and cell.gain > 1.01 for cell in found)


def test_rows_have_means_and_extremes() -> None:
    assert row("x", [CELL, replace(CELL, gain=0.5, loader=1.0, dynamic=False)]) == (
        ["x", "2", "1.000", "0.500", "2.000", "1", "1.225"]
    )


def test_the_page_says_in_how_many_batches_a_static_method_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swap, "KINDS", {CELL.what: None})
    monkeypatch.setattr(swap, "CLUSTERS", (CELL.cluster,))
    monkeypatch.setattr(swap, "LAYOUTS", (CELL.layout,))
    for gains, says in (
        ([1.0, 0.996], "In no batch is"),
        ([0.994, 1], "In 1 batch is"),
        ([0.9, 0.9], "In 2 batches is"),
    ):
        assert says in page([replace(CELL, gain=gain) for gain in gains], [0])

"""Proves details of a rank's program that do not show in results: adjacent rows become one range, so that they are not
copied by index, and local work that is held back for later is cut at a whole tile.
"""

from __future__ import annotations

import numpy as np
import pytest

from flexcp.executor.run.rank_program import TILE_ROWS, _joined, _rows, _shared_out
from flexcp.masks import area, causal


def test_rows_of_stretches_that_touch_are_a_range_and_others_an_index() -> None:
    assert _rows(np.array([3]), np.array([4])) == slice(3, 7)
    assert _rows(np.array([3, 7, 8]), np.array([4, 1, 2])) == slice(3, 10)
    apart = _rows(np.array([3, 8]), np.array([4, 2]))
    assert isinstance(apart, np.ndarray) and apart.tolist() == [3, 4, 5, 6, 8, 9]
    turned = _rows(np.array([8, 4]), np.array([4, 2]))  # the second stretch ends before the first begins
    assert isinstance(turned, np.ndarray) and turned.tolist() == [8, 9, 10, 11, 4, 5]


def test_ranges_of_the_stream_that_touch_are_one() -> None:
    starts, stops, rows = np.array([0, 10, 25, 30]), np.array([10, 20, 30, 31]), np.array([0, 10, 20, 25])
    assert _joined(starts, stops, rows).tolist() == [[0, 25], [20, 31], [0, 20]]


@pytest.mark.parametrize(
    ("held", "row"),
    [(0, 1024), (1000, 0), (500, 640), (749, 512), (750, 384), (1, 896), (999, 0), (437, 768), (438, 640)],
)
def test_the_last_share_of_own_work_waits_from_a_whole_tile_on(held: int, row: int) -> None:
    """The first r of a causal document's 8 tiles of rows contain about r * r / 64 of the work.

    The work that is not held back comes first, rounded down to whole tiles of rows.
    """
    slices = causal().slices(1024)
    index, parts, later = _shared_out(slices, np.array([True]), held)
    assert (index == 0).all() and area(parts).sum() == area(slices).sum()
    assert row % TILE_ROWS == 0
    assert sorted((*map(int, part[:2]), bool(waits)) for part, waits in zip(parts, later, strict=True)) == [
        (a, b, waits) for a, b, waits in ((0, row, False), (row, 1024, True)) if a < b
    ]


@pytest.mark.parametrize(("held", "cut", "row"), [(250, 1, 640), (750, 0, 640), (125, 1, 768), (500, 0, 1024)])
def test_the_share_is_counted_over_all_own_slices(held: int, cut: int, row: int) -> None:
    """Two own causal documents of equal work, with work that never waits between them: what comes before a slice is
    counted before it is cut.
    """
    one = causal().slices(1024)
    index, parts, later = _shared_out(np.concatenate([one, one, one]), np.array([True, False, True]), held)
    assert area(parts).sum() == 3 * area(one).sum()
    found = sorted((int(i), *map(int, part[:2]), bool(w)) for i, part, w in zip(index, parts, later, strict=True))
    of_cut = [(2 * cut, a, b, waits) for a, b, waits in ((0, row, False), (row, 1024, True)) if a < b]
    assert found == sorted([*of_cut, (1, 0, 1024, False), (2 - 2 * cut, 0, 1024, cut == 0)])


def test_work_with_other_ranks_never_waits_and_own_slices_wait_from_the_end() -> None:
    one = causal().slices(256)
    slices = np.concatenate([one, one, one])
    index, parts, later = _shared_out(slices, np.array([True, False, True]), 500)
    assert area(parts).sum() == 3 * area(one).sum()
    assert {(int(i), bool(waits)) for i, waits in zip(index, later, strict=True)} == {(0, False), (1, False), (2, True)}

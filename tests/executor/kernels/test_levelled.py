"""Proves levelled launches, which cut tiles into parts so that all programs end together: they visit the same blocks,
their parts are ordered, and no program waits forever.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexcp.executor.kernels.cute.items import RECORD, dealt, in_turns, longest_program, records
from flexcp.executor.kernels.cute.levelled import TURN_PRICE, LevelledList, levelled
from flexcp.executor.kernels.tiles import TILE_PRICE, SegmentList, segment_list, tile_list

BLOCK = 128


def causal(lengths: list[int]) -> SegmentList:
    """Return the segments of causal documents laid end to end, in tiles of 32 rows."""
    starts = np.cumsum([0, *lengths])
    slices = np.array([[a, b, a, b, -(1 << 40), 0] for a, b in pairwise(starts)], np.int64)
    return segment_list(tile_list(slices, 32, BLOCK), BLOCK)


def level(made: SegmentList, groups: int, programs: int, descending: bool = False) -> tuple[LevelledList, np.ndarray]:
    """Return the launch after levelling, and the items before."""
    blocks = made.tiles[:, 3].astype(np.int64)
    items = dealt(in_turns(len(blocks), groups, 1), blocks, groups, min(programs, len(blocks) * groups))
    return levelled(made, items, groups, programs, BLOCK, descending), items


def walked(made: SegmentList, items: np.ndarray, groups: int) -> list[tuple[int, ...]]:
    """Return (group, rows, key, mask and limits) of every block of a launch, sorted."""
    found = []
    for item in items[items >= 0].tolist():
        row0, row1, segment, left = made.tiles[item // groups].tolist()
        while left > 0:
            key, count, *rest = made.segments[segment].tolist()
            found += [(item % groups, row0, row1, key + i * BLOCK, *rest) for i in range(count)]
            left, segment = left - count, segment + 1
        assert left == 0
    return sorted(found)


@given(st.lists(st.integers(1, 6000), min_size=1, max_size=12), st.sampled_from([1, 2, 8]), st.integers(1, 140))
def test_a_levelled_launch_walks_the_same_blocks_in_an_order_that_ends(
    lengths: list[int], groups: int, programs: int
) -> None:
    made = causal(lengths)
    found, items = level(made, groups, programs)
    assert walked(found.made, found.items, groups) == walked(made, items, groups)
    assert found.items.shape[1] <= programs and (found.items[-1] == -1).all()
    # A program stops at the first gap in its list, so there must be none before its end.
    there = found.items >= 0
    assert (there[1:] <= there[:-1]).all() and there[0].all()
    where = {int(item): (int(p), int(n)) for n, p in np.argwhere(there) for item in [found.items[n, p]]}
    parts: dict[int, dict[int, tuple[int, int]]] = {}
    for item, place in where.items():
        counter, number = found.parts[item // groups].tolist()
        if counter >= 0:
            parts.setdefault(counter, {})[number] = place
    assert len(parts) * 2 == found.counters
    for by_number in parts.values():
        numbers = sorted(by_number)
        assert [x // 2 for x in numbers] == list(range(len(numbers)))
        assert [x % 2 for x in numbers] == [0] * (len(numbers) - 1) + [1]
        places = [by_number[x] for x in numbers]
        # Parts that other programs wait for belong to programs with lower numbers, which start first.
        assert [p for p, _ in places] == sorted({p for p, _ in places})
        # A part that waits for another one is the last item of its program.
        assert all(n == int(there[:, p].sum()) - 1 for p, n in places[1:])


def test_programs_end_together() -> None:
    # A rectangle of 145 tiles of equal length for 8 groups of heads: 8.8 tiles for each program.
    made = segment_list(tile_list(np.array([[0, 4640, 0, 20_000, -(1 << 40), 1 << 40]]), 32, BLOCK), BLOCK)
    blocks = made.tiles[:, 3].astype(np.int64)
    found, items = level(made, 8, 132)
    mean = (blocks.sum() + len(blocks) * TILE_PRICE) * 8 / 132
    before = longest_program(items, blocks, 8)
    after = longest_program(found.items, found.made.tiles[:, 3].astype(np.int64), 8)
    assert before > 1.02 * mean and after < 1.01 * mean


def test_parts_that_wait_for_each_other_are_few() -> None:
    """400 equal items for 132 programs leave four over; in small parts they would end late, one part after another."""
    made = segment_list(tile_list(np.array([[0, 1600, 0, 6144, -(1 << 40), 1 << 40]]), 32, BLOCK), BLOCK)
    ends, busiest = {}, {}
    for descending in (False, True):
        found, items = level(made, 8, 132, descending)
        waits = int((found.parts[:, 1] // 2).max())
        busiest[descending] = longest_program(found.items, found.made.tiles[:, 3].astype(np.int64), 8)
        ends[descending] = busiest[descending] + TURN_PRICE * waits
    whole = longest_program(items, made.tiles[:, 3].astype(np.int64), 8)
    # In a backward pass no part waits, so there the least work of the busiest program is best.
    assert busiest[True] < busiest[False] < ends[False] < 0.9 * min(whole, ends[True])


def test_a_list_of_fewer_items_than_programs_is_spread() -> None:
    made = causal([4096])
    found, items = level(made, 1, 132)
    few = segment_list(tile_list(np.array([[0, 64, 0, 16_384, -(1 << 40), 1 << 40]]), 32, BLOCK), BLOCK)
    spread, before = level(few, 1, 132)
    assert before.shape[1] == 2 and spread.items.shape[1] > 12
    assert longest_program(spread.items, spread.made.tiles[:, 3].astype(np.int64), 1) < 0.2 * longest_program(
        before, few.tiles[:, 3].astype(np.int64), 1
    )
    assert walked(spread.made, spread.items, 1) == walked(few, before, 1)
    assert found.items.shape[1] >= items.shape[1]


@pytest.mark.parametrize("descending", [False, True])
def test_receivers_get_the_blocks_that_would_have_been_walked_first(descending: bool) -> None:
    """In a backward pass the blocks at the diagonal are visited first, so the programs that receive parts begin with
    those.
    """
    slices = np.array([[0, 64, 0, 9000, -(1 << 40), 1 << 40], [0, 64, 12_000, 16_384, -(1 << 40), 1 << 40]])
    made = segment_list(tile_list(slices, 32, BLOCK), BLOCK)
    blocks = made.tiles[:, 3].astype(np.int64)
    items = dealt(in_turns(len(blocks), 1, 1), blocks, 1, 2)
    found = levelled(made, items, 1, 16, BLOCK, descending)

    def keys(segments: SegmentList, tile: int) -> list[int]:
        _, _, segment, left = segments.tiles[tile].tolist()
        walk = []
        while left > 0:
            key, count = segments.segments[segment, :2].tolist()
            there = [key + i * BLOCK for i in range(count)]
            walk += there[::-1] if descending else there
            left, segment = left - count, segment + 1
        return walk

    for tile in range(2):
        rows = found.made.tiles[tile, :2].tolist()
        parts = {
            int(found.parts[t, 1]) // 2: t
            for t in range(2, len(found.made.tiles))
            if found.made.tiles[t, :2].tolist() == rows
        }
        last = max(parts)
        assert last >= 2, "it is cut over several receivers"
        order = [*range(last - 1, -1, -1), last]
        assert [key for n in order for key in keys(found.made, parts[n])] == keys(made, tile)


def test_a_record_has_what_a_program_begins_an_item_with() -> None:
    made = causal([300, 4640, 77])
    found, _ = level(made, 8, 132)
    table = records(found.items, found.made, 8, found.parts)
    assert table.shape == (*found.items.shape, RECORD) and RECORD % 4 == 0
    assert ((table[..., 0] >= 0) == (found.items >= 0)).all()
    for item, record in zip(found.items[found.items >= 0].tolist(), table[found.items >= 0].tolist(), strict=True):
        tile, group = divmod(item, 8)
        row0, row1, segment, blocks = found.made.tiles[tile].tolist()
        key, count, masked = found.made.segments[segment, :3].tolist()
        assert record[:10] == [row0, row1, segment, blocks, key, count, masked, group, *found.parts[tile].tolist()]
        assert record[10:] == [0, 0]
    plain = records(found.items, found.made, 8)
    assert (plain[..., 8:10] == -1).all() and (plain[..., :8] == table[..., :8]).all()


def test_the_first_part_of_a_tile_begins_its_rows_and_the_last_finishes_them() -> None:
    rectangle = np.array([[0, 4640, 0, 20_000, -(1 << 40), 1 << 40]])
    found, _ = level(segment_list(tile_list(rectangle, 32, BLOCK), BLOCK), 8, 132)
    first, last = 320, 4640
    table = records(found.items, found.made, 8, found.parts, np.array([[first, last]]), np.array([[first, last]]))
    seen = {0: 0, 1: 0}
    for item, record in zip(found.items[found.items >= 0].tolist(), table[found.items >= 0].tolist(), strict=True):
        counter, place = found.parts[item // 8].tolist()
        inside = first <= record[0] and record[1] <= last
        assert record[10] == (inside and (counter < 0 or place % 2 == 1))
        assert record[11] == (inside and (counter < 0 or place // 2 == 0))
        seen[record[10]] += 1
    assert (found.parts[:, 0] >= 0).any() and min(seen.values()) > 0

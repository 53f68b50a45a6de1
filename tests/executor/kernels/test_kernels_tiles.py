"""Proves the work lists of the GPU kernels: replayed in Python, they cover every (query, key) pair of the slices
exactly once, and no other pair.

Also: clear blocks, which kernels run without a mask, contain no pair that a mask would hide; no row is in two tiles;
long tiles come first; splitting tiles keeps the pairs; and little is computed for nothing.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexcp import masks
from flexcp.executor.kernels.tiles import SegmentList, TileList, segment_list, split, tile_list, transposed, useful

SIZE = 150
NAMED = (
    masks.causal(),
    masks.full(),
    masks.window(5, 0),
    masks.window(3, 4),
    masks.lambda_(3, 9),
    masks.shared_question(),
    masks.causal_blockwise(8, 2),
    masks.prefix(7),
)
documents = st.lists(st.tuples(st.integers(1, 36), st.sampled_from(NAMED), st.integers(0, 3)), min_size=1, max_size=4)


def slices_of(parts: list[tuple[int, masks.Mask, int]], keys_at: int = 0) -> np.ndarray:
    """Return the slices of documents with gaps between them, keys shifted by ``keys_at`` against the queries."""
    found, at = [], 0
    for length, mask, gap in parts:
        found.append(masks.shift(mask.slices(length), at + gap, at + gap + keys_at))
        at += gap + length
    return np.concatenate(found)


def dense(slices: np.ndarray) -> np.ndarray:
    q, k = np.mgrid[:SIZE, : SIZE + 20]
    seen = np.zeros(q.shape, int)
    for q0, q1, k0, k1, lo, hi in slices:
        seen += (q >= q0) & (q < q1) & (k >= k0) & (k < k1) & (k - q >= lo) & (k - q <= hi)
    return seen


def block_pairs(rows: range, keys: np.ndarray, band: tuple[int, ...], seen: np.ndarray, edge: bool) -> None:
    lo, hi, end, q0, q1 = band
    for q in rows:
        inside = (keys - q >= lo) & (keys - q <= hi) & (keys < end) & (q0 <= q < q1)
        assert edge or inside.all()
        seen[q, keys[inside]] += 1


def replay(made: TileList, block: int, shape: tuple[int, int], once: bool = True) -> np.ndarray:
    seen, rows = np.zeros(shape, int), np.zeros(shape[0], int)
    for first, last, begin, stop in made.tiles:
        rows[first:last] += 1
        for k0, full0, full1, k1, lo, hi, q0, q1 in made.entries[begin:stop]:
            assert k0 <= full0 <= full1 <= k1
            assert (full0 - k0) % block == 0
            assert (full1 - full0) % block == 0
            band = (lo, hi, k1, q0, q1)
            for start in range(k0, k1, block):
                edge = not full0 <= start < full1
                block_pairs(range(first, last), np.arange(start, min(start + block, k1)), band, seen, edge)
    assert not once or rows.max() <= 1
    assert rows.sum() == made.rows
    return seen


def replay_segments(made: SegmentList, block: int, shape: tuple[int, int]) -> np.ndarray:
    seen = np.zeros(shape, int)
    for first, last, segment, left in made.tiles:
        while left:
            key, count, edge, lo, hi, end, q0, q1 = made.segments[segment]
            for i in range(count):
                keys = np.arange(key + i * block, min(key + (i + 1) * block, end))
                block_pairs(range(first, last), keys, (lo, hi, end, q0, q1), seen, bool(edge))
            left -= count
            segment += 1
    return seen


@settings(max_examples=60, deadline=None)
@given(documents, st.integers(0, 19), st.integers(1, 20), st.integers(1, 20), st.sampled_from([None, 1, 3]))
def test_lists_cover_every_pair_once(
    parts: list[tuple[int, masks.Mask, int]], keys_at: int, height: int, block: int, longest: int | None
) -> None:
    slices = slices_of(parts, keys_at)
    for table, want in ((slices, dense(slices)), (transposed(slices), dense(slices).T)):
        compact = tile_list(table, height, block, compact=True)
        assert np.array_equal(replay(compact, block, want.shape), want)
        made = tile_list(table, height, block)
        assert np.array_equal(replay(made, block, want.shape), want)
        assert np.diff(made.tiles[:, :2]).max() <= height
        cut = segment_list(made, block, longest)
        assert np.array_equal(replay_segments(cut, block, want.shape), want)
        assert cut.tiles[:, 3].sum() == made.blocks
        assert np.all(np.diff(cut.tiles[:, 3]) <= 0)
        assert longest is None or cut.tiles[:, 3].max() <= longest
        parts_of = split(made, block, longest or 1000)
        assert np.array_equal(replay(parts_of, block, want.shape, once=False), want)
        blocks = [sum(-(-(e[3] - e[0]) // block) for e in parts_of.entries[a:b]) for a, b in parts_of.tiles[:, 2:]]
        assert sorted(blocks, reverse=True) == blocks == cut.tiles[:, 3].tolist()
        assert parts_of.longest == blocks[0]
        assert made.longest == segment_list(made, block).tiles[0, 3]


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 18)), min_size=1, max_size=8),
    st.integers(1, 20),
    st.integers(1, 20),
)
def test_branches_of_trees_are_covered_once(segments: list[tuple[int, int]], height: int, block: int) -> None:
    parents, path = [], list[int]()
    for number, (up, _) in enumerate(segments):
        path = path[: max(0, len(path) - up)]
        parents.append(path[-1] if path else -1)
        path.append(number)
    slices = masks.tree(parents, [n for _, n in segments]).slices(sum(n for _, n in segments))
    for table, want in ((slices, dense(slices)), (transposed(slices), dense(slices).T)):
        made = tile_list(table, height, block, compact=True)
        assert np.array_equal(replay(made, block, want.shape), want)
        plain = tile_list(table, height, block)
        assert np.array_equal(replay(plain, block, want.shape), want)
        assert len(made.tiles) <= len(plain.tiles)


def test_a_branch_that_continues_another_is_walked_with_it() -> None:
    # Keys 0 to 29 are one chain of three segments. Rows 30 to 39 branch off the first, so they do not see 10 to 29.
    slices = masks.tree([-1, 0, 1, 0], [10, 10, 10, 10]).slices(40)
    made = tile_list(slices, 10, 8, compact=True)
    keys = {int(tile[0]): made.entries[tile[2] : tile[3], [0, 3]].tolist() for tile in made.tiles}
    assert keys == {0: [[0, 10]], 10: [[0, 20]], 20: [[0, 30]], 30: [[0, 10], [30, 40]]}


@settings(max_examples=30, deadline=None)
@given(documents, st.integers(2, 20), st.integers(1, 20))
def test_short_tiles_can_be_all_edge(parts: list[tuple[int, masks.Mask, int]], height: int, block: int) -> None:
    slices = slices_of(parts)
    made = tile_list(slices, height, block, odd_clear=False)
    assert np.array_equal(replay(made, block, (SIZE, SIZE + 20)), dense(slices))
    for first, last, begin, stop in made.tiles:
        clear = made.entries[begin:stop, 2] - made.entries[begin:stop, 1]
        assert last - first == height or not clear.any()


def test_short_documents_share_a_tile() -> None:
    made = tile_list(slices_of([(3, masks.causal(), 0)] * 8), 12, 16)
    assert made.tiles[:, :2].tolist() == [[0, 12], [12, 24]]


def test_no_tile_has_rows_on_both_sides_of_a_border() -> None:
    slices = slices_of([(3, masks.causal(), 0)] * 8 + [(40, masks.full(), 0)])
    made = tile_list(slices, 12, 16, borders=np.array([6, 30]))
    assert np.array_equal(replay(made, 16, (SIZE, SIZE + 20)), dense(slices))
    assert not any(first < border < last for first, last in made.tiles[:, :2].tolist() for border in (6, 30))
    assert [0, 6] in made.tiles[:, :2].tolist()


def test_odd_rows_see_few_keys() -> None:
    made = tile_list(masks.causal().slices(70), 32, 16)
    assert sorted(made.tiles[:, :2].tolist()) == [[0, 6], [6, 38], [38, 70]]
    keys = tile_list(transposed(masks.causal().slices(70)), 32, 16)
    assert sorted(keys.tiles[:, :2].tolist()) == [[0, 32], [32, 64], [64, 70]]


def test_little_is_computed_for_nothing() -> None:
    for mask, least in ((masks.causal(), 0.98), (masks.full(), 1.0), (masks.window(4095, 0), 0.96)):
        slices = mask.slices(16_384)
        assert useful(slices, tile_list(slices, 32, 128), 32 * 128) >= least


def test_nothing_to_do() -> None:
    made = tile_list(np.zeros((3, 6), np.int64), 8, 8)
    assert (len(made.tiles), len(made.entries), made.rows, made.longest) == (0, 0, 0, 0)
    assert len(segment_list(made, 8, 4).tiles) == 0
    assert (len(split(made, 8, 4).tiles), split(made, 8, 4).longest) == (0, 0)


def test_too_many_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="int32; got row 2147483649"):
        tile_list(np.array([[0, (1 << 31) + 1, 0, 1, -masks.UNBOUNDED, masks.UNBOUNDED]]), 8, 8)

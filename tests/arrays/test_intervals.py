"""Proves the interval arithmetic of planning against point-by-point enumeration: every function, with
its edge cases.
"""

from __future__ import annotations

from collections import Counter
from itertools import groupby

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from flexcp.arrays.intervals import covered_once, cut_apart, offsets, overlaps, spread, united

Ints = NDArray[np.int64]
Interval = tuple[int, int]
quick = settings(max_examples=150, deadline=None)

counts = st.lists(st.integers(0, 6), max_size=12)
groups = st.one_of(st.integers(-3, 3), st.sampled_from([10**6, 10**6 + 1]))
ordered_pair = st.tuples(st.integers(-15, 15), st.integers(-15, 15)).map(lambda p: (min(p), max(p)))
grouped = st.lists(st.tuples(groups, ordered_pair), max_size=14)


def column(values: list[int]) -> Ints:
    return np.array(values, np.int64)


def columns(rows: list[tuple[int, Interval]]) -> tuple[Ints, Ints, Ints]:
    return column([g for g, _ in rows]), column([a for _, (a, _) in rows]), column([b for _, (_, b) in rows])


def maximal_runs(points: list[tuple[int, bool]]) -> list[tuple[int, int, bool]]:
    """Return the longest runs of consecutive points with the same label, from sorted labelled points."""
    found = []
    for (label, _), run in groupby(enumerate(points), key=lambda p: (p[1][1], p[1][0] - p[0])):
        members = [point for _, (point, _) in run]
        found.append((members[0], members[-1] + 1, label))
    return found


def cover(rows: list[tuple[int, Interval]]) -> dict[int, Counter[int]]:
    """For each group, how many intervals cover each point."""
    depth: dict[int, Counter[int]] = {}
    for group, (start, stop) in rows:
        depth.setdefault(group, Counter()).update(range(start, stop))
    return depth


@quick
@given(counts)
def test_spread_is_the_ragged_double_loop(sizes: list[int]) -> None:
    index, within = spread(column(sizes))
    expected = [(i, j) for i, size in enumerate(sizes) for j in range(size)]
    assert list(zip(index.tolist(), within.tolist(), strict=True)) == expected
    assert index.dtype == within.dtype == np.int64


@quick
@given(counts)
def test_offsets_are_the_running_sums_with_the_total_at_the_end(sizes: list[int]) -> None:
    assert offsets(column(sizes)).tolist() == [sum(sizes[:i]) for i in range(len(sizes) + 1)]


@quick
@given(grouped)
def test_united_gives_the_maximal_runs_of_each_groups_points(rows: list[tuple[int, Interval]]) -> None:
    group, start, stop = united(*columns(rows))
    expected = [
        (g, a, b)
        for g, depth in sorted(cover(rows).items())
        for a, b, _ in maximal_runs([(p, True) for p in sorted(depth)])
    ]
    assert list(zip(group.tolist(), start.tolist(), stop.tolist(), strict=True)) == expected


@quick
@given(grouped)
def test_united_drops_inverted_intervals_like_empty_ones(rows: list[tuple[int, Interval]]) -> None:
    inverted = [(g, (b, a)) for g, (a, b) in rows]
    assert [x.tolist() for x in united(*columns(rows + inverted))] == [x.tolist() for x in united(*columns(rows))]


@quick
@given(
    st.lists(st.tuples(st.integers(-5, 40), st.integers(-5, 40)), max_size=10),
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 5)), max_size=8),
)
def test_overlaps_lists_every_pair_that_shares_a_point(asked: list[Interval], gaps: list[Interval]) -> None:
    others, at = [], 0
    for gap, size in gaps:
        others.append((at + gap, at + gap + size))
        at += gap + size
    i, j = overlaps(
        column([a for a, _ in asked]),
        column([b for _, b in asked]),
        column([a for a, _ in others]),
        column([b for _, b in others]),
    )
    expected = [
        (x, y)
        for x, (a, b) in enumerate(asked)
        for y, (c, d) in enumerate(others)
        if set(range(a, b)) & set(range(c, d))
    ]
    assert list(zip(i.tolist(), j.tolist(), strict=True)) == expected


@quick
@given(grouped)
def test_covered_once_cuts_the_union_where_single_cover_changes(rows: list[tuple[int, Interval]]) -> None:
    group, start, stop, once = covered_once(*columns(rows))
    expected = [
        (g, *run)
        for g, depth in sorted(cover(rows).items())
        for run in maximal_runs([(p, depth[p] == 1) for p in sorted(depth)])
    ]
    assert list(zip(group.tolist(), start.tolist(), stop.tolist(), once.tolist(), strict=True)) == expected


def test_touching_intervals_of_different_groups_stay_apart() -> None:
    group, start, stop = united(column([0, 1, 0]), column([0, 5, 3]), column([3, 9, 5]))
    assert [group.tolist(), start.tolist(), stop.tolist()] == [[0, 1], [0, 5], [5, 9]]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 12), st.integers(1, 8)), max_size=7))
def test_cut_apart_parts_are_equal_or_share_no_point(rows: list[tuple[int, int, int]]) -> None:
    group, start, length = np.array(rows, np.int64).reshape(-1, 3).T
    interval, begin, end = cut_apart(group, start, start + length)
    assert np.array_equal(np.lexsort((begin, interval)), np.arange(len(interval)))
    points: list[list[int]] = [[] for _ in rows]
    for i, a, b in zip(interval.tolist(), begin.tolist(), end.tolist(), strict=True):
        assert a < b
        points[i] += range(a, b)
        for j, c, d in zip(interval.tolist(), begin.tolist(), end.tolist(), strict=True):
            assert group[i] != group[j] or (a, b) == (c, d) or b <= c or d <= a
    assert points == [list(range(s, s + n)) for _, s, n in rows]

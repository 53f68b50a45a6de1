"""Proves that planning many short documents takes work in proportion to their number, counted as the steps of the
search.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

import flexcp
from flexcp.batch import make_batch
from flexcp.planners.blocks.pack import BinLimits, RowLoads, make_row_loads, pack, place_node
from flexcp.planners.blocks.row_limits import level_rows

Ints = NDArray[np.int64]
BINS = 8


def short_documents(count: int) -> tuple[RowLoads, Ints]:
    """Return the loads of ``count`` short documents, and all of them as items to pack."""
    lengths = np.random.default_rng(0).integers(1, 400, count)
    loads = make_row_loads(make_batch(lengths, flexcp.causal()), 64, 0, None)
    return loads, np.stack([np.arange(count), np.zeros(count, np.int64), lengths], axis=1)


def limits_of(loads: RowLoads, load_percent: int) -> BinLimits:
    """Return limits that every bin exceeds: ``load_percent`` of the mean load, and 99 % of the mean rows."""
    load = np.full(BINS, loads.total * load_percent // 100 // BINS)
    return BinLimits(load, np.full(BINS, loads.batch.tokens * 99 // 100 // BINS), load)


def steps_of_packing(count: int) -> int:
    loads, items = short_documents(count)
    return pack(loads, items, limits_of(loads, 100)).steps


def steps_of_a_node(count: int) -> int:
    loads, items = short_documents(count)
    limits = replace(limits_of(loads, 50), firm=False)  # one variant instead of five, each of which takes seconds
    return place_node(loads, items, limits, [BINS], 4096, 20_000)[0].steps


@pytest.mark.parametrize(
    ("steps_of", "count"),
    [pytest.param(steps_of_packing, 5_000, id="packing"), pytest.param(steps_of_a_node, 1_000, id="a node")],
)
def test_twice_the_documents_take_at_most_twice_the_steps(steps_of: Callable[[int], int], count: int) -> None:
    assert 0 < steps_of(2 * count) <= 2 * steps_of(count)


def level_rows_one_by_one(
    ranges: list[tuple[int, int, int]], room: list[int], nodes: list[int]
) -> set[tuple[int, int, int]]:
    """Compute what :func:`level_rows` does, with a new search for every range that moves."""
    kept = set(ranges)
    while min(room) < 0:
        donor = room.index(min(room))
        taker = max((r for r in range(len(room)) if room[r] > 0), key=lambda r: (nodes[r] == nodes[donor], room[r], -r))
        rank, a, b = max((each for each in kept if each[0] == donor), key=lambda each: (each[2] - each[1], -each[1]))
        amount = min(-room[donor], room[taker], b - a)
        kept.remove((rank, a, b))
        kept.add((taker, a, a + amount))
        if a + amount < b:
            kept.add((donor, a + amount, b))
        room[donor] += amount
        room[taker] -= amount
    return kept


@pytest.mark.parametrize("seed", range(20))
def test_tokens_over_a_limit_go_to_the_emptiest_rank_of_the_node_first(seed: int) -> None:
    random = np.random.default_rng(seed)
    ranks = int(random.integers(2, 9))
    lengths = random.integers(1, (5, 300)[seed % 2], 60)
    rank, stop = random.integers(0, ranks, 60), np.cumsum(lengths)
    order = random.permutation(60)
    rank, start, stop = rank[order], (stop - lengths)[order], stop[order]
    limits, nodes = np.full(ranks, -(-int(lengths.sum()) // ranks) + seed % 3), np.arange(ranks) // 2
    counts = np.bincount(rank, weights=stop - start, minlength=ranks).astype(np.int64)
    found = level_rows(rank, start, stop, limits, nodes)
    rows = list(zip(rank.tolist(), start.tolist(), stop.tolist(), strict=True))
    expected = level_rows_one_by_one(rows, (limits - counts).tolist(), nodes.tolist())
    assert set(zip(*(column.tolist() for column in found), strict=True)) == expected

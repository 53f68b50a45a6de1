"""Proves how launches of the Hopper kernel are counted: in which turns groups of heads are processed, by the size of
the L2 cache and by balance, and that every block of a work list belongs to some program.
"""

from __future__ import annotations

import numpy as np
import pytest

from flexcp import masks
from flexcp.executor.kernels.hopper import tiles as hopper_tiles
from flexcp.executor.kernels.hopper.tiles import key_tiles, launches, loads, query_tiles, tiles_in_turn
from flexcp.executor.kernels.tiles import segment_list

ROW = (128 + 128) * 2


def even(keys: int, tiles: int = 512) -> hopper_tiles.Ints:
    return np.full(tiles, -(-keys // 128), np.int64)


def test_heads_take_turns_by_the_l2() -> None:
    """Groups of heads take turns only where the keys and values of all KV heads exceed 128 MiB.

    Here these are 8 KV heads of size 128 over more than 32,768 keys. A turn then has as many tiles as there are
    programs.
    """
    turns = [tiles_in_turn(even(n), ROW, 8, 8, 132) for n in (16_384, 32_768, 32_769, 65_536)]
    assert turns == [1, 1, 132, 132]
    assert tiles_in_turn(even(65_536), ROW, 1, 1, 132) == 1
    assert tiles_in_turn(even(65_536), ROW // 2, 4, 4, 132) == 1
    assert tiles_in_turn(even(65_536), ROW, 8, 8, 116) == 116  # with 16 multiprocessors left free
    assert tiles_in_turn(np.zeros(0, np.int64), ROW, 8, 8, 132) == 1


@pytest.mark.parametrize(("mask", "turn"), [(masks.full(), 132), (masks.causal(), 132), (masks.causal_blockwise(), 1)])
def test_but_not_where_few_programs_would_get_all_long_tiles(mask: masks.Mask, turn: int) -> None:
    blocks = segment_list(query_tiles(mask.slices(65_536), 4), 128).tiles[:, 3].astype(np.int64)
    assert tiles_in_turn(blocks, ROW, 8, 8, 132) == turn


def test_loads_are_those_of_the_kernels_own_loop() -> None:
    """Compares with a count of items one by one, in the order in which the kernels' own loop visits them."""
    of_tile = np.array([9, 7, 5, 4, 3, 1, 1], np.int64)
    for groups, turn, programs in ((3, 1, 4), (3, 4, 4), (2, 7, 5), (1, 3, 2), (5, 2, 35)):
        expected = np.zeros(programs, np.int64)
        for program in range(programs):
            item, step = program, 2 * (programs - program) - 1
            while item < len(of_tile) * groups:
                first = item // (turn * groups) * turn
                within = item - first * groups
                expected[program] += of_tile[first + within % min(turn, len(of_tile) - first)]
                item += step
                step = 2 * programs - step
        assert loads(of_tile, groups, turn, programs).tolist() == expected.tolist()
        assert expected.sum() == of_tile.sum() * groups


@pytest.mark.parametrize("share", [1, 4, 6, 7])
@pytest.mark.parametrize("mask", [masks.causal(), masks.full(), masks.lambda_(64, 200), masks.shared_question()])
def test_launches_hold_every_block_as_often_as_heads_pass_it(mask: masks.Mask, share: int) -> None:
    slices = mask.slices(1000)
    queries, keys = query_tiles(slices, share), key_tiles(slices, share)
    (forward,) = launches(slices, 2 * share, 2, ROW, 132, False)
    of_keys, of_queries = launches(slices, 2 * share, 2, ROW, 132, True)
    passes = {1: 2, 4: 2, 6: 6, 7: 14}[share]  # two KV heads times the query heads that are not packed together
    assert np.array_equal(forward, of_queries)
    blocks = (queries.clear_blocks, queries.edge_blocks, len(queries.tiles))
    assert forward.sum(axis=0).tolist() == [passes * count for count in blocks]
    assert of_keys[:, :2].sum(axis=0).tolist() == [passes * keys.clear_blocks, passes * keys.edge_blocks]
    assert of_keys[:, 2].sum() >= 2 * len(keys.tiles)  # long tiles of keys are split
    assert launches(slices[:0], 2 * share, 2, ROW, 132, True) == []

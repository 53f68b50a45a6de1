"""Proves that the keys which rows of a token tree fetch are the same whether they are found by walking up the tree or
by looking at every slice.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import flexcp
from flexcp.batch import make_batch
from flexcp.planners.blocks.pack import BinLimits, RowLoads, make_row_loads, pack
from lib.tree_runs import TreeSizes, random_batch

LARGE = TreeSizes(depth=9, fan_out=5, segment=60, segments=120, documents=3)
BINS = 6


def _packed(loads: RowLoads) -> tuple[list[list[int]], int]:
    batch = loads.batch
    items = np.stack([np.arange(batch.documents), np.zeros(batch.documents, np.int64), batch.lengths], axis=1)
    load, rows = -(-loads.total * 105 // (100 * BINS)), -(-batch.tokens * 105 // (100 * BINS))
    limits = BinLimits(np.full(BINS, load), np.full(BINS, rows), np.full(BINS, load))
    found = pack(loads, items, limits)
    return np.column_stack([found.items, found.bins]).tolist(), found.keys


@pytest.mark.parametrize("seed", range(8))
def test_packing_is_the_same_either_way(seed: int) -> None:
    given = random_batch(seed, LARGE)
    loads = make_row_loads(make_batch(given.lengths, given.mask()), 4, 0, 5)
    by_slices = replace(loads, nested=np.zeros_like(loads.nested))
    assert _packed(loads) == _packed(by_slices)


def test_trees_are_known_and_other_documents_are_not() -> None:
    fan = flexcp.tree([-1] + [0] * 9, [5] * 10)
    window = flexcp.tree([-1] + [0] * 9, [5] * 10, left=3)
    blocks = flexcp.masks.causal_blockwise(block=5)
    loads = make_row_loads(make_batch([50, 50, 50, 50], [fan, flexcp.causal(), window, blocks]), 1, 0, 5)
    assert loads.nested.tolist() == [2, 0, 0, 0]

"""Proves that the search for a token tree's slices by rows finds the same as looking at all slices."""

from __future__ import annotations

import numpy as np
import pytest

import flexcp
from flexcp import batch as batches
from flexcp.batch import make_batch
from flexcp.masks.nested import nesting
from lib.tree_runs import TreeSizes, random_batch

LARGE = TreeSizes(depth=9, fan_out=5, segment=20, segments=120, documents=4)


@pytest.mark.parametrize("seed", range(6))
def test_rows_meet_the_same_slices(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    given = random_batch(seed, LARGE)
    rng = np.random.default_rng(seed)
    documents = rng.integers(0, len(given.lengths), 60)
    ends = np.sort(rng.integers(0, np.array(given.lengths)[documents] + 1, (2, 60)), axis=0)  # some are empty
    keys = np.zeros(60, np.int64), np.array(given.lengths)[documents]
    found = []
    for few in (0, 1 << 40):
        monkeypatch.setattr(batches, "FEW_PAIRS", few)
        mask = make_batch(given.lengths, given.mask()).masks[0]
        index, slices = mask.cuts(documents, *ends, *keys)
        found.append((index, slices, mask.rows_area(documents, *ends)))
    for by_search, by_all in zip(*found, strict=True):
        assert np.array_equal(by_search, by_all)


def test_nesting_of_a_tree() -> None:
    parents = [-1, 0, 1, 1, 0, 4, 4, 4, 0, -1]
    mask = make_batch([10], [flexcp.tree(parents, [1] * 10)]).masks[0]
    assert nesting(mask.first, mask.slices).around.tolist() == parents
    assert nesting(mask.first, mask.slices).level.tolist() == [0, 1, 2, 2, 1, 2, 2, 2, 1, 0]


def test_rows_that_cross_are_not_nested() -> None:
    slices = [(i, i + 2, i, i + 1, -5, 0) for i in range(9)]
    mask = make_batch([11], [flexcp.from_slices(11, slices)]).masks[0]
    assert mask.nesting.nested.tolist() == [False]

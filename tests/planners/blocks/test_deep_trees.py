"""Proves that deep trees are read through few levels, that rows then seem to read at least what they do and not much
more, and that other trees are left alone.
"""

from __future__ import annotations

import numpy as np
import pytest

import flexcp
from flexcp.batch import make_batch
from flexcp.masks import Mask
from flexcp.planners.blocks import deep_trees, pack
from flexcp.planners.blocks.compiled_shared import Reads, fetched, most_spans
from flexcp.planners.blocks.deep_trees import DEEP
from tree_planning import comb


def deep_tree(seed: int, segments: int = 5000) -> Mask:
    """Return a random tree in depth-first order whose segments mostly continue the one before."""
    draw = np.random.default_rng(seed)
    path, parents = [0], [-1]
    for number in range(1, segments):
        if draw.random() < 0.4:
            del path[max(1, len(path) - int(draw.integers(1, 3))) :]
        parents.append(path[-1])
        path.append(number)
    return flexcp.tree(parents, draw.integers(1, 9, segments).tolist())


def reads_of(masks: list[Mask], monkeypatch: pytest.MonkeyPatch, deep: int = DEEP) -> Reads:
    """Return what rows of these trees read, through fewer slices in those of more than ``deep`` levels."""
    monkeypatch.setattr(deep_trees, "DEEP", deep)
    batch = make_batch([int(sum(mask.params[1])) for mask in masks], masks)
    found: Reads = pack.make_row_loads(batch, 4, 0, None).reads
    return found


@pytest.mark.parametrize("mask", [comb(700), deep_tree(0), deep_tree(1)], ids=["comb", "random 0", "random 1"])
def test_rows_seem_to_read_at_least_what_they_do(mask: Mask, monkeypatch: pytest.MonkeyPatch) -> None:
    masks = [flexcp.tree([-1, 0, 0], [5, 6, 7]), mask]
    exact, coarse = (reads_of(masks, monkeypatch, deep) for deep in (1 << 40, DEEP))
    assert exact.nested[1] > 2 * DEEP >= coarse.nested[1] > 0
    assert np.array_equal(exact.slices[:3], coarse.slices[:3]) and exact.first[1] == coarse.first[1] == 3
    assert len(coarse.slices) == coarse.first[-1] < len(exact.slices)
    walks = [0]  # how many slices are around each, and itself
    for around in coarse.around[3:].tolist():
        walks.append(1 + walks[1 + around])
    assert coarse.nested[1] == max(walks), "as many spans are written as this says"
    tokens, draw = int(sum(mask.params[1])), np.random.default_rng(7)
    spans = np.zeros((most_spans(exact) + 1, 2), np.int64)
    sums = np.zeros(2, np.int64)
    for _ in range(300):
        lo, hi = np.sort(draw.choice(tokens + 1, 2, replace=False))
        rows = np.array([[lo, hi]])
        each = [fetched(rows, 1, rows, 1, reads, 1, spans) for reads in (exact, coarse)]
        assert each[0] <= each[1] <= lo
        sums += each
    assert sums[1] <= 2.2 * sums[0]


def test_a_slice_after_one_that_ends_before_it_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every second level is left out: the last kept slice before ``s`` is a leaf whose rows do not see it."""
    parents, lengths = (list(column) for column in comb(301).params[:2])
    p, a, s = 600, 602, 605  # the last segment of the path, and two of its children
    parents += [p, a, a, p, s, s]
    lengths += [1, 1, 1, 2000, 5, 5]
    exact, coarse = (reads_of([flexcp.tree(parents, lengths)], monkeypatch, deep) for deep in (1 << 40, DEEP))
    rows, spans = np.array([[sum(lengths) - 10, sum(lengths)]]), np.zeros((most_spans(exact) + 1, 2), np.int64)
    read, seems = (fetched(rows, 1, rows, 1, reads, 0, spans) for reads in (exact, coarse))
    assert 3 * 301 + 2000 == read <= seems


def test_trees_of_few_levels_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    found = reads_of([comb(100), comb(50)], monkeypatch)
    for mine, exact in zip(found, reads_of([comb(100), comb(50)], monkeypatch, 1 << 40), strict=True):
        assert np.array_equal(mine, exact)

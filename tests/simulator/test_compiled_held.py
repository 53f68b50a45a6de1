"""Proves the compiled loops that list the token segments each rank holds: token by token, ranks hold what their runs
and random pieces say.
"""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from flexcp.simulator.compiled_held import firsts, lay_segments

RANKS, RANGES, OWN_RANGE, STREAM = 3, 2, 1, 60


@pytest.mark.parametrize("own_slot", [-1, 0, 2])
@pytest.mark.parametrize("seed", range(5))
def test_segments_are_the_tokens_of_runs_and_pieces(own_slot: int, seed: int) -> None:
    draw = np.random.default_rng(seed)
    edges = np.unique(np.concatenate([[0, STREAM], draw.integers(1, STREAM, 12)]))
    run_start, run_stop, run_rank = edges[:-1], edges[1:], draw.integers(0, RANKS, len(edges) - 1)
    owner_of = np.repeat(run_rank, run_stop - run_start)
    kept = [np.flatnonzero(owner_of == rank) for rank in range(RANKS)]  # each rank's tokens, in order
    local = np.array([np.searchsorted(kept[rank], token) for rank, token in zip(run_rank, run_start, strict=True)])
    # Pieces of every rank for every other, some empty; each owner's pieces are on a shelf of their own, so that no
    # token is held twice.
    target, owner = (side.ravel() for side in np.indices((RANKS, RANKS)))
    target, owner = target[target != owner], owner[target != owner]
    tokens = np.array([len(kept[rank]) for rank in owner])
    start, stop = np.sort(draw.integers(0, tokens + 1, (2, len(owner))), axis=0)
    slot, heads = draw.integers(1, 4, len(owner)), draw.integers(0, RANGES, len(owner))
    shelf = owner + 1

    sizes = np.array([RANKS, RANGES, OWN_RANGE, own_slot])
    pieces = (target, owner, start, stop, slot, shelf, heads)
    segments, first = lay_segments(run_start, run_stop, run_rank, local, *pieces, sizes)

    # ``[range of heads, rank, token]``: slot and shelf of tokens that are held, -1 for others.
    expected = np.full((2, RANGES, RANKS, STREAM), -1)
    if own_slot >= 0:
        for rank in range(RANKS):
            expected[:, OWN_RANGE, rank, kept[rank]] = np.array([own_slot, 0])[:, None]
    for to, of, low, high, *there, group in zip(target, owner, start, stop, slot, shelf, heads, strict=True):
        expected[:, group, to, kept[of][low:high]] = np.array(there)[:, None]
    np.testing.assert_array_equal(by_token(segments, first), expected)


def by_token(segments: NDArray[np.int64], first: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return segments as ``[slot or shelf, range of heads, rank, token]``.

    Segments of one range and rank must be ascending and disjoint.
    """
    found = np.full((2, RANGES, RANKS, STREAM), -1)
    assert len(first) == RANGES * RANKS + 1 and first[0] == 0 and first[-1] == segments.shape[1]
    for group in range(RANGES * RANKS):
        start, stop, slot, shelf = segments[:, first[group] : first[group + 1]]
        assert (start < stop).all() and (stop[:-1] <= start[1:]).all()
        for a, b, *there in zip(start, stop, slot, shelf, strict=True):
            found[:, group // RANKS, group % RANKS, a:b] = np.array(there)[:, None]
    return found


def test_firsts_are_where_sorted_labels_begin() -> None:
    labels = np.array([4, 0, 2, 2, 4, 4])
    assert firsts(labels, 6).tolist() == np.searchsorted(np.sort(labels), np.arange(7)).tolist()

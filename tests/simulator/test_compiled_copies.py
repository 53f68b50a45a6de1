"""Proves the compiled loops that count copies: bytes and launches of random transfers follow the table in
flexcp.simulator.copies, row by row.
"""

from __future__ import annotations

import numpy as np
import pytest

from flexcp.simulator.compiled_copies import read_again, sum_copies

RANKS, STAGES = 3, 4
# Bytes of a token and head: in a final message, in a partial one, in the accumulator's dtype; then whether it is a
# result.
KINDS = np.array([[2, 3, 5, 0], [7, 11, 13, 0], [17, 19, 23, 1]])


@pytest.mark.parametrize("count", [0, 1, 200])
def test_sums_are_those_of_the_table(count: int) -> None:
    draw = np.random.default_rng(count)
    stage, source = draw.integers(0, STAGES, count), draw.integers(0, RANKS, count)
    order = np.lexsort([source, stage])
    stage, source = stage[order], source[order]
    target, owner = draw.integers(0, RANKS, (2, count))
    kind, partial = draw.integers(0, len(KINDS), count), draw.integers(0, 2, count)
    start, h0 = draw.integers(0, 50, (2, count))
    stop, h1 = start + draw.integers(1, 50, count), h0 + draw.integers(1, 5, count)

    columns = (stage, source, target, kind, owner, start, stop, h0, h1, partial)
    pack, take_in, launches, complete, adds = sum_copies(*columns, KINDS, np.array([RANKS, STAGES]))

    tokens, is_result, own = (stop - start) * (h1 - h0), KINDS[kind, 3] == 1, source == target
    wire = tokens * KINDS[kind, partial]
    lies = np.where(is_result, tokens * KINDS[kind, 2], wire)
    # A result that arrives complete at its owner is laid. Inputs and laid results are read from their message and
    # written; of another result, the sum is read and written as well.
    laid = is_result & (partial == 0) & (owner == target)
    copied = laid | ~is_result
    taken = np.where(own, lies, wire) + np.where(copied, wire, 2 * lies)
    for rank in range(RANKS):
        assert complete[rank] == (lies + wire)[laid & (target == rank)].sum()
        assert adds[rank] == (is_result & (partial == 1) & (owner == target) & (target == rank)).any()
        for s in range(STAGES):
            sent, came = (source == rank) & (stage == s), (target == rank) & (stage == s)
            assert pack[rank, s] == (lies + wire)[sent & ~own].sum()
            assert take_in[rank, s] == taken[came].sum()
            messages = came & ~own
            assert launches[rank, s] == int((messages & copied).any()) + int((messages & ~copied).any())


def test_targets_of_several_results_are_read_and_written_once() -> None:
    draw = np.random.default_rng(0)
    target, start = draw.integers(0, 4, 60), draw.integers(0, 50, 60)
    order = np.lexsort([start, target])
    target, start = target[order], start[order]
    stop, size = start + draw.integers(1, 50, 60), 3 + target
    place = target // 2
    times = np.zeros((4, 100), np.int64)
    for t, first, last in zip(target, start, stop, strict=True):
        times[t, first:last] += 1
    expected = np.maximum(times - 1, 0).sum(axis=1) * (3 + np.arange(4))
    assert read_again(place, target, start, stop, size, 2).tolist() == expected.reshape(2, 2).sum(axis=1).tolist()

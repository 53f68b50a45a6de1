"""Cut trees: sequences that share their beginnings, as several trees where one would be too large.

A tree is cut between its sequences, so that every sequence is whole and in exactly one part, and losses over sequences
are what they were. What a part shares with an earlier one is in both. In the order of the tree neighbours share the
most, so a part is a range of that order, as many sequences as fit; where several places to end it are good, the one
with the least shared there: that is repeated.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flexcp.masks import tree_of

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class TreePart:
    """Sequences of a tree, by their numbers in order, and how many tokens of theirs an earlier part has too."""

    sequences: list[int]
    repeated: int = 0


def parts_that_fit(sequences: Sequence[Ints], least_shared: int, most: int | None) -> list[TreePart]:
    """All sequences in trees of at most ``most`` tokens, in one where it fits;
    a sequence longer than that is a part of its own.
    """
    everything = list(range(len(sequences)))
    if most is None or _tokens(sequences, everything, least_shared) <= most:
        return [TreePart(everything)]
    found: list[TreePart] = []
    before: list[int] = []
    for part in _ranges(sequences, least_shared, most):
        new = _tokens(sequences, before + part, least_shared) - (
            _tokens(sequences, before, least_shared) if before else 0
        )
        found.append(TreePart(sorted(part), _tokens(sequences, part, least_shared) - new))
        before += part
    return found


def _ranges(sequences: Sequence[Ints], least_shared: int, most: int) -> list[list[int]]:
    order = sorted(range(len(sequences)), key=lambda number: sequences[number].tolist())
    found: list[list[int]] = []
    while order:
        count = max(1, _fitting(sequences, order, least_shared, most))
        if count < len(order):
            # Of the ends that leave at least half of what fits, where neighbours share least; of equal ones the last.
            ends = range(count, (count - 1) // 2, -1)
            count = min(ends, key=lambda end: (_shared(sequences[order[end - 1]], sequences[order[end]]), -end))
        found.append(order[:count])
        order = order[count:]
    return found


def _fitting(sequences: Sequence[Ints], order: list[int], least_shared: int, most: int) -> int:
    """How many sequences, in order, are a tree of at most ``most`` tokens: more of them are never fewer tokens."""
    counts = range(1, len(order) + 1)
    return bisect_right(counts, most, key=lambda count: _tokens(sequences, order[:count], least_shared))


def _tokens(sequences: Sequence[Ints], numbers: list[int], least_shared: int) -> int:
    return len(tree_of([sequences[number] for number in numbers], least_shared))


def _shared(one: Ints, other: Ints) -> int:
    """Tokens that two sequences begin with alike."""
    both = min(len(one), len(other))
    differ = np.flatnonzero(one[:both] != other[:both])
    return int(differ[0]) if len(differ) else both

"""Cut trees: divide sequences with common beginnings into several trees if one tree would have too many tokens.

A tree holds the common beginnings of its sequences once (:func:`flexcp.tree_of`). It is cut between its sequences:
every sequence is whole and in exactly one part, so losses over sequences do not change. Tokens that a part shares with
an earlier part are in both. When the sequences are sorted by their tokens, neighbours share the most, so a part is a
range of this order with as many sequences as fit. Of several good places to end a part, the one is taken where the
neighbouring sequences share the fewest tokens, because these are repeated.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flexcp.masks.tree_of import common_beginning, tree_of

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class TreePart:
    """A part of a tree: the numbers of its sequences, ascending, and how many of its tokens earlier parts have too."""

    sequences: list[int]
    repeated: int = 0


def parts_that_fit(sequences: Sequence[Ints], least_shared: int, most: int | None) -> list[TreePart]:
    """Divide sequences of token ids into trees of at most ``most`` tokens; None is no limit.

    All are one part if they fit. A sequence of more than ``most`` tokens is a part of its own. ``least_shared`` is the
    argument of :func:`flexcp.tree_of`: the fewest common tokens that are shared. Parts number the sequences by their
    place in ``sequences``.
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
    """Sort the sequences by their tokens and cut this order into parts of at most ``most`` tokens.

    Return the numbers of the sequences of each part, in this order.
    """
    order = sorted(range(len(sequences)), key=lambda number: sequences[number].tolist())
    found: list[list[int]] = []
    while order:
        count = max(1, _fitting(sequences, order, least_shared, most))
        if count < len(order):
            # Consider the ends that keep at least half of the sequences that fit, and take the one where neighbours
            # share the fewest tokens; of equally good ones, the last.
            ends = range(count, (count - 1) // 2, -1)
            count = min(
                ends, key=lambda end: (common_beginning(sequences[order[end - 1]], sequences[order[end]]), -end)
            )
        found.append(order[:count])
        order = order[count:]
    return found


def _fitting(sequences: Sequence[Ints], order: list[int], least_shared: int, most: int) -> int:
    """Return how many of the first sequences in ``order`` form a tree of at most ``most`` tokens; it may be 0.

    A binary search finds it, because a tree of more sequences never has fewer tokens.
    """
    counts = range(1, len(order) + 1)
    return bisect_right(counts, most, key=lambda count: _tokens(sequences, order[:count], least_shared))


def _tokens(sequences: Sequence[Ints], numbers: list[int], least_shared: int) -> int:
    """Return the number of tokens of the tree that the sequences with these numbers make."""
    return len(tree_of([sequences[number] for number in numbers], least_shared))

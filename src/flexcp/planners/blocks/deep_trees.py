"""Deep trees: what rows of a tree read, with fewer levels, so that packing a deep tree takes no longer than others.

To price a range of rows, packing walks up the slices around it (:class:`flexcp.planners.blocks.compiled_shared.Reads`).
In a chain of thousands of segments, such as an agent's run that branches at every turn, every walk has thousands of
steps, and packing walks thousands of times. A tree with more than ``DEEP`` levels is therefore read through some of its
slices only: about every n-th level is kept. The keys of a slice that is left out count as keys of the slice before it,
which must cover at least the same rows. So rows seem to read a little more than they do: keys of their ancestors'
siblings that lie between two kept slices. This only affects which placement is chosen; what travels is found from the
mask itself.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from flexcp.arrays.intervals import offsets
from flexcp.masks import K1, Q0, Q1

Ints = NDArray[np.int64]
DEEP = 256
"""Trees with more levels than this are read through fewer slices, with about this many levels."""


class TreeReads(NamedTuple):
    """What rows read: fields of :class:`flexcp.planners.blocks.compiled_shared.Reads` of the same names."""

    slices: Ints
    first: Ints
    around: Ints
    nested: Ints


def with_fewer_levels(reads: TreeReads, lengths: Ints) -> TreeReads:
    """Return the same reads with fewer slices in documents of more than ``DEEP`` levels; ``lengths`` are documents'."""
    deep = reads.nested > DEEP
    if not deep.any():
        return reads
    slices, around, nested = [], [], reads.nested.copy()
    for document in range(len(lengths)):
        mine = slice(int(reads.first[document]), int(reads.first[document + 1]))
        found, outer = reads.slices[mine], reads.around[mine]
        if deep[document]:
            found, outer, nested[document] = _thinned(found, outer, int(lengths[document]))
        slices.append(found)
        around.append(outer)
    return TreeReads(
        np.ascontiguousarray(np.concatenate(slices)),
        offsets(np.array([len(x) for x in slices], np.int64)),
        np.concatenate(around),
        nested,
    )


def _thinned(slices: Ints, around: Ints, length: int) -> tuple[Ints, Ints, int]:
    """Return fewer slices of a tree of ``length`` rows, the slice around each (-1: none), and how many are nested."""
    outer, ends = around.tolist(), slices[:, Q1].tolist()
    level = [0] * len(outer)
    for s, a in enumerate(outer):  # a slice comes after the one around it
        level[s] = level[a] + 1 if a >= 0 else 0
    every = -(-(1 + max(level)) // DEEP)
    kept: list[int] = []
    number: list[int] = []  # of each slice, the place of the innermost kept slice that is it or is around it
    for s, a in enumerate(outer):
        if not kept or level[s] % every == 0 or ends[kept[-1]] < ends[s]:
            number.append(len(kept))
            kept.append(s)
        else:
            number.append(number[a])
    found = slices[kept]
    found[:, K1] = np.append(found[1:, Q0], length)
    inside = [number[outer[s]] if outer[s] >= 0 else -1 for s in kept]
    depth = [0] * len(kept)
    for n, a in enumerate(inside):
        depth[n] = depth[a] + 1 if a >= 0 else 1
    return found, np.array(inside, np.int64), max(depth)

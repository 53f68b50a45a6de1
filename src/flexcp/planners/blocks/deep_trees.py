"""Deep trees: what rows of a tree read, with fewer levels, so that packing a deep tree takes no longer than others.

To price a range of rows, packing walks up the slices around it (:class:`flexcp.planners.blocks.compiled_shared.Reads`).
In a path of thousands of segments, such as an agent's run that branches at every turn, every walk has thousands of
steps, and packing walks thousands of times. A tree with more than ``DEEP`` levels is therefore read through some of its
slices only: about every n-th level is kept. The keys of a slice that is left out count as keys of the slice before it,
which must cover at least the same rows. So rows seem to read more than they do: also the siblings of their ancestors
that lie between two kept slices, which at worst, in a path with a leaf beside every segment, doubles what they read.
Packing may then split rows by heads where fetching their keys would move fewer bytes. What travels is found from the
mask itself.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from flexcp.arrays.intervals import offsets
from flexcp.batch import LayerMask
from flexcp.masks import K1, Q0, Q1
from flexcp.masks.nested import nesting

Ints = NDArray[np.int64]
DEEP = 256
"""Trees with more levels than this are read through fewer slices, with about this many levels."""


class TreeReads(NamedTuple):
    """What rows read: fields of :class:`flexcp.planners.blocks.compiled_shared.Reads` of the same names."""

    slices: Ints
    first: Ints
    around: Ints
    nested: Ints


def tree_reads(mask: LayerMask, slices: Ints, nested: Ints, lengths: Ints) -> TreeReads:
    """Return what rows read of a mask, with fewer slices in documents of more than ``DEEP`` levels.

    ``slices`` are those of the mask without thin rows, ``nested`` the levels of each document (0: no tree), and
    ``lengths`` the documents' numbers of rows.
    """
    deep = np.flatnonzero(nested > DEEP)
    if not len(deep):
        return TreeReads(slices, mask.first, mask.nesting.around, nested)
    slices, nested, kept = slices.copy(), nested.copy(), np.ones(len(slices), np.bool_)
    for document in deep.tolist():
        at = np.arange(mask.first[document], mask.first[document + 1])
        at = at[_kept(mask.nesting.level[at] % -(-nested[document] // DEEP) == 0, slices[at, Q1])]
        slices[at, K1] = np.append(slices[at[1:], Q0], lengths[document])
        kept[mask.first[document] : mask.first[document + 1]] = False
        kept[at] = True
    first = offsets(kept.astype(np.int64))[mask.first]
    slices = slices[kept]
    _, around, level = nesting(first, slices)
    for document in deep.tolist():
        nested[document] = 1 + level[first[document] : first[document + 1]].max()
    return TreeReads(slices, first, around, nested)


def _kept(wanted: NDArray[np.bool_], ends: Ints) -> list[int]:
    """Return the numbers of the slices of a tree that are kept: the ``wanted`` ones, and those that must be.

    A slice can be left out only if the last one kept before it covers its rows, so ends no earlier.
    """
    found: list[int] = []
    until = -1
    for number, (want, end) in enumerate(zip(wanted.tolist(), ends.tolist(), strict=True)):
        if want or end > until:
            found.append(number)
            until = end
    return found

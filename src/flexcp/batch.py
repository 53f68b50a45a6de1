"""Batch: the documents of one step laid end to end, and the slices of their masks.

A batch is the input of a planner. It holds the document lengths and, for each mask of the model, the slices of every
document and the number of layers that use the mask. A model with window layers and full layers has two masks. Rows,
keys and slices are in the coordinates of their document; row ``r`` of a document is *stream* token
``starts[document] + r``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from flexcp import masks as mask_algebra
from flexcp.arrays.intervals import offsets, spread
from flexcp.masks import Mask, Tree
from flexcp.masks.nested import Nesting, meeting, nesting

Ints = NDArray[np.int64]
MaskLike = Mask | Sequence[Mask]
MOST_LAYERS = 1 << 22
"""The most layers of a mask; with any number, costs of a step would not fit 64 bits."""
FEW_PAIRS = 1 << 12
"""Below this many (row range, slice) pairs, every pair is tested: a search would take longer."""


@dataclass(frozen=True, eq=False)
class LayerMask:
    """One of the model's masks over the whole batch.

    ``layers`` is how many layers of the model use the mask. ``rules`` holds one :class:`~flexcp.masks.Mask` for all
    documents or one per document; ``slices[first[d]:first[d + 1]]`` are the slices of document d
    (:mod:`flexcp.masks.slices`).
    """

    name: str
    layers: int
    rules: tuple[Mask, ...]
    first: Ints
    slices: Ints

    def rule(self, document: int) -> Mask:
        """Return the :class:`~flexcp.masks.Mask` of a document."""
        return self.rules[document if len(self.rules) > 1 else 0]

    def of_documents(self, documents: Ints) -> tuple[Ints, Ints]:
        """Return (position in ``documents``, index into ``slices``) for every slice of the listed documents."""
        index, within = spread(self.first[documents + 1] - self.first[documents])
        return index, self.first[documents][index] + within

    @cached_property
    def nesting(self) -> Nesting:
        """Which slices lie inside which others, for each document."""
        return nesting(self.first, self.slices)

    def _meeting(self, documents: Ints, q0: Ints, q1: Ints) -> tuple[Ints, Ints]:
        """Return (position in ``documents``, index into ``slices``) for the slices that may have rows in [q0, q1).

        The result contains every slice with such rows and may contain slices without any; callers cut them away.
        """
        counts = self.first[documents + 1] - self.first[documents]
        if int(counts.sum()) < FEW_PAIRS:
            return self.of_documents(documents)
        around, nested = self.nesting.around, self.nesting.nested[documents]
        index, within = spread(np.where(nested, 0, counts))
        positions, found = [index], [self.first[documents][index] + within]
        for document in np.unique(documents[nested]).tolist():
            mine = np.flatnonzero(documents == document)
            own = slice(int(self.first[document]), int(self.first[document + 1]))
            rows = self.slices[own, mask_algebra.Q0], self.slices[own, mask_algebra.Q1]
            index, within = meeting(*rows, around[own], q0[mine], q1[mine])
            positions.append(mine[index])
            found.append(own.start + within)
        position, at = np.concatenate(positions), np.concatenate(found)
        order = np.argsort(position, kind="stable")
        return position[order], at[order]

    def rows_area(self, documents: Ints, q0: Ints, q1: Ints) -> Ints:
        """Count the (query, key) pairs in the rows ``q0 <= q < q1`` of each listed document."""
        index, at = self._meeting(documents, q0, q1)
        areas = mask_algebra.rows_area(self.slices[at], q0[index], q1[index])
        return _summed(index, areas, len(documents))

    def cuts(self, documents: Ints, q0: Ints, q1: Ints, k0: Ints, k1: Ints) -> tuple[Ints, Ints]:
        """Return (position in ``documents``, slice) for each non-empty slice, cut to the given rows and keys.

        Rows are ``q0 <= q < q1`` and keys ``k0 <= k < k1``, one range for each listed document.
        """
        index, at = self._meeting(documents, q0, q1)
        found = mask_algebra.cut(self.slices[at], q0[index], q1[index], k0[index], k1[index])
        keep = ~mask_algebra.is_empty(found)
        return index[keep], found[keep]


@dataclass(frozen=True, eq=False)
class Batch:
    """The documents of one step and the masks of the model.

    ``lengths[d]`` is the number of tokens of document d, ``starts[d]`` its first stream token; ``starts`` has one more
    entry at the end, the total number of tokens.
    """

    lengths: Ints
    starts: Ints
    masks: tuple[LayerMask, ...]

    @property
    def tokens(self) -> int:
        return int(self.starts[-1])

    @property
    def documents(self) -> int:
        return len(self.lengths)

    def mask(self, name: str | None = None) -> LayerMask:
        """Return the mask with the given name, or the first mask if ``name`` is None; raise ValueError if unknown."""
        if name is None:
            return self.masks[0]
        for mask in self.masks:
            if mask.name == name:
                return mask
        raise ValueError(f"no mask named {name!r} in this plan; it has {[m.name for m in self.masks]}")

    @cached_property
    def trees(self) -> dict[int, tuple[Tree | None, ...]]:
        """The documents that are trees under at least one mask: document number to its tree under each mask.

        An entry is None for a mask that makes no tree of the document; it is then one sequence under that mask.
        """
        may = {rule for mask in self.masks for rule in mask.rules if rule.name in mask_algebra.MAY_BRANCH}
        made: dict[tuple[Mask, int], Tree | None] = {}
        found = {}
        for document, length in enumerate(self.lengths.tolist() if may else []):
            for key in {(mask.rule(document), length) for mask in self.masks} - made.keys():
                made[key] = mask_algebra.tree_under(*key) if key[0] in may else None
            by_mask = tuple(made[mask.rule(document), length] for mask in self.masks)
            if any(tree is not None for tree in by_mask):
                found[document] = by_mask
        return found

    @cached_property
    def branches(self) -> dict[int, tuple[Tree | None, ...]]:
        """The :attr:`trees` that branch: some token's predecessor on its path is not the token before it."""
        return {
            document: by_mask
            for document, by_mask in self.trees.items()
            if not all(tree is None or tree.is_one_sequence for tree in by_mask)
        }

    @property
    def layers(self) -> int:
        """Number of layers of the model, summed over the masks."""
        return sum(mask.layers for mask in self.masks)

    def weighted_rows_area(self, documents: Ints, q0: Ints, q1: Ints) -> Ints:
        """Count the (query, key) pairs in rows ``q0 <= q < q1`` of each listed document, summed over all layers."""
        total = np.zeros(len(documents), np.int64)
        for mask in self.masks:
            total += mask.layers * mask.rows_area(documents, q0, q1)
        return total

    def take(self, documents: Sequence[int]) -> Batch:
        """Return a batch of the documents with the given numbers, in the given order."""
        index = np.asarray(documents, np.int64)
        lengths = self.lengths[index]
        masks = []
        for mask in self.masks:
            rules = mask.rules if len(mask.rules) == 1 else tuple(mask.rules[d] for d in documents)
            position, at = mask.of_documents(index)
            first = offsets(np.bincount(position, minlength=len(index)))
            masks.append(LayerMask(mask.name, mask.layers, rules, first, mask.slices[at]))
        return Batch(lengths, offsets(lengths), tuple(masks))

    def document_of(self, tokens: Ints) -> Ints:
        """Return the number of the document that each stream token belongs to."""
        return np.searchsorted(self.starts, tokens, side="right") - 1

    def split_by_document(self, start: Ints, stop: Ints) -> tuple[Ints, Ints, Ints, Ints]:
        """Cut the stream ranges ``start <= t < stop`` at document borders; return (range index, document, q0, q1).

        Each part is the rows ``q0 <= q < q1`` of its document. The parts of ranges beyond the last document (padding)
        are left out.
        """
        stop = np.minimum(stop, self.tokens)
        keep = np.flatnonzero(start < stop)
        first = self.document_of(start[keep])
        last = self.document_of(stop[keep] - 1)
        index, within = spread(last - first + 1)
        document = first[index] + within
        index = keep[index]
        begin = self.starts[document]
        q0 = np.maximum(start[index], begin) - begin
        q1 = np.minimum(stop[index], begin + self.lengths[document]) - begin
        return index, document, q0, q1


def make_batch(
    lengths: Sequence[int] | Ints,
    mask: MaskLike | None = None,
    masks: Mapping[str, tuple[MaskLike, int]] | None = None,
) -> Batch:
    """Make a batch of documents of the given lengths; raise ValueError if an argument is wrong.

    Give either ``mask`` (one for all documents, or one per document; used by one layer) or
    ``masks={"name": (mask, layers), ...}``.
    """
    array = checked_lengths(lengths)
    if (mask is None) == (masks is None):
        raise ValueError("give either mask= or masks={'name': (mask, layers), ...}")
    named = {"mask": (mask, 1)} if masks is None else masks
    if not isinstance(named, Mapping):
        raise ValueError(f"masks= is a mapping {{'name': (mask, layers)}}; got {masks!r}")
    if not named:
        raise ValueError("masks= is empty; give at least one {'name': (mask, layers)}")
    found = []
    for name, entry in named.items():
        if not isinstance(entry, tuple) or len(entry) != 2:
            raise ValueError(f"masks[{name!r}] must be (mask, number of layers); got {entry!r}")
        rule, layers = entry
        if not isinstance(layers, int | np.integer) or not 1 <= layers <= MOST_LAYERS:
            raise ValueError(f"masks[{name!r}] needs a layer count from 1 to {MOST_LAYERS:,}; got {layers!r}")
        found.append(_layer_mask(name, int(layers), rule, array))
    starts = offsets(array)
    return Batch(array, starts, tuple(found))


def _layer_mask(name: str, layers: int, mask: MaskLike | None, lengths: Ints) -> LayerMask:
    """Check one of the model's masks and find its slices for documents of the given lengths.

    Raise ValueError if it is no mask, does not fit a length, or is a list that does not have one mask per document.
    """
    if isinstance(mask, Mask):
        rules: tuple[Mask, ...] = (mask,)
        documents, slices = mask.slices_of(lengths)
    else:
        if not isinstance(mask, Sequence) or not all(isinstance(m, Mask) for m in mask):
            hint = "; masks by name are given as masks={...}" if isinstance(mask, Mapping) else ""
            raise ValueError(f"a mask is made by flexcp.causal(), flexcp.window(...) and the like; got {mask!r}{hint}")
        rules = tuple(mask)
        if len(rules) != len(lengths):
            raise ValueError(f"{len(rules)} masks for {len(lengths)} documents; give one for all, or one per document")
        documents = np.zeros(0, np.int64)
        slices = np.zeros((0, 6), np.int64)
        by_rule: dict[Mask, list[int]] = {}
        for document, rule in enumerate(rules):
            by_rule.setdefault(rule, []).append(document)
        for rule, members in by_rule.items():
            chosen = np.array(members, np.int64)
            where, found = rule.slices_of(lengths[chosen])
            documents = np.concatenate([documents, chosen[where]])
            slices = np.concatenate([slices, found])
        order = np.argsort(documents, kind="stable")
        documents, slices = documents[order], slices[order]
    first = offsets(np.bincount(documents, minlength=len(lengths)))
    return LayerMask(name, layers, rules, first, slices)


def checked_lengths(lengths: Sequence[int] | Ints) -> Ints:
    """Return the document lengths as an array; raise ValueError if they are no positive integers of supported size."""
    try:
        given = np.asarray(lengths)
    except (ValueError, TypeError, RuntimeError):  # rows of different lengths, or a tensor on a device
        given = np.empty(0)
    if given.ndim != 1 or len(given) == 0:
        raise ValueError(f"lengths must be a non-empty list of document lengths; got {lengths!r}")
    # NumPy stores integers beyond 64 bits as objects. They pass here and are refused below as too large.
    huge = given.dtype == object and all(isinstance(n, int) for n in given)
    if not huge and not np.issubdtype(given.dtype, np.integer):
        kinds = [isinstance(n, int | np.integer) and not isinstance(n, bool) for n in lengths]
        where = kinds.index(False) if False in kinds else 0
        wrong = lengths[where]
        raise ValueError(f"document lengths must be integers; document {where} has the length {wrong!r}")
    if given.min() < 1:
        where = int(np.flatnonzero(given < 1)[0])
        way = "drop it: documents have at least 1 token"
        if where == 0 and given[0] == 0 and np.all(np.diff(given) > 0):
            way = "for cumulative lengths: lengths, mask = flexcp.masks.from_cu_seqlens(...); otherwise " + way
        raise ValueError(f"document {where} has length {int(given[where])}; {way}")
    if int(given.max()) >= mask_algebra.LONGEST:
        raise ValueError(f"a document of {int(given.max())} tokens is beyond what flexcp counts exactly (2**30)")
    return given.astype(np.int64)


def _summed(index: Ints, values: Ints, size: int) -> Ints:
    """Return for each i < ``size`` the sum of the values whose ``index`` is i, exact in 64-bit integers.

    ``index`` must ascend.
    """
    running = np.concatenate([np.zeros(1, np.int64), np.cumsum(values, dtype=np.int64)])
    ends = np.searchsorted(index, np.arange(size + 1), side="left")
    return np.asarray(running[ends[1:]] - running[ends[:-1]])

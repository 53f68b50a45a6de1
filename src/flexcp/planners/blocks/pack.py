"""Pack: put row ranges of documents into bins with two limits, load and rows.

An *item* is a range of a document's rows with all their keys, so the rank that gets it computes final outputs. A bin is
a node, a team of ranks or a rank, and the load of rows is their attention work. There are four steps:

- *peel*: while the largest item exceeds a bin, its last rows go into a new bin, and the bin's remaining rows are filled
  with light items. What remains of a causal document is just a shorter document that needs nothing from other bins, and
  a cut at row x costs exactly x keys, so cuts are few.
- *deal*: the other items, largest first, go whole into a bin: the one whose fuller limit, load or rows, is then least
  full.
- *repair*: items are moved, cut or exchanged out of the worst bin while that lowers the violation of limits, weighed
  against the keys that are fetched (:mod:`flexcp.planners.blocks.compiled_repair`).
- *climb*: rows are moved or exchanged between bins that share a document while that saves keys
  (:mod:`flexcp.planners.blocks.compiled_climb`).

*Thin rows.* If a few rows see a whole document (such as the last block of a causal blockwise mask), their rank would
have to fetch all keys. Instead, every owner of keys computes these rows with its own keys. So the load of a row is its
own attention, unless it is thin, plus the attention of thin rows to its key (the slices of thin rows with rows and keys
exchanged). And every bin with rows of such a document also pays for its part of the thin rows.

*Many documents.* Every step takes time in proportion to the number of documents, but repair and climb try pairs of
items. If there are more than a few thousand items, they try only the items of cut documents, heavy items, and a sample
of the light whole items, which are much alike.

Loads are integers, scaled down by a power of two until their products fit 64 bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flexcp.arrays.intervals import offsets, spread
from flexcp.batch import Batch, LayerMask
from flexcp.masks import HI, K0, K1, LO, Q0, Q1, cut, is_empty, rows_area
from flexcp.planners.blocks.deep_trees import tree_reads

Ints = NDArray[np.int64]
THIN = 12
"""A slice with at least this many times as many keys as rows, and at least half of its pairs seen, is thin."""
REPAIR_MOVES = 64
"""The most moves of one repair."""
VARIANTS = np.array([True, True, False, True, False]), np.array([0, 100, 0, -200, 100])
"""Variants of packing, one entry of both arrays for each.

First, whether peeling fills the bin of a cut tail with other rows. Second, where between the aim and the limit the load
of such a bin is, in per cent (0: at the aim, 100: at the limit; negative: below the aim).
"""
VARIANTS_OF_AIMS = np.array([True]), np.array([0])
"""Variants if the limits come from defaults and not from the user: only the first one.

It is nearly as good as the best of all (within 2 % for web, libra256k and longalign).
"""
VARIANTS_WITHOUT_ROW_LIMIT = np.array([False, False]), np.array([0, 100])
"""Variants if rows are not limited."""
UNLIMITED = 1 << 36
"""More rows than any bin can hold; its products with a million and with the ranks of a node fit 64 bits."""
ENOUGH = 2
"""After this many variants that keep all limits, or one that also fetches no keys, no more are tried."""
SWEEPS = 2
"""How often climbing looks at every item at most."""
VIOLATION_WEIGHT = 8
"""A bin that exceeds a limit by the mean costs as much as fetching the keys of the longest document this many times."""


@dataclass(frozen=True, eq=False)
class RowLoads:
    """The costs of a batch's rows, in the form that compiled loops need.

    ``prefix[first[d] + i]`` is the load of document d before row ``i * grain`` (or before its end). ``slices`` are what
    rows read, of the mask with the most work and without thin rows; those of document d begin at ``slice_first[d]``.
    ``thin[m][d]`` is the row at which the thin rows of document d begin under mask m, its length if it has none.
    ``row_price`` is the load of a row besides its attention, over all layers. Loads in ``prefix`` are shifted down by
    ``shift`` bits.
    """

    batch: Batch
    grain: int
    prefix: Ints
    first: Ints
    slices: Ints
    slice_first: Ints
    thin: tuple[Ints, ...]
    thin_keys: Ints
    """What the thin rows of each document cost every rank that has rows of it, as a number of fetched keys."""
    row_price: int
    area_slices: Ints
    """Slices whose areas add up to the load of rows besides their price, of all masks.

    They are what rows read, and, with rows and keys exchanged, what thin rows read of them.
    """
    area_layers: Ints
    """For each of ``area_slices``, the layers that use its mask."""
    area_first: Ints
    """The slices of document d in ``area_slices`` begin at ``area_first[d]``."""
    shift: int
    around: Ints
    """For each slice of ``slices``, the slice around it, counted from the first of its document; negative for none."""
    nested: Ints
    """How many slices of each document are nested in each other at most, or 0 if the document is not a tree.

    :class:`flexcp.planners.blocks.compiled_shared.Reads` says what a tree is here.
    """

    @property
    def ruler(self) -> Any:
        """The loads as a ``Ruler``, the form that compiled loops take."""
        from flexcp.planners.blocks.compiled_shared import Ruler

        return Ruler(self.prefix, self.first, self.batch.lengths, self.grain)

    @property
    def reads(self) -> Any:
        """What rows read as ``Reads``, the form that compiled loops take."""
        from flexcp.planners.blocks.compiled_shared import Reads

        return Reads(self.slices, self.slice_first, self.thin_keys, self.around, self.nested)

    def of_documents(self, documents: Ints) -> tuple[Any, Any]:
        """Return (ruler, reads) of only these documents, which get the numbers 0, 1, ... in this order.

        The loops go many times over all documents that they are given, so fewer documents save time.
        """
        from flexcp.planners.blocks.compiled_shared import Reads, Ruler

        counts = self.slice_first[documents + 1] - self.slice_first[documents]
        index, within = spread(counts)
        at = self.slice_first[documents][index] + within
        ruler = Ruler(self.prefix, self.first[documents], self.batch.lengths[documents], self.grain)
        thin, nested = self.thin_keys[documents], self.nested[documents]
        return ruler, Reads(self.slices[at], offsets(counts), thin, self.around[at], nested)

    @property
    def total(self) -> int:
        """The load of all documents."""
        return int((self.prefix[self.first[1:] - 1] - self.prefix[self.first[:-1]]).sum())

    def load(self, document: Ints, lo: Ints, hi: Ints) -> Ints:
        """Return the loads of row ranges ``lo <= r < hi``; ends are rounded up to multiples of the grain."""
        base = self.first[document]
        return np.asarray(self.prefix[base - (-hi // self.grain)] - self.prefix[base - (-lo // self.grain)])


def make_row_loads(batch: Batch, grain: int, price: int, thin_price: int | None) -> RowLoads:
    """Return the row loads of a batch; ``price`` is the load of a row besides its attention, in pairs of one layer.

    Loads are known at multiples of ``grain`` rows. ``thin_price`` is how many keys cost as much as computing a part of
    a thin row, or None if no rows are to be thin.
    """
    from flexcp.planners.blocks import compiled_level

    first = offsets(-(-batch.lengths // grain) + 1)
    thin, terms, owners = [], [], []
    heaviest, read, reads = -1, batch.masks[0], batch.masks[0].slices
    thin_keys = np.zeros_like(batch.lengths)
    for mask in batch.masks:
        begin = batch.lengths if thin_price is None else _thin_rows(mask, batch.lengths)
        owner = np.repeat(np.arange(batch.documents), np.diff(mask.first))
        length = batch.lengths[owner]
        wide = cut(mask.slices, 0, begin[owner], 0, length)
        narrow = cut(mask.slices, begin[owner], length, 0, length)
        mine = [wide] if is_empty(narrow).all() else [wide, _transposed(narrow)]
        work = mask.layers * sum(int(rows_area(slices, slices[:, Q0], slices[:, Q1]).sum()) for slices in mine)
        if work > heaviest:
            heaviest, read, reads = work, mask, wide
            thin_keys = (batch.lengths - begin) * (thin_price or 0)
        thin.append(begin)
        owners += [owner] * len(mine)
        terms += [(mask.layers, slices) for slices in mine]
    owner = np.concatenate(owners)
    order = np.argsort(owner, kind="stable")
    slices = np.concatenate([slices for _, slices in terms])[order]
    layers = np.concatenate([np.full(len(slices), layers, np.int64) for layers, slices in terms])[order]
    slice_first = offsets(np.bincount(owner, minlength=batch.documents))
    row_price = price * sum(m.layers for m in batch.masks)
    loads = compiled_level.loads_before(batch.lengths, first, grain, row_price, layers, slice_first, slices)
    shift = max(0, int(loads[first[1:] - 1].sum()).bit_length() - 40)
    tree = tree_reads(read, np.ascontiguousarray(reads), _tree_levels(read, reads, batch.lengths), batch.lengths)
    return RowLoads(
        batch,
        grain,
        loads >> shift,
        first,
        tree.slices,
        tree.first,
        tuple(thin),
        thin_keys,
        row_price,
        slices,
        layers,
        slice_first,
        shift,
        tree.around,
        tree.nested,
    )


def _tree_levels(mask: LayerMask, slices: Ints, lengths: Ints) -> Ints:
    """Return how many slices are nested in each other at most in each document that is a tree, and 0 for others.

    In a tree, every row sees itself, all rows before it in its slice, and all keys of the slices around it.
    """
    found = np.zeros(len(lengths), np.int64)
    for document in np.flatnonzero(mask.nesting.nested).tolist():
        mine = slice(int(mask.first[document]), int(mask.first[document + 1]))
        q0, q1, k0, k1, lo, hi = slices[mine].T
        tiled = np.array_equal(k0, q0) and np.array_equal(k1, np.append(q0[1:], lengths[document])) and q0[0] == 0
        if tiled and (q1 >= k1).all() and (hi == 0).all() and (lo <= k0 - (q1 - 1)).all():
            found[document] = 1 + int(mask.nesting.level[mine].max())
    return found


def _transposed(slices: Ints) -> Ints:
    """Return the slices with rows and keys exchanged."""
    out = slices[:, [K0, K1, Q0, Q1, LO, HI]]
    out[:, LO], out[:, HI] = -slices[:, HI], -slices[:, LO]
    return out


def _thin_rows(mask: LayerMask, lengths: Ints) -> Ints:
    """Return the row at which the thin last rows of each document begin, or its length if it has none.

    Thin rows are those of a thin slice (``THIN``) that ends with the document.
    """
    begin = lengths.copy()
    owner = np.repeat(np.arange(len(lengths)), np.diff(mask.first))
    s = mask.slices
    height, width = s[:, Q1] - s[:, Q0], s[:, K1] - s[:, K0]
    seen = rows_area(s, s[:, Q0], s[:, Q1])
    found = (width >= THIN * height) & (2 * seen >= width * height) & (s[:, Q1] == lengths[owner])
    np.minimum.at(begin, owner[found], s[found, Q0])
    return begin


@dataclass(frozen=True, eq=False)
class BinLimits:
    """The most load and rows of each bin, and the load that bins of peeled tails aim for.

    ``firm`` says that the user asked for these limits, so more time is spent on keeping them with few bytes.
    """

    load: Ints
    rows: Ints
    aim: Ints
    firm: bool = True


@dataclass(frozen=True, eq=False)
class Packed:
    """Items in bins: ``items[n, 3]`` (document, first row, last row, last exclusive) and the bin of each.

    ``keys`` is how many keys bins fetch, ``violation`` the worst excess over a limit in millionths of the mean, and
    ``steps`` how many pairs of an item and a bin, or of two items, were tried.
    """

    items: Ints
    bins: Ints
    keys: int
    violation: int
    steps: int


def pack(loads: RowLoads, items: Ints, limits: BinLimits) -> Packed:
    """Put items ``[n, 3]`` (document, first row, last row) into bins within limits, so that few keys are fetched.

    Peel, deal and repair in a few variants, then climb from the best of them.
    """
    from flexcp.planners.blocks import compiled_pack

    table, keys, over, steps = compiled_pack.pack(*_arguments(loads, items, limits, loads.ruler, loads.reads))
    return Packed(table[:, :3], table[:, compiled_pack.BIN], int(keys), int(over), int(steps))


@dataclass(frozen=True, eq=False)
class Placed:
    """A node's items on its ranks, in the tables ``work`` and ``kept`` of :mod:`flexcp.planners.blocks.compiled_node`.

    ``bytes`` is how many bytes are received, ``violation`` the worst excess over a limit in millionths of the mean, and
    ``steps`` how many pairs of an item and a bin, or of two items, were tried.
    """

    work: Ints
    kept: Ints
    bytes: int
    violation: int
    steps: int


def place_node(
    loads: RowLoads, items: Ints, limits: BinLimits, teams: Sequence[int], key_bytes: int, row_bytes: int
) -> list[Placed]:
    """Return the placements of a node's items ``[n, 3]`` on its ranks, one for each team size in ``teams``.

    ``limits`` are those of the node's ranks, ``key_bytes`` the bytes of a key, ``row_bytes`` those of a row's q and o.
    """
    from flexcp.planners.blocks import compiled_node

    documents, measures = np.arange(loads.batch.documents), (loads.ruler, loads.reads)
    if len(items) < len(documents):
        documents, own = np.unique(items[:, 0], return_inverse=True)
        items, measures = np.column_stack([own, items[:, 1:]]), loads.of_documents(documents)
    arguments = _arguments(loads, items, limits, *measures)
    found = []
    for team in teams:
        work, kept, moved, over, steps = compiled_node.node(*arguments, team, key_bytes, row_bytes)
        work[:, 2], kept[:, 1] = documents[work[:, 2]], documents[kept[:, 1]]
        found.append(Placed(work, kept, int(moved), int(over), int(steps)))
    return found


def _arguments(loads: RowLoads, items: Ints, limits: BinLimits, ruler: Any, reads: Any) -> tuple[Any, ...]:
    """Return the arguments that ``compiled_pack.pack`` and ``compiled_node.node`` have in common."""
    weight = VIOLATION_WEIGHT * int(loads.batch.lengths.max())
    limit = (limits.load, limits.rows, limits.aim)
    variants = VARIANTS if limits.firm else VARIANTS_OF_AIMS
    if limits.rows[0] >= UNLIMITED:
        variants = VARIANTS_WITHOUT_ROW_LIMIT
    return items, ruler, *limit, reads, weight, REPAIR_MOVES, *variants, ENOUGH, SWEEPS

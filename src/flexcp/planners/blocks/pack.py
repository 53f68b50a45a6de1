"""Pack: documents as row ranges into bins with two limits, load and rows. The step that planners share.

An *item* is a range of a document's rows with all their keys, so whoever takes it computes final outputs. Four steps:

- *peel*: while the largest item exceeds a bin, open a bin for its last rows and fill the bin's tokens with light items.
  What remains of a causal document is just a shorter document that needs nothing from outside, and a cut at row x costs
  exactly x keys, so cuts are few.
- *deal*: the rest, largest first, whole into the bin that is then fullest least in the worse of its two limits.
- *repair*: move, cut or swap items out of the worst bin while violation, weighed against the keys it fetches, falls
  (:mod:`flexcp.planners.blocks.compiled_repair`).
- *climb*: move or exchange rows between bins that share a document while that saves keys
  (:mod:`flexcp.planners.blocks.compiled_climb`).

*Thin rows.* A few rows that see a whole document (causal blockwise's last block) would make their rank fetch all keys.
Instead every owner of keys computes those rows against its own keys. So the load of a row is its own attention, unless
it is thin, plus what thin rows do with its key: the thin slices, transposed. And a bin with any row of such a document
pays for a part of its thin rows.

*Many documents.* Every step takes time in proportion to documents. Repairing and climbing would try pairs of them: of
more than a few thousand items they try those of cut documents, the heavy ones, and a sample of the light whole ones,
which are much alike.

Loads are exact integers, scaled down (by a power of two) until their products fit 64 bits.
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
from flexcp.masks.nested import FEW, NOT_NESTED

Ints = NDArray[np.int64]
THIN = 12
"""A slice with this many times more keys than rows, most of them seen, is thin."""
REPAIR_MOVES = 64
VARIANTS = np.array([True, True, False, True, False]), np.array([0, 100, 0, -200, 100])
"""Variants of packing: whether tails' tokens are filled, per cent of the slack above the aim that peeled bins use."""
VARIANTS_OF_AIMS = np.array([True]), np.array([0])
"""Where row limits are only aimed for, the first variant is nearly as good as the best of all (web, libra256k,
longalign: within 2 %).
"""
VARIANTS_WITHOUT_ROW_LIMIT = np.array([False, False]), np.array([0, 100])
UNLIMITED = 1 << 36
"""More rows than any bin can hold; its products with a million and with the ranks of a node fit 64 bits."""
ENOUGH = 2
"""Variants within all limits after which no more are tried."""
SWEEPS = 2
"""How often climbing looks at every item."""
VIOLATION_WEIGHT = 8
"""A bin that is over a limit by its mean weighs as much as fetching the longest document this many times."""


@dataclass(frozen=True, eq=False)
class RowLoads:
    """What a batch's rows cost, ready for the compiled loops.

    ``prefix[first[d] + i]`` is the load of document d before row ``i * grain``; ``slices`` are what rows read (of the
    mask with the most work, thin rows left out), with those of document d at ``slice_first[d]``; ``thin[m][d]`` is the
    row at which mask m's thin rows begin.
    """

    batch: Batch
    grain: int
    prefix: Ints
    first: Ints
    slices: Ints
    slice_first: Ints
    thin: tuple[Ints, ...]
    thin_keys: Ints
    """What the thin rows of each document (of that mask) cost every rank with rows of it, as keys."""
    row_price: int
    area_slices: Ints
    """Slices whose rows add up to a row's load besides its price:
    what it reads, and transposed what thin rows read of it.
    """
    area_layers: Ints
    area_first: Ints
    shift: int
    around: Ints
    """The slice of ``slices`` around each, counted from its document's first."""
    nested: Ints
    """How many slices of each document lie around each other at most,
    0 where it is no tree (:class:`compiled_shared.Reads`).
    """

    @property
    def ruler(self) -> Any:
        """The loads as the compiled loops take them."""
        from flexcp.planners.blocks.compiled_shared import Ruler

        return Ruler(self.prefix, self.first, self.batch.lengths, self.grain)

    @property
    def reads(self) -> Any:
        """What rows read as the compiled loops take it."""
        from flexcp.planners.blocks.compiled_shared import Reads

        return Reads(self.slices, self.slice_first, self.thin_keys, self.around, self.nested)

    def of_documents(self, documents: Ints) -> tuple[Any, Any]:
        """Ruler and reads of some documents only, numbered anew: the loops go over all documents they are given,
        many times.
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
        """Load of all documents."""
        return int((self.prefix[self.first[1:] - 1] - self.prefix[self.first[:-1]]).sum())

    def load(self, document: Ints, lo: Ints, hi: Ints) -> Ints:
        """Load of row ranges cut at the grain."""
        base = self.first[document]
        return np.asarray(self.prefix[base - (-hi // self.grain)] - self.prefix[base - (-lo // self.grain)])


def make_row_loads(batch: Batch, grain: int, price: int, thin_price: int | None) -> RowLoads:
    """The row loads of a batch; ``price`` is the load of a row besides its attention, per layer.

    ``thin_price`` is how many keys cost as much as computing a part of a thin row, None if there are to be none.
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
    return RowLoads(
        batch,
        grain,
        loads >> shift,
        first,
        np.ascontiguousarray(reads),
        read.first,
        tuple(thin),
        thin_keys,
        row_price,
        slices,
        layers,
        slice_first,
        shift,
        read.nesting.around,
        _tree_levels(read, reads, batch.lengths),
    )


def _tree_levels(mask: LayerMask, slices: Ints, lengths: Ints) -> Ints:
    """How many slices lie around each other at most in each document that is a tree: every row sees itself, all before
    it in its slice, and all keys of the slices around that. 0 for any other.
    """
    found = np.zeros(len(lengths), np.int64)
    nested = np.flatnonzero(np.diff(mask.first) >= FEW)
    nested = nested[mask.nesting.around[mask.first[nested]] != NOT_NESTED]
    for document in nested.tolist():
        mine = slice(int(mask.first[document]), int(mask.first[document + 1]))
        q0, q1, k0, k1, lo, hi = slices[mine].T
        tiled = np.array_equal(k0, q0) and np.array_equal(k1, np.append(q0[1:], lengths[document])) and q0[0] == 0
        if tiled and (q1 >= k1).all() and (hi == 0).all() and (lo <= k0 - (q1 - 1)).all():
            found[document] = 1 + int(mask.nesting.level[mine].max())
    return found


def _transposed(slices: Ints) -> Ints:
    """Keys as rows and rows as keys."""
    out = slices[:, [K0, K1, Q0, Q1, LO, HI]]
    out[:, LO], out[:, HI] = -slices[:, HI], -slices[:, LO]
    return out


def _thin_rows(mask: LayerMask, lengths: Ints) -> Ints:
    """The row at which each document's thin last rows begin, its length when it has none."""
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
    """What each bin may hold of load and rows, and the load a peeled bin aims for.

    ``firm``: somebody asked for these limits, so it is worth some time to keep them with few bytes.
    """

    load: Ints
    rows: Ints
    aim: Ints
    firm: bool = True


@dataclass(frozen=True, eq=False)
class Packed:
    """Items in bins: columns of ``[items, 3]`` (document, first, last row), their bins; keys fetched;
    worst violation; pairs tried.
    """

    items: Ints
    bins: Ints
    keys: int
    violation: int
    steps: int


def pack(loads: RowLoads, items: Ints, limits: BinLimits) -> Packed:
    """Items ``[n, 3]`` into bins: peel, deal, repair in a few variants, and climb from the best of them."""
    from flexcp.planners.blocks import compiled_pack

    table, keys, over, steps = compiled_pack.pack(*_arguments(loads, items, limits, loads.ruler, loads.reads))
    return Packed(table[:, :3], table[:, compiled_pack.BIN], int(keys), int(over), int(steps))


@dataclass(frozen=True, eq=False)
class Placed:
    """A node's items on its ranks, in the columns of :mod:`flexcp.planners.blocks.compiled_node`; bytes received;
    worst violation; pairs tried.
    """

    work: Ints
    kept: Ints
    bytes: int
    violation: int
    steps: int


def place_node(
    loads: RowLoads, items: Ints, limits: BinLimits, teams: Sequence[int], key_bytes: int, row_bytes: int
) -> list[Placed]:
    """Items ``[n, 3]`` of a node to its ranks, once by teams of each size."""
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
    """What the compiled loops take."""
    weight = VIOLATION_WEIGHT * int(loads.batch.lengths.max())
    limit = (limits.load, limits.rows, limits.aim)
    variants = VARIANTS if limits.firm else VARIANTS_OF_AIMS
    if limits.rows[0] >= UNLIMITED:
        variants = VARIANTS_WITHOUT_ROW_LIMIT
    return items, ruler, *limit, reads, weight, REPAIR_MOVES, *variants, ENOUGH, SWEEPS

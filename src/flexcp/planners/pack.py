"""Pack: documents as row ranges into bins with two limits, load and rows. The step that planners share.

An *item* is a range of a document's rows with all their keys, so whoever takes it computes final outputs. Three moves:

- *peel*: while the largest item exceeds a bin, open a bin for its last rows and fill the bin's tokens with light items. What remains of a
  causal document is just a shorter document that needs nothing from outside, and a cut at row x costs exactly x keys, so cuts are few.
- *deal*: the rest, largest first, whole into the bin that is then fullest least in the worse of its two limits.
- *repair*: move, cut or swap items out of the worst bin while violation, weighed against the keys it fetches, falls.

*Thin rows.* A few rows that see a whole document (causal blockwise's last block) would make their rank fetch all keys. Instead
every owner of keys computes those rows against its own keys. So the load of a row is its own attention, unless it is thin, plus
what thin rows do with its key: the thin slices, transposed. Everything else here does not know the difference.

Loads are exact integers, scaled down (by a power of two) until their products fit 64 bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flexcp.batch import Batch, LayerMask
from flexcp.intervals import offsets, spread
from flexcp.masks import HI, K0, K1, LO, Q0, Q1, cut, is_empty, rows_area

Ints = NDArray[np.int64]
THIN = 12
"""A slice with this many times more keys than rows, most of them seen, is thin."""
REPAIR_MOVES = 64
VARIANTS = ((True, 0), (False, 0), (True, 100), (True, -200), (False, 100))
"""(fill tails' tokens, per cent of the slack above the aim that peeled bins use)."""
VIOLATION_WEIGHT = 8
"""A bin that is over a limit by its mean weighs as much as fetching the longest document this many times."""


@dataclass(frozen=True, eq=False)
class Field:
    """What a batch's rows cost, ready for the compiled loops.

    ``prefix[first[d] + i]`` is the load of document d before row ``i * grain``; ``slices`` are what rows read (of the mask with the most
    work, thin rows left out), with those of document d at ``slice_first[d]``; ``thin[m][d]`` is the row at which mask m's thin rows begin.
    """

    batch: Batch
    grain: int
    prefix: Ints
    first: Ints
    slices: Ints
    slice_first: Ints
    thin: tuple[Ints, ...]
    row_price: int
    area_slices: Ints
    """Slices whose rows add up to a row's load besides its price: what it reads, and transposed what thin rows read of it."""
    area_layers: Ints
    area_first: Ints
    shift: int

    @property
    def total(self) -> int:
        """Load of all documents."""
        return int((self.prefix[self.first[1:] - 1] - self.prefix[self.first[:-1]]).sum())

    def load(self, document: Ints, lo: Ints, hi: Ints) -> Ints:
        """Load of row ranges cut at the grain."""
        base = self.first[document]
        return np.asarray(self.prefix[base - (-hi // self.grain)] - self.prefix[base - (-lo // self.grain)])


def make_field(batch: Batch, grain: int, price: int, split_thin: bool) -> Field:
    """The field of a batch; ``price`` is the load of a row besides its attention, per layer."""
    counts = -(-batch.lengths // grain) + 1
    first = offsets(counts)
    document, within = spread(counts)
    rows = np.minimum(within * grain, batch.lengths[document])
    row_price = price * sum(m.layers for m in batch.masks)
    loads = rows * row_price
    thin, terms, heaviest = [], [], (-1, batch.masks[0].first, batch.masks[0].slices)
    owners = []
    for mask in batch.masks:
        begin = _thin_rows(mask, batch.lengths) if split_thin else batch.lengths
        thin.append(begin)
        owner = np.repeat(np.arange(batch.documents), np.diff(mask.first))
        wide = cut(mask.slices, 0, begin[owner], 0, batch.lengths[owner])
        narrow = cut(mask.slices, begin[owner], batch.lengths[owner], 0, batch.lengths[owner])
        mine = [(mask.layers, mask.first, wide)]
        if not is_empty(narrow).all():
            mine.append((mask.layers, mask.first, _transposed(narrow)))
        work = np.zeros(len(rows), np.int64)
        for layers, start, slices in mine:
            work += layers * _areas_before(slices, start, document, rows)
        loads = loads + work
        terms += mine
        owners += [owner] * len(mine)
        if int(work[first[1:] - 1].sum()) > heaviest[0]:
            heaviest = (int(work[first[1:] - 1].sum()), mask.first, wide)
    total = int(loads[first[1:] - 1].sum())
    shift = max(0, total.bit_length() - 40)
    owner = np.concatenate(owners)
    order = np.argsort(owner, kind="stable")
    return Field(
        batch,
        grain,
        loads >> shift,
        first,
        np.ascontiguousarray(heaviest[2]),
        heaviest[1],
        tuple(thin),
        row_price,
        np.concatenate([slices for _, _, slices in terms])[order],
        np.concatenate([np.full(len(slices), layers, np.int64) for layers, _, slices in terms])[order],
        offsets(np.bincount(owner, minlength=batch.documents)),
        shift,
    )


def _areas_before(slices: Ints, first: Ints, document: Ints, rows: Ints) -> Ints:
    """Pairs before each row of each listed document."""
    index, within = spread(first[document + 1] - first[document])
    areas = rows_area(slices[first[document][index] + within], 0, rows[index])
    total = np.zeros(len(rows), np.int64)
    np.add.at(total, index, areas)
    return total


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
class Limits:
    """What each bin may hold of load and rows, and the load a peeled bin aims for."""

    load: Ints
    rows: Ints
    aim: Ints


@dataclass(frozen=True, eq=False)
class Packed:
    """Items in bins: columns of ``[items, 3]`` (document, first, last row), their bins; keys fetched; worst violation."""

    items: Ints
    bins: Ints
    keys: int
    violation: int


def pack(field: Field, items: Ints, limits: Limits) -> Packed:
    """Items ``[n, 3]`` into bins: peel, deal, repair in a few variants; the best of them."""
    from flexcp.planners import loops

    table, keys, over = loops.pack(
        items,
        field.prefix,
        field.first,
        field.grain,
        limits.load,
        limits.rows,
        limits.aim,
        field.slices,
        field.slice_first,
        VIOLATION_WEIGHT * int(field.batch.lengths.max()),
        REPAIR_MOVES,
        np.array([fill for fill, _ in VARIANTS]),
        np.array([aim for _, aim in VARIANTS]),
    )
    return Packed(table[:, :3], table[:, loops.BIN], int(keys), int(over))

"""Pack: documents as row ranges into bins with two limits, compute and tokens. The step that planners share.

An *item* is a range of a document's rows with all their keys, so whoever takes it computes final outputs. Three moves:

- *peel*: while the largest item exceeds a bin, open a bin and give it the item's last rows. What remains of a causal document is just a
  shorter document that needs nothing from outside, so cuts are few.
- *pack*: the rest, longest first, whole into the bin that fills least (in the worse of its two limits).
- *level*: what still exceeds a limit moves row by row, from full bins to empty ones. This step makes a limit hold by construction, up to
  one row.

Loads are exact integers. Rows are cut at multiples of ``GRAIN`` except when levelling.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from flexcp.batch import Batch

Ints = NDArray[np.int64]
GRAIN = 64


@dataclass(frozen=True)
class Item:
    """Rows ``first <= row < last`` of a document."""

    document: int
    first: int
    last: int

    @property
    def rows(self) -> int:
        return self.last - self.first


class RowLoads:
    """What rows cost: attention pairs (each mask as often as layers use it) plus a price per row."""

    def __init__(self, batch: Batch, price: int) -> None:
        self.batch, self.price = batch, price
        self._prefix: dict[int, Ints] = {}
        documents = np.arange(batch.documents, dtype=np.int64)
        whole = batch.weighted_rows_area(documents, np.zeros_like(documents), batch.lengths) + price * batch.lengths
        self.documents = [int(x) for x in whole]
        self.total = int(whole.sum())

    def of(self, item: Item) -> int:
        """The item's load."""
        if item.first == 0 and item.last == int(self.batch.lengths[item.document]):
            return self.documents[item.document]
        return self.before(item.document, item.last) - self.before(item.document, item.first)

    def before(self, document: int, row: int) -> int:
        """Load of the rows before ``row``."""
        prefix, near = self._prefix_of(document), row // GRAIN
        value = int(prefix[near])
        return value if row % GRAIN == 0 else value + int(self._fine(document, near * GRAIN, row))

    def first_row_reaching(self, document: int, load: int) -> int:
        """The smallest row before which at least ``load`` lies (the document's length at most)."""
        prefix = self._prefix_of(document)
        length = int(self.batch.lengths[document])
        near = max(int(np.searchsorted(prefix, load, side="left")) - 1, 0)
        low, high = near * GRAIN, min((near + 1) * GRAIN, length)
        rows = np.arange(low, high + 1, dtype=np.int64)
        many = np.full(len(rows), document, np.int64)
        fine = int(prefix[near]) + self.batch.weighted_rows_area(many, np.full_like(rows, low), rows)
        fine = fine + self.price * (rows - low)
        return min(low + int(np.searchsorted(fine, load, side="left")), length)

    def _fine(self, document: int, low: int, high: int) -> int:
        one = np.array([document], np.int64)
        return int(self.batch.weighted_rows_area(one, np.array([low]), np.array([high]))[0]) + self.price * (high - low)

    def _prefix_of(self, document: int) -> Ints:
        if document not in self._prefix:
            rows = np.arange(0, int(self.batch.lengths[document]) + GRAIN, GRAIN, dtype=np.int64)
            many = np.full(len(rows), document, np.int64)
            areas = self.batch.weighted_rows_area(many, np.zeros_like(rows), rows)
            self._prefix[document] = areas + self.price * np.minimum(rows, self.batch.lengths[document])
        return self._prefix[document]


@dataclass
class Bin:
    """Items given to one node or rank, with what they add up to."""

    items: list[Item] = field(default_factory=list)
    load: int = 0
    rows: int = 0

    def add(self, item: Item, load: int) -> None:
        self.items.append(item)
        self.load += load
        self.rows += item.rows


@dataclass(frozen=True)
class Limits:
    """What a bin should hold (``load``, ``rows``) and may hold at most; None is no limit on rows."""

    load: int
    rows: int | None
    aim: int
    """Load a peeled bin is filled to: the mean plus most of the tolerance, because every cut avoided is bytes avoided."""


def pack(items: list[Item], loads: RowLoads, count: int, limits: Limits) -> list[Bin]:
    """Peel and pack ``items`` into ``count`` bins; limits may still be exceeded where no whole item fits."""
    bins = [Bin() for _ in range(count)]
    waiting = sorted(items, key=lambda i: (-loads.of(i), i.document, i.first))
    opened = 0
    while waiting and opened < count - 1 and loads.of(waiting[0]) > limits.aim:
        item = waiting.pop(0)
        tail = _tail(item, loads, limits)
        bins[opened].add(tail, loads.of(tail))
        opened += 1
        rest = Item(item.document, item.first, tail.first)
        if rest.rows:
            waiting.append(rest)
            waiting.sort(key=lambda i: (-loads.of(i), i.document, i.first))
    mean_rows = max(1, sum(b.rows for b in bins) + sum(i.rows for i in waiting)) / count
    mean_load = max(1, sum(b.load for b in bins) + sum(loads.of(i) for i in waiting)) / count
    for item in waiting:
        _place(item, loads, bins, limits, mean_load, mean_rows)
    return bins


def _tail(item: Item, loads: RowLoads, limits: Limits) -> Item:
    """The item's last rows that fill one bin."""
    wanted = loads.before(item.document, item.last) - limits.aim
    first = loads.first_row_reaching(item.document, wanted)
    first = -(-first // GRAIN) * GRAIN  # round toward fewer rows, never over the limit
    if limits.rows is not None:
        first = max(first, item.last - limits.rows)
    return Item(item.document, min(max(first, item.first), item.last - 1), item.last)


def _place(item: Item, loads: RowLoads, bins: list[Bin], limits: Limits, mean_load: float, mean_rows: float) -> None:
    """The whole item into the bin that is fullest least; a bin over its limits is taken only when all are."""
    load = loads.of(item)

    def fullness(b: Bin) -> tuple[bool, float, bool]:
        over = b.load + load > limits.load or (limits.rows is not None and b.rows + item.rows > limits.rows)
        worst = (b.load + load) / mean_load
        if limits.rows is not None:
            worst = max(worst, (b.rows + item.rows) / mean_rows)
        # A bin that has rows of this document already holds some of its keys.
        return over, round(worst, 6), all(i.document != item.document for i in b.items)

    best = min(range(len(bins)), key=lambda i: (fullness(bins[i]), i))
    bins[best].add(item, load)


def level(bins: list[Bin], loads: RowLoads, limit: int, nodes: list[int]) -> None:
    """Move rows from bins over ``limit`` into bins under it until none is over, up to one row; same node first."""
    while True:
        donor = max(range(len(bins)), key=lambda i: (bins[i].load, -i))
        excess = bins[donor].load - limit
        takers = [i for i in range(len(bins)) if i != donor and bins[i].load < limit]
        if excess <= 0 or not takers:
            return
        taker = min(takers, key=lambda i: (nodes[i] != nodes[donor], bins[i].load, i))
        # The heaviest item gives its last rows: they carry the most load per row moved.
        at = max(range(len(bins[donor].items)), key=lambda i: (loads.of(bins[donor].items[i]), -i))
        item = bins[donor].items[at]
        amount = min(excess, limit - bins[taker].load)
        border = loads.first_row_reaching(item.document, loads.before(item.document, item.last) - amount)
        border = max(border, item.first)
        if border >= item.last:  # one row is more than what is left to move
            border = item.last - 1
            if loads.of(Item(item.document, border, item.last)) + bins[taker].load >= bins[donor].load:
                return
        moved, rest = Item(item.document, border, item.last), Item(item.document, item.first, border)
        load = loads.of(moved)
        bins[taker].add(moved, load)
        bins[donor].load -= load
        bins[donor].rows -= moved.rows
        bins[donor].items[at : at + 1] = [rest] if rest.rows else []

"""Rank program: what one rank does for one mask in one direction, derived from the plan as integers, without torch.

A rank holds tokens on *shelves*. The first shelf of each side (queries, keys) holds the rank's own tokens in stream
order with all heads. Each (side, stage, head range) in which pieces arrive has another shelf, with its tokens in stream
order too. So tokens that came from several ranks lie side by side, and the work consists of few large slices.

Regions (the parts of the attention matrix that the plan gives this rank) are cut by shelves into work, which runs in
the slot given by :mod:`flexcp.plan.slots`. If the plan holds back a share of the work on own rows and own keys, to hide
transfers of results, that share is cut off at a whole tile. Results accumulate in the rows of the shelf that holds
their queries (o, dq) or keys (dkv), and are sent from there. Results of own rows that arrive complete are *laid*
(:mod:`flexcp.executor.run.laid_rows`).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from flexcp import masks
from flexcp.arrays.intervals import overlaps
from flexcp.executor.run.laid_rows import NO_AREAS, joined_areas
from flexcp.masks import K0, K1, Q0, Q1
from flexcp.plan.execution import margins
from flexcp.plan.memory import KEYS, QUERIES, Layout, arena_layout, kept_starts
from flexcp.plan.plan import Plan
from flexcp.plan.program import Transfers
from flexcp.plan.slots import held_slot, pass_inputs, work_slot
from flexcp.shape import OUTPUTS, QUERY_SIDED, Kind

Ints = NDArray[np.int64]
Rows = slice | Ints
"""Rows of a shelf: a range, or an array of row numbers."""
TILE_ROWS = 128
"""Own work that is split between two slots is cut at a multiple of this many rows from the slice's first row."""


@dataclass(frozen=True)
class Shelf:
    """A buffer for ``rows`` tokens of one side (``QUERIES`` or ``KEYS``) and a range of heads.

    The heads are ``h0 <= h < h1``, query heads or KV heads by side. ``stage`` is the slot from which on the tokens are
    there: the stage in which they arrive, or earlier for keys that were kept from the forward.
    """

    side: int
    rows: int
    h0: int
    h1: int
    stage: int

    @property
    def key(self) -> tuple[int, int, int, int]:
        """The shelf's key in the layout of an arena: (side, stage, h0, h1)."""
        return self.side, self.stage, self.h0, self.h1


@dataclass(frozen=True)
class Block:
    """One piece inside a message, or a move between two shelves: ``count`` rows of a shelf, for some of its heads.

    ``shelf`` is the number of the shelf. The heads are ``h0 <= h < h1``, counted from the shelf's first head.
    ``partial`` says that it is a partial result, which others are added to. ``laid`` says that it is a complete result
    of own rows, which is copied (:mod:`flexcp.executor.run.laid_rows`).
    """

    kind: Kind
    shelf: int
    rows: Rows
    count: int
    h0: int
    h1: int
    partial: bool
    laid: bool = False


@dataclass(frozen=True)
class Message:
    """All blocks (pieces of tokens) that go to or come from one peer in one stage, in the order that both ranks use."""

    peer: int
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class ShelfWork:
    """Slices over the rows of a query shelf and a key shelf, for the query heads ``h0 <= h < h1`` of the model.

    ``q_shelf`` and ``kv_shelf`` are the numbers of the shelves; ``slices`` is ``[n, 6]`` (:mod:`flexcp.masks`).
    """

    q_shelf: int
    kv_shelf: int
    h0: int
    h1: int
    slices: Ints


@dataclass
class Slot:
    """One slot of a rank's program, with the stage of the same number.

    ``receive`` and ``send`` are the messages of the stage. ``own`` are blocks that move between shelves of this rank,
    as pairs (from, to). ``work`` is computed in the slot.
    """

    receive: list[Message] = field(default_factory=list)
    own: list[tuple[Block, Block]] = field(default_factory=list)
    send: list[Message] = field(default_factory=list)
    work: list[ShelfWork] = field(default_factory=list)


@dataclass(frozen=True)
class RankProgram:
    """The shelves and slots of one rank, the layout of its arena, and how its stages are executed.

    ``posts`` has for each slot the stages that it posts before it waits for arrivals, and those that it posts after.
    ``margins`` has for each slot the number of multiprocessors that its work leaves free for transfers.
    """

    shelves: tuple[Shelf, ...]
    slots: tuple[Slot, ...]
    layout: Layout
    posts: tuple[tuple[list[int], list[int]], ...]
    margins: tuple[int, ...]
    kept: dict[int, int]
    """The shelves of received keys and values that are kept from the forward for the backward, in memory of their own.

    Maps the number of a shelf to the shelf's first byte in that memory. Empty if nothing is kept.
    """
    kept_size: int
    """Bytes of the memory for kept keys and values."""
    laid: tuple[Ints, Ints] = (NO_AREAS, NO_AREAS)
    """The areas (rows and heads) of own queries, and of own keys, whose results arrive complete."""


def rank_program(plan: Plan, rank: int, mask: int, backward: bool) -> RankProgram:
    """Derive the program of ``rank`` for one mask (its index in the plan) and direction."""
    shelves, slots = _Builder(plan, rank, mask, backward).build()
    laid = _mark_laid(shelves, slots)
    numbers = [n for n, shelf in enumerate(shelves) if n > KEYS and shelf.side == KEYS]
    if not plan.programs[mask][1].keys_kept:
        numbers = []
    starts = kept_starts([shelves[n].rows * (shelves[n].h1 - shelves[n].h0) for n in numbers], plan.shape)
    kept = dict(zip(numbers, starts, strict=False))
    program = plan.programs[mask][backward]
    posts = tuple(program.execution.posts(slot) for slot in range(program.stages))
    left = tuple(margins(program, plan.ranks)[rank].tolist())
    return RankProgram(shelves, slots, arena_layout(plan, rank, mask, backward), posts, left, kept, starts[-1], laid)


def _mark_laid(shelves: tuple[Shelf, ...], slots: tuple[Slot, ...]) -> tuple[Ints, Ints]:
    """Mark the laid blocks of all slots, and return the areas that they cover of own queries and of own keys."""
    found: list[list[tuple[int, int, Rows]]] = [[], []]

    def marked(block: Block) -> Block:
        if block.kind not in OUTPUTS or block.shelf not in (QUERIES, KEYS) or block.partial:
            return block
        found[block.shelf].append((block.h0, block.h1, block.rows))
        return replace(block, laid=True)

    for slot in slots:
        slot.receive = [Message(m.peer, tuple(marked(block) for block in m.blocks)) for m in slot.receive]
        slot.own = [(here, marked(there)) for here, there in slot.own]
    return joined_areas(found[QUERIES], shelves[QUERIES].rows), joined_areas(found[KEYS], shelves[KEYS].rows)


@dataclass
class _Segments:
    """Ranges of the stream that lie on shelves with the same head range; sorted and disjoint, one per index.

    Range i holds the stream tokens ``start[i] <= t < stop[i]``. The first of them is row ``row[i]`` of shelf
    ``shelf[i]``.
    """

    start: Ints
    stop: Ints
    row: Ints
    shelf: Ints


class _Builder:
    """Builds the shelves and slots of one rank for one mask and direction."""

    def __init__(self, plan: Plan, rank: int, mask: int, backward: bool) -> None:
        self.plan, self.rank, self.mask = plan, rank, mask
        self.program = program = plan.programs[mask][backward]
        inputs = pass_inputs(plan, mask, backward)
        self.arriving = inputs.take(inputs.target == rank)
        self.placement = plan.placement
        shape, tokens = plan.shape, int(self.placement.tokens[rank])
        self.shelves = [Shelf(QUERIES, tokens, 0, shape.heads, program.own_stage)]
        self.shelves += [Shelf(KEYS, tokens, 0, shape.kv_heads, program.own_stage)]
        self.spots: dict[tuple[int, ...], tuple[int, Rows]] = {}
        self.segments: dict[tuple[int, int, int], list[Ints]] = {}

    def build(self) -> tuple[tuple[Shelf, ...], tuple[Slot, ...]]:
        """Return the shelves and the slots of the program."""
        t = self.program.transfers
        mine = t.take((t.source == self.rank) | (t.target == self.rank))
        if not self.placement.assemble_own:
            self._own_segments()
        self._fill_shelves()
        slots = [Slot() for _ in range(self.program.stages)]
        self._messages(mine, slots)
        self._work(slots)
        return tuple(self.shelves), tuple(slots)

    def _own_segments(self) -> None:
        """Add the segments of the rank's own tokens on its first two shelves."""
        kept = self.placement.kept
        own = kept.rank == self.rank
        table = np.stack([kept.start[own], kept.stop[own], kept.local[own], np.zeros(int(own.sum()), np.int64)])
        for side, shelf in enumerate(self.shelves[:2]):
            part = table.copy()
            part[3] = side
            self.segments[side, shelf.h0, shelf.h1] = [part]

    def _fill_shelves(self) -> None:
        """Add a shelf and its segments for each (side, stage, head range) of arriving inputs, in stream order."""
        rows = list(zip(*(c.tolist() for c in self.arriving.matrix()), strict=True))
        groups: dict[tuple[int, int, int, int], list[tuple[int, int, int]]] = {}
        for stage, _, _, kind, owner, start, stop, h0, h1, _ in rows:
            side = QUERIES if kind in QUERY_SIDED else KEYS
            groups.setdefault((side, stage, h0, h1), []).append((owner, start, stop))
        for (side, stage, h0, h1), pieces in sorted(groups.items()):
            number = len(self.shelves)
            starts, stops = zip(*(self.placement.stream_parts(*piece) for piece in pieces), strict=True)
            piece = np.repeat(np.arange(len(starts)), [len(each) for each in starts])
            start, stop = np.concatenate(starts), np.concatenate(stops)
            order = np.argsort(start, kind="stable")
            row = np.empty(len(order), np.int64)
            row[order] = np.cumsum((stop - start)[order]) - (stop - start)[order]
            for i, (owner, first, last) in enumerate(pieces):
                at = piece == i
                self.spots[side, owner, first, last, h0, h1] = (number, _rows(row[at], (stop - start)[at]))
            self.shelves.append(Shelf(side, int((stop - start).sum()), h0, h1, stage))
            joined = _joined(start[order], stop[order], row[order])
            shelf = np.full(joined.shape[1], number, np.int64)
            self.segments.setdefault((side, h0, h1), []).append(np.concatenate([joined, shelf[None]]))

    def _spot(self, kind: int, owner: int, start: int, stop: int, h0: int, h1: int) -> tuple[int, Rows]:
        """Return the shelf number and the rows at which a piece arrived on this rank.

        A piece of the rank's own tokens that was not moved to another shelf is found on the first shelf of its side.
        """
        side = QUERIES if kind in QUERY_SIDED else KEYS
        key = (side, owner, start, stop, h0, h1)
        return self.spots.get(key, (side, slice(start, stop))) if owner == self.rank else self.spots[key]

    def _messages(self, mine: Transfers, slots: list[Slot]) -> None:
        """Add the messages of this rank's transfers (``mine``) and the moves between its shelves to their slots."""
        sends: dict[tuple[int, int], list[Block]] = {}
        receives: dict[tuple[int, int], list[Block]] = {}
        for stage, source, target, kind, owner, start, stop, h0, h1, partial in mine.matrix().T.tolist():
            piece = (kind, owner, start, stop, h0, h1)
            side = QUERIES if kind in QUERY_SIDED else KEYS
            home = (side, slice(start, stop))
            # Own tokens are on the first shelf, others where they arrived; assembled own tokens are in both places.
            away = self._spot(*piece)
            if source == target:
                here, there = (away, home) if kind in OUTPUTS else (home, away)
                slots[stage].own.append(
                    (self._block(kind, *here, h0, h1, partial), self._block(kind, *there, h0, h1, partial))
                )
            elif source == self.rank:
                spot = home if owner == self.rank else away
                sends.setdefault((stage, target), []).append(self._block(kind, *spot, h0, h1, partial))
            else:
                spot = home if owner == self.rank else away
                receives.setdefault((stage, source), []).append(self._block(kind, *spot, h0, h1, partial))
        for (stage, peer), blocks in sorted(sends.items()):
            slots[stage].send.append(Message(peer, tuple(blocks)))
        for (stage, peer), blocks in sorted(receives.items()):
            slots[stage].receive.append(Message(peer, tuple(blocks)))

    def _block(self, kind: int, number: int, rows: Rows, h0: int, h1: int, partial: int) -> Block:
        """Return the block of a piece on shelf ``number``; its heads are counted from the shelf's first head."""
        base = self.shelves[number].h0
        count = rows.stop - rows.start if isinstance(rows, slice) else len(rows)
        return Block(Kind(kind), number, rows, count, h0 - base, h1 - base, bool(partial))

    def _work(self, slots: list[Slot]) -> None:
        """Cut this rank's regions by the segments of its shelves, and add the slices as work to their slots."""
        placement, share = self.placement, self.plan.shape.queries_per_key
        regions = placement.regions[self.mask].take(placement.regions[self.mask].rank == self.rank)
        index, slices = placement.batch.masks[self.mask].cuts(
            regions.document, regions.q0, regions.q1, regions.k0, regions.k1
        )
        begin = placement.batch.starts[regions.document[index]]
        slices = masks.shift(slices, begin, begin)
        h0, h1 = regions.h0[index], regions.h1[index]
        for (_, a0, a1), queries in self._sorted_segments(QUERIES):
            for (_, b0, b1), keys in self._sorted_segments(KEYS):
                low, high = max(a0, b0 * share), min(a1, b1 * share)
                chosen = np.flatnonzero(np.maximum(h0, low) < np.minimum(h1, high))
                part, which = _cut_by(slices[chosen], queries, Q0, Q1)
                at, seg = chosen[which[0]], which[1]
                part, which = _cut_by(part, keys, K0, K1)
                at, q_seg, k_seg = at[which[0]], seg[which[0]], which[1]
                part = masks.shift(part, queries.row[q_seg] - queries.start[q_seg], keys.row[k_seg] - keys.start[k_seg])
                heads = np.stack([np.maximum(h0[at], low), np.minimum(h1[at], high)])
                self._group(slots, queries.shelf[q_seg], keys.shelf[k_seg], heads, part)

    def _sorted_segments(self, side: int) -> list[tuple[tuple[int, int, int], _Segments]]:
        """Return ((side, h0, h1), segments) for each head range of one side, the segments sorted by stream token."""
        found = []
        for key, parts in sorted(self.segments.items()):
            if key[0] == side:
                table = np.concatenate(parts, axis=1)
                found.append((key, _Segments(*table[:, np.argsort(table[0], kind="stable")])))
        return found

    def _group(self, slots: list[Slot], q_shelf: Ints, kv_shelf: Ints, heads: Ints, slices: Ints) -> None:
        """Add slices as work to their slots, one work list for each (slot, query shelf, key shelf, heads).

        ``heads`` is ``[2, n]``: the first query head of each slice and the last one + 1. If the plan holds back a share
        of own work, that share goes to a later slot.
        """
        if len(slices) == 0:
            return
        stages = np.array([s.stage for s in self.shelves])
        slot = work_slot(stages[q_shelf], stages[kv_shelf])
        own = (q_shelf == QUERIES) & (kv_shelf == KEYS)
        if self.program.held and own.any():
            index, slices, later = _shared_out(slices, own, self.program.held[self.rank])
            q_shelf, kv_shelf, heads = q_shelf[index], kv_shelf[index], heads[:, index]
            slot = np.where(later, held_slot(self.program, self.arriving.stage.max(initial=0)), slot[index])
        keys, group = np.unique(np.stack([slot, q_shelf, kv_shelf, *heads]), axis=1, return_inverse=True)
        for i, (at, q, kv, h0, h1) in enumerate(keys.T.tolist()):
            slots[at].work.append(ShelfWork(q, kv, h0, h1, slices[group.reshape(-1) == i]))


def _cut_by(slices: Ints, segments: _Segments, first: int, last: int) -> tuple[Ints, tuple[Ints, Ints]]:
    """Cut slices along one axis by segments; return the non-empty parts, and the (slice, segment) that each comes from.

    ``first`` and ``last`` are the columns of the axis: ``Q0`` and ``Q1``, or ``K0`` and ``K1``.
    """
    index, seg = overlaps(slices[:, first], slices[:, last], segments.start, segments.stop)
    q0, q1, k0, k1 = (slices[index, c] for c in (Q0, Q1, K0, K1))
    if first == Q0:
        q0, q1 = segments.start[seg], segments.stop[seg]
    else:
        k0, k1 = segments.start[seg], segments.stop[seg]
    parts = masks.cut(slices[index], q0, q1, k0, k1)
    keep = ~masks.is_empty(parts)
    return parts[keep], (index[keep], seg[keep])


def _shared_out(slices: Ints, own: NDArray[np.bool_], held: int) -> tuple[Ints, Ints, NDArray[np.bool_]]:
    """Split slices so that the last ``held`` per mille of the area of own work can wait.

    ``own`` marks the slices of own work; the others never wait. Returns (the slice that each part comes from, the
    parts, whether each part waits). At most one slice is cut, between rows and at a whole tile; own slices after it
    wait.
    """
    area = np.where(own, masks.area(slices), 0)
    first = int(area.sum()) * (1000 - held) // 1000
    before = np.cumsum(area) - area
    row = np.where(own & (before + area > first), slices[:, Q0], slices[:, Q1])
    for i in np.flatnonzero((before < first) & (first < before + area)):  # one at most
        rows = np.arange(slices[i, Q0], slices[i, Q1], TILE_ROWS)
        upto = masks.rows_area(slices[i], slices[i, Q0], rows)
        row[i] = rows[np.searchsorted(upto, first - before[i], side="right") - 1]
    early, late = slices.copy(), slices.copy()
    early[:, Q1] = late[:, Q0] = row
    parts = masks.trim(np.concatenate([early, late]))
    keep = ~masks.is_empty(parts)
    return np.tile(np.arange(len(slices)), 2)[keep], parts[keep], np.repeat([False, True], len(slices))[keep]


def _rows(row: Ints, count: Ints) -> Rows:
    """Return the rows of several stretches, given the first row and the number of rows of each.

    The result is a range if each stretch begins where the one before it ends, else an array of row numbers.
    """
    if np.all(row[1:] == (row + count)[:-1]):
        return slice(int(row[0]), int(row[-1] + count[-1]))
    return np.concatenate([np.arange(r, r + n) for r, n in zip(row, count, strict=True)])


def _joined(start: Ints, stop: Ints, row: Ints) -> Ints:
    """Merge sorted ranges of the stream that touch; return a table with the rows ``start, stop, row``.

    ``row`` is the shelf's row of a range's first token. Rows are in stream order, so those of merged ranges touch too.
    """
    first = np.concatenate([[True], start[1:] != stop[:-1]])
    last = np.concatenate([first[1:], [True]])
    return np.stack([start[first], stop[last], row[first]])

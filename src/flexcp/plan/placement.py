"""Placement: which rank keeps which tokens, and which rank computes which part of attention.

A :class:`Placement` is the result of a planner: *runs* (tokens -> rank), for each mask *regions* (work -> rank), and
the *traffic*, which says how pieces travel.

Coordinates: runs are ranges of the stream. Regions are in the rows and keys of their document, and in query heads.
Pieces name tokens by their *owner* and by their place among the owner's tokens in stream order, the *kept order*. So
all tokens that a rank keeps in a stream range are one piece, even if tokens of other ranks lie between them, and a
message of a ring is a single piece.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from flexcp.arrays.intervals import overlaps
from flexcp.arrays.tables import Table
from flexcp.arrays.totals import sums
from flexcp.batch import Batch
from flexcp.masks import area

Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Runs(Table):
    """Tokens ``start`` to ``stop`` (exclusive) of the stream are kept by ``rank``; sorted by rank.

    The runs of a rank are in its local order, in which its tensors hold them.
    """

    rank: Ints
    start: Ints
    stop: Ints


@dataclass(frozen=True, eq=False)
class Regions(Table):
    """Parts of the work: ``rank`` computes rows ``q0..q1``, keys ``k0..k1``, query heads ``h0..h1`` of ``document``.

    Ends are exclusive. Only the (query, key) pairs that the mask of the document allows are computed.
    """

    rank: Ints
    document: Ints
    q0: Ints
    q1: Ints
    k0: Ints
    k1: Ints
    h0: Ints
    h1: Ints


@dataclass(frozen=True)
class Traffic:
    """How pieces (ranges of tokens and heads) travel between ranks.

    With kind ``needed``, a rank receives exactly what it reads, from the owner; with ``relay``, keys that several ranks
    of another node read enter that node once. The other kinds are those of the static strategies. With ``ring``, all
    keys of a group travel round a ring, after heads were exchanged inside each row of the group's grid of ranks. With
    ``gather``, all keys of a group are sent to all of its ranks. ``groups`` are grids ``[ring position][head group]``
    of ranks.
    """

    kind: str = "needed"
    groups: tuple[tuple[tuple[int, ...], ...], ...] = ()
    relay: bool = True


class Divisions(NamedTuple):
    """The stages in which ranks should receive keys: ``stage[rank, block]``, from 1 on.

    Block b of the stream is the tokens ``borders[b]`` to ``borders[b + 1] - 1``.
    """

    borders: Ints
    stage: Ints


@dataclass(frozen=True, eq=False)
class Wishes:
    """What a planner demands of the scheduler, for published systems that have their own rules for scheduling.

    The plan holds the transfers and the execution that result, not the wishes themselves. ``rounds_per_call``: issue
    every stage in conflict-free rounds, this many per call (0: the scheduler chooses). ``divisions``: which keys travel
    in which stage (None: the scheduler chooses).
    """

    rounds_per_call: int = 0
    divisions: Divisions | None = None


class Kept(NamedTuple):
    """The runs sorted by stream position; ``local`` is the place of a run's first token in its rank's kept order.

    Kept order is the order of a rank's tokens in the stream.
    """

    start: Ints
    stop: Ints
    rank: Ints
    local: Ints


@dataclass(frozen=True, eq=False)
class Placement:
    """The result of a planner: runs of the stream (documents, then ``pads``) and regions for each mask of the batch.

    Runs say which rank keeps which tokens, regions which rank computes which part of attention, and ``pads`` is how
    many tokens follow the documents. ``assemble_own`` says that the tokens of each rank are so scattered over the
    stream that even work on own tokens waits for received tokens, so that all keys can first be put in stream order.
    ``note`` is the planner's explanation of its choice; a note of ``auto`` begins with the name of the chosen strategy,
    followed by ": " or " (".
    """

    batch: Batch
    ranks: int
    pads: int
    runs: Runs
    regions: tuple[Regions, ...]
    traffic: Traffic = Traffic()
    assemble_own: bool = False
    note: str = ""
    wishes: Wishes = Wishes()

    @property
    def stream(self) -> int:
        """The number of tokens of the stream, pads included."""
        return self.batch.tokens + self.pads

    @cached_property
    def tokens(self) -> Ints:
        """How many tokens each rank keeps, pads included."""
        return sums(self.runs.rank, self.runs.stop - self.runs.start, self.ranks)

    @cached_property
    def kept(self) -> Kept:
        """The runs in stream order, each with the place of its first token among its rank's tokens."""
        order = np.argsort(self.runs.start, kind="stable")
        rank, start, stop = self.runs.rank[order], self.runs.start[order], self.runs.stop[order]
        by_rank = np.argsort(rank, kind="stable")
        length = (stop - start)[by_rank]
        before = np.cumsum(length) - length
        begin = np.concatenate([np.zeros(1, np.int64), np.cumsum(self.tokens)])[:-1]
        local = np.empty(len(rank), np.int64)
        local[by_rank] = before - begin[rank[by_rank]]
        return Kept(start, stop, rank, local)

    def owned_parts(self, start: Ints, stop: Ints) -> tuple[Ints, Ints, Ints, Ints]:
        """Cut stream ranges where the owner changes; return (range index, owner, start, stop), in kept order.

        ``start`` and ``stop`` of the result count among the owner's tokens in stream order (the kept order), end
        exclusive.
        """
        kept = self.kept
        index, run = overlaps(start, stop, kept.start, kept.stop)
        move = kept.local[run] - kept.start[run]
        first = np.maximum(start[index], kept.start[run]) + move
        last = np.minimum(stop[index], kept.stop[run]) + move
        return index, kept.rank[run], first, last

    def stream_parts(self, owner: int, start: int, stop: int) -> tuple[Ints, Ints]:
        """Return the ascending stream ranges (starts, stops) of the tokens ``start..stop`` of an owner's kept order.

        Kept order is the order of the owner's tokens in the stream; ends are exclusive.
        """
        kept = self.kept
        mine = kept.rank == owner
        begin, local = kept.start[mine], kept.local[mine]
        length = kept.stop[mine] - begin
        a = np.maximum(start, local)
        b = np.minimum(stop, local + length)
        keep = a < b
        return (begin + a - local)[keep], (begin + b - local)[keep]

    def work(self, mask: int) -> Ints:
        """Return the (query, key) pairs x query heads that each rank computes in one layer of mask number ``mask``."""
        regions = self.regions[mask]
        index, slices = self.batch.masks[mask].cuts(regions.document, regions.q0, regions.q1, regions.k0, regions.k1)
        heads = (regions.h1 - regions.h0)[index]
        return sums(regions.rank[index], area(slices) * heads, self.ranks)

    def work_of_layers(self) -> Ints:
        """Return the (query, key) pairs x query heads that each rank computes, summed over all layers of all masks."""
        found = np.zeros(self.ranks, np.int64)
        for number, mask in enumerate(self.batch.masks):
            found += mask.layers * self.work(number)
        return found

"""Placement: who keeps which tokens and who computes which part of attention.

A :class:`Placement` is a planner's whole answer: *runs* (tokens -> rank), for each mask *regions* (work -> rank), and
the *traffic* it wants.

Coordinates. Runs are ranges of the stream. Regions are in their document's own rows and keys, with query heads. Pieces
name tokens by their *owner* and their place among its tokens in stream order ("kept order"), so that everything a rank
keeps inside a stream range is one piece however it is interleaved with others, and a ring's message is a single piece.
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
    """Ranges of the stream and the rank that keeps each, rank by rank in local order."""

    rank: Ints
    start: Ints
    stop: Ints


@dataclass(frozen=True, eq=False)
class Regions(Table):
    """Work: the mask of ``document`` inside rows ``q0..q1``, keys ``k0..k1`` and query heads ``h0..h1``,
    computed by ``rank``.
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
    """How pieces travel.

    ``needed``: exactly what a rank reads, from its owner; with ``relay`` what ranks of another node read enters that
    node once. The static methods keep their own: ``ring`` passes all keys of a group round, after an exchange of heads
    inside each row of the group's grid of ranks; ``gather`` sends all keys of a group to all of it. ``groups`` are
    grids ``[ring position][head group]`` of ranks.
    """

    kind: str = "needed"
    groups: tuple[tuple[tuple[int, ...], ...], ...] = ()
    relay: bool = True


class Divisions(NamedTuple):
    """In which stage each rank wants the keys of each block of tokens: ``borders`` on the stream,
    ``stage[rank, block]`` from 1 on.
    """

    borders: Ints
    stage: Ints


@dataclass(frozen=True, eq=False)
class Wishes:
    """How a planner wants its program scheduled, where its system has a rule for that. The transfers and the execution
    that come of it are in the plan, wishes are not.

    ``rounds_per_call``: every stage in conflict-free rounds, so many to a call (0: as the scheduler chooses).
    ``divisions``: which keys travel in which stage (None: as the scheduler chooses).
    """

    rounds_per_call: int = 0
    divisions: Divisions | None = None


class Kept(NamedTuple):
    """Runs sorted by stream position; ``local`` is where each begins in its rank's kept order."""

    start: Ints
    stop: Ints
    rank: Ints
    local: Ints


@dataclass(frozen=True, eq=False)
class Placement:
    """Runs of the stream (documents, then ``pads``) and regions for each mask of the batch.

    ``assemble_own``: the tokens of a rank are so scattered over the stream that its own work waits for the others'
    tokens, so that keys can be put in stream order first. ``note`` is what the planner has to say about its choice;
    that of ``auto`` begins with the strategy it took and ends that name with ": " or " (".
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
        """Tokens of the stream, pads included."""
        return self.batch.tokens + self.pads

    @cached_property
    def tokens(self) -> Ints:
        """How many tokens each rank keeps, pads included."""
        return sums(self.runs.rank, self.runs.stop - self.runs.start, self.ranks)

    @cached_property
    def kept(self) -> Kept:
        """The runs in stream order."""
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
        """Stream ranges as (range index, owner, start, stop in kept order), cut where the owner changes."""
        kept = self.kept
        index, run = overlaps(start, stop, kept.start, kept.stop)
        move = kept.local[run] - kept.start[run]
        first = np.maximum(start[index], kept.start[run]) + move
        last = np.minimum(stop[index], kept.stop[run]) + move
        return index, kept.rank[run], first, last

    def stream_parts(self, owner: int, start: int, stop: int) -> tuple[Ints, Ints]:
        """The stream ranges (start, stop) of tokens ``start..stop`` of an owner's kept order, ascending."""
        kept = self.kept
        mine = kept.rank == owner
        begin, local = kept.start[mine], kept.local[mine]
        length = kept.stop[mine] - begin
        a = np.maximum(start, local)
        b = np.minimum(stop, local + length)
        keep = a < b
        return (begin + a - local)[keep], (begin + b - local)[keep]

    def work(self, mask: int) -> Ints:
        """Area x query heads each rank computes under mask number ``mask``."""
        regions = self.regions[mask]
        index, slices = self.batch.masks[mask].cuts(regions.document, regions.q0, regions.q1, regions.k0, regions.k1)
        heads = (regions.h1 - regions.h0)[index]
        return sums(regions.rank[index], area(slices) * heads, self.ranks)

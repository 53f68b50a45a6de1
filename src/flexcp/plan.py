"""Plan: who keeps which tokens, who computes which part of attention, and what moves when.

A :class:`Placement` is a planner's whole answer: *runs* (tokens -> rank), for each mask *regions* (work -> rank), and the
*traffic* it wants. ``schedule.make_plan`` turns it into a :class:`Plan` by adding a table of transfers per mask and direction.

Coordinates. Runs are ranges of the stream. Regions are in their document's own rows and keys, with query heads. Pieces name
tokens by their *owner* and their place among its tokens in stream order ("kept order"), so that everything a rank keeps inside a
stream range is one piece however it is interleaved with others, and a ring's message is a single piece.

Stages. In slot s a rank first waits for the transfers of stage s, then posts those of stage s + 1, then computes. Work runs in the
earliest slot in which its queries and its keys are there (own tokens: slot ``own_stage``). So an input may be forwarded one stage
after it arrived, and an output may leave two stages after the slot that completed it.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flexcp.batch import Batch
from flexcp.clusters import Cluster
from flexcp.cost import CostModel
from flexcp.intervals import overlaps
from flexcp.masks import area
from flexcp.pieces import OUTPUTS, Kind, Shape
from flexcp.tables import Table

if TYPE_CHECKING:
    from flexcp.memory import Memory
    from flexcp.rounds import Rounds

Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Runs(Table):
    """Ranges of the stream and the rank that keeps each, rank by rank in local order."""

    rank: Ints
    start: Ints
    stop: Ints


@dataclass(frozen=True, eq=False)
class Regions(Table):
    """Work: the mask of ``document`` inside rows ``q0..q1``, keys ``k0..k1`` and query heads ``h0..h1``, computed by ``rank``."""

    rank: Ints
    document: Ints
    q0: Ints
    q1: Ints
    k0: Ints
    k1: Ints
    h0: Ints
    h1: Ints


@dataclass(frozen=True, eq=False)
class Transfers(Table):
    """Pieces on their way: tokens ``start..stop`` of ``owner`` in kept order, heads ``h0..h1``.

    A transfer whose source is not the owner of an input forwards what it received earlier; an output carries everything its
    source computed or received for that piece. ``source == target`` is a rank's own tokens entering its arena, and no traffic.
    """

    stage: Ints
    source: Ints
    target: Ints
    kind: Ints
    owner: Ints
    start: Ints
    stop: Ints
    h0: Ints
    h1: Ints
    partial: Ints

    def bytes(self, shape: Shape) -> Ints:
        """Bytes on the wire of each transfer."""
        each = shape.bytes_per_token_head()[self.kind, self.partial]
        return np.where(self.source == self.target, 0, (self.stop - self.start) * (self.h1 - self.h0) * each)

    @property
    def is_output(self) -> NDArray[np.bool_]:
        return np.isin(self.kind, OUTPUTS)


@dataclass(frozen=True)
class Traffic:
    """How pieces travel.

    ``needed``: exactly what a rank reads, from its owner; with ``relay`` what ranks of another node read enters that node once. The
    static methods keep their own: ``ring`` passes all keys of a group round, after an exchange of heads inside each row of the group's
    grid of ranks; ``gather`` sends all keys of a group to all of it. ``groups`` are grids ``[ring position][head group]`` of ranks.
    """

    kind: str = "needed"
    groups: tuple[tuple[tuple[int, ...], ...], ...] = ()
    relay: bool = True


class Kept(NamedTuple):
    """Runs sorted by stream position; ``local`` is where each begins in its rank's kept order."""

    start: Ints
    stop: Ints
    rank: Ints
    local: Ints


@dataclass(frozen=True, eq=False)
class Placement:
    """Runs of the stream (documents, then ``pads``) and regions for each mask of the batch.

    ``assemble_own``: the tokens of a rank are so scattered over the stream that its own work waits for the others' tokens, so that
    keys can be put in stream order first. ``note`` is what the planner has to say about its choice; that of ``auto`` begins with the
    strategy it took and ends that name with ": " or " (".
    """

    batch: Batch
    ranks: int
    pads: int
    runs: Runs
    regions: tuple[Regions, ...]
    traffic: Traffic = Traffic()
    assemble_own: bool = False
    note: str = ""

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


@dataclass(frozen=True, eq=False)
class Program:
    """The transfers of one mask in one direction, sorted by stage, then source, then target.

    ``held[rank]`` is how much of the work on a rank's own rows and own keys, in per mille, waits until the slot after its last inputs,
    where it hides the way home of what the rank computed for others. Without entries nothing waits.

    ``keys_kept`` (backward only): every rank kept the keys it received in the forward, so none travel again. What arrived in stage s of the
    forward is there from slot s - 1 on.
    """

    transfers: Transfers
    own_stage: int
    stages: int
    held: tuple[int, ...] = ()
    keys_kept: bool = False


@dataclass(frozen=True, eq=False)
class Plan:
    """One batch, planned: immutable, hashable, printable, the same on every rank.

    ``programs[m]`` is (forward, backward) of the batch's m-th mask. ``requested`` is the strategy that was asked for, ``strategy`` the one
    that placed the batch: they differ where ``auto`` was asked. ``print(plan)`` shows a picture of who computes what; ``repr(plan)`` and
    f-strings are one line, for logs.
    """

    shape: Shape
    cluster: Cluster
    cost: CostModel
    requested: str
    placement: Placement
    programs: tuple[tuple[Program, Program], ...]

    @property
    def batch(self) -> Batch:
        return self.placement.batch

    @property
    def ranks(self) -> int:
        return self.placement.ranks

    @property
    def strategy(self) -> str:
        """The strategy that placed the batch, with its degree where it has one: what ``auto`` chose, or the one that was asked for."""
        if self.requested != "auto":
            return self.requested
        return self.placement.note.split(": ")[0].split(" (")[0] or self.requested

    @property
    def label(self) -> str:
        """The strategy for headings: ``blocks``, or ``auto: blocks`` where ``auto`` was asked for and chose it."""
        return self.strategy if self.strategy == self.requested else f"{self.requested}: {self.strategy}"

    @cached_property
    def hash(self) -> str:
        """Identity of the plan: equal on ranks, machines and CPU types exactly when the plans are equal."""
        digest = hashlib.sha256(json.dumps(self.header(), sort_keys=True).encode())
        for table in self.tables():
            digest.update(len(table).to_bytes(8, "little"))
            digest.update(table.matrix().astype("<i8").tobytes())
        return digest.hexdigest()[:32]

    def header(self) -> dict[str, Any]:
        """Everything of the plan that is not a table, as plain JSON values."""
        placement = self.placement
        return {
            "shape": {name: value for name, value in asdict(self.shape).items() if value is not None},
            "cluster": asdict(self.cluster),
            "cost": asdict(self.cost),
            "strategy": self.requested,
            "lengths": self.batch.lengths.tolist(),
            "masks": [
                {"name": m.name, "layers": m.layers, "rules": [asdict(r) for r in m.rules]} for m in self.batch.masks
            ],
            "pads": placement.pads,
            "traffic": asdict(placement.traffic),
            "assemble_own": placement.assemble_own,
            "programs": [
                [[p.own_stage, p.stages, list(p.held), *["keys kept"] * p.keys_kept] for p in pair]
                for pair in self.programs
            ],
        }

    def tables(self) -> list[Table]:
        """All tables of the plan in a fixed order: runs, then for each mask regions, forward and backward transfers."""
        found: list[Table] = [self.placement.runs]
        for regions, (forward, backward) in zip(self.placement.regions, self.programs, strict=True):
            found += [regions, forward.transfers, backward.transfers]
        return found

    def __hash__(self) -> int:
        return int(self.hash[:15], 16)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plan) and self.hash == other.hash

    def check(self) -> None:
        """Execute the plan symbolically, forward and backward; raises :class:`flexcp.check.PlanError` on any broken invariant."""
        from flexcp.check import check_plan

        check_plan(self)

    def bytes(self, backward: bool = False, mask: int = 0) -> Ints:
        """``[source, target]`` bytes of one layer."""
        transfers = self.programs[mask][backward].transfers
        flat = sums(
            transfers.source * self.ranks + transfers.target, transfers.bytes(self.shape), self.ranks * self.ranks
        )
        return flat.reshape(self.ranks, self.ranks)

    def inputs(self, mask: int, backward: bool) -> Transfers:
        """The q and kv pieces of a pass with the stage from whose slot on they are there; kept keys are the forward's, a slot earlier."""
        forward, program = self.programs[mask][0].transfers, self.programs[mask][backward]
        found = program.transfers.take(np.isin(program.transfers.kind, (Kind.Q, Kind.KV)))
        if not program.keys_kept:
            return found
        kept = forward.take(forward.kind == Kind.KV)
        return Transfers.join([found, replace(kept, stage=kept.stage - 1)])

    def inter_node_bytes(self, backward: bool = False, mask: int = 0) -> int:
        """Bytes of one layer that cross between nodes."""
        node = np.arange(self.ranks) // self.cluster.ranks_per_node
        return int(self.bytes(backward, mask)[node[:, None] != node[None, :]].sum())

    def peers(self, rank: int) -> list[int]:
        """The ranks that ``rank`` sends to or receives from, under any mask and in either direction: a connection each."""
        met: set[int] = set()
        for program in (p for pair in self.programs for p in pair):
            transfers = program.transfers
            met |= set(transfers.target[transfers.source == rank].tolist())
            met |= set(transfers.source[transfers.target == rank].tolist())
        return sorted(met - {rank})

    def rounds(
        self, mask: int = 0, backward: bool = False, chunk_bytes: int | None = None, rounds_per_call: int | None = None
    ) -> Rounds:
        """The conflict-free rounds of one layer, and what they lose (:mod:`flexcp.rounds`). Made once for each set of arguments."""
        from flexcp.rounds import plan_rounds

        key = (mask, backward, chunk_bytes, rounds_per_call)
        if key not in self._rounds:
            program = self.programs[mask][backward]
            self._rounds[key] = plan_rounds(program, self.shape, self.cluster, chunk_bytes, rounds_per_call)
        return self._rounds[key]

    @cached_property
    def _rounds(self) -> dict[tuple[int, bool, int | None, int | None], Rounds]:
        return {}

    def work(self, mask: int = 0) -> Ints:
        """Area x query heads of each rank."""
        return self.placement.work(mask)

    def memory(self, rank: int) -> Memory:
        """What attention needs on ``rank``, in bytes, before anything is allocated (:mod:`flexcp.memory`)."""
        from flexcp.memory import plan_memory

        return plan_memory(self, rank)

    def __str__(self) -> str:
        from flexcp.report.ascii import picture

        return picture(self)

    def __format__(self, spec: str) -> str:
        """One line in f-strings, which are for logs; ``str(plan)`` and ``print(plan)`` give the picture."""
        return format(repr(self), spec)

    def __repr__(self) -> str:
        return f"<Plan {self.label} {self.hash[:12]}: {self.batch.tokens} tokens on {self.ranks} ranks>"


def imbalance(values: Ints) -> float:
    """Largest over mean; 1 when there is nothing."""
    total = int(values.sum())
    return float(int(values.max()) * len(values) / total) if total else 1.0


def sums(index: Ints, values: Ints, size: int) -> Ints:
    """``values`` added up by ``index``."""
    total = np.zeros(size, np.int64)
    np.add.at(total, index, values)
    return total

"""Schedule: a placement becomes a plan.

For each mask and direction this writes the table of transfers. Two ways of travel:

- *needed* (every planner of ours): what a rank's regions read, exact to the token and head, straight from the owner in stage 1 while
  stage 0 computes what the rank has. Outputs go home when the last stage is done; one that a single rank computed whole travels in the
  model's dtype, others as partials.
- *static*: the traffic users know of rings, head exchanges and gathers, needed or not.

Backward inputs are the forward's plus do, LSE and delta; every output returns a piece that came in, so a rank reduces in the rows where
it holds that piece.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flexcp.batch import LayerMask
from flexcp.clusters import Cluster
from flexcp.cost import CostModel
from flexcp.intervals import covered_once, overlaps, spread, united
from flexcp.masks import K0, K1, Q0, Q1
from flexcp.pieces import Kind, Shape
from flexcp.plan import Placement, Plan, Program, Regions, Transfers
from flexcp.tables import Table

Ints = NDArray[np.int64]


def make_plan(placement: Placement, shape: Shape, cluster: Cluster, cost: CostModel, strategy: str) -> Plan:
    """The plan of a placement: transfers for every mask, forward and backward."""
    programs: list[tuple[Program, Program]] = []
    for mask, regions in zip(placement.batch.masks, placement.regions, strict=True):
        if placement.traffic.kind == "needed":
            programs.append(_needed_programs(placement, needed_pieces(placement, shape, mask, regions)))
        else:
            programs.append((_static_program(placement, shape, False), _static_program(placement, shape, True)))
    return Plan(shape, cluster, cost, strategy, placement, tuple(programs))


def _program(parts: list[Transfers], own_stage: int) -> Program:
    transfers = Transfers.join(parts)
    transfers = transfers.take(transfers.start < transfers.stop)
    transfers = transfers.sorted_by("stage", "source", "target", "kind", "owner", "start", "h0")
    last = int(transfers.stage.max()) if len(transfers) else own_stage
    return Program(transfers, own_stage, max(last, own_stage) + 1)


# --- exactly what is needed -------------------------------------------------------------------------------------------


def needed_pieces(placement: Placement, shape: Shape, mask: LayerMask, regions: Regions) -> tuple[Pieces, Pieces]:
    """The query and the key pieces that ranks read from others (their own too when those are assembled)."""
    rows, keys = _reads(placement, shape, mask, regions)
    return _pieces(placement, rows), _pieces(placement, keys)


def _needed_programs(placement: Placement, pieces: tuple[Pieces, Pieces]) -> tuple[Program, Program]:
    q, kv = pieces
    own_stage = 1 if placement.assemble_own else 0
    home = 3  # slots 0 and 1 compute; what slot 1 completed may travel in stage 3
    inputs = [_inputs(q, Kind.Q), _inputs(kv, Kind.KV)]
    forward = [*inputs, _outputs(q, Kind.O, home)]
    backward = [*inputs, _inputs(q, Kind.DO), _outputs(q, Kind.DQ, home), _outputs(kv, Kind.DKV, home)]
    return _program(forward, own_stage), _program(backward, own_stage)


class _Reads:
    """Stream ranges that ranks read: rank, elementary head range number, start, stop; and the head borders."""

    def __init__(self, rank: Ints, head: Ints, start: Ints, stop: Ints, borders: Ints, ranks: int) -> None:
        label, self.start, self.stop = united(rank * len(borders) + head, start, stop)
        self.rank, self.head = label // len(borders), label % len(borders)
        self.borders = borders
        self.ranks = ranks


def _reads(placement: Placement, shape: Shape, mask: LayerMask, regions: Regions) -> tuple[_Reads, _Reads]:
    """The rows and the keys that each rank's regions read."""
    index, slices = mask.cuts(regions.document, regions.q0, regions.q1, regions.k0, regions.k1)
    begin = placement.batch.starts[regions.document[index]]
    rank, h0, h1 = regions.rank[index], regions.h0[index], regions.h1[index]
    g0, g1 = shape.kv_range(h0, h1)
    sides = []
    for low, high, count, first, last in ((h0, h1, shape.heads, Q0, Q1), (g0, g1, shape.kv_heads, K0, K1)):
        borders = np.unique(np.concatenate([low, high, [0, count]]))
        from_, to = np.searchsorted(borders, low), np.searchsorted(borders, high)
        item, within = spread(to - from_)
        start, stop = (begin + slices[:, first])[item], (begin + slices[:, last])[item]
        sides.append(_Reads(rank[item], from_[item] + within, start, stop, borders, placement.ranks))
    return sides[0], sides[1]


@dataclass(frozen=True, eq=False)
class Pieces(Table):
    """What ranks read of others' tokens.

    ``partial`` says that several ranks read these tokens and heads, so that each one's results for them are a part of the sum.
    """

    rank: Ints
    owner: Ints
    start: Ints
    stop: Ints
    h0: Ints
    h1: Ints
    partial: Ints


def _pieces(placement: Placement, reads: _Reads) -> Pieces:
    """The reads as pieces, cut where the number of ranks that read changes between one and several."""
    label, first, last, once = covered_once(reads.head, reads.start, reads.stop)
    span = placement.stream + 1
    base = reads.head * span
    index, at = overlaps(base + reads.start, base + reads.stop, label * span + first, label * span + last)
    start, stop = np.maximum(reads.start[index], first[at]), np.minimum(reads.stop[index], last[at])
    rank, head, partial = reads.rank[index], reads.head[index], 1 - once[at].astype(np.int64)
    index, owner, start, stop = placement.owned_parts(start, stop)
    rank, head, partial = rank[index], head[index], partial[index]
    if not placement.assemble_own:
        away = rank != owner
        rank, head, partial, owner, start, stop = (x[away] for x in (rank, head, partial, owner, start, stop))
    heads = len(reads.borders)
    label = ((rank * heads + head) * reads.ranks + owner) * 2 + partial
    label, start, stop = united(label, start, stop)
    partial, owner = label % 2, label // 2 % reads.ranks
    rank, head = label // 2 // reads.ranks // heads, label // 2 // reads.ranks % heads
    return Pieces(*_join_heads(rank, owner, start, stop, head, partial, reads.borders))


def _join_heads(rank: Ints, owner: Ints, start: Ints, stop: Ints, head: Ints, partial: Ints, borders: Ints) -> Ints:
    """Pieces of the same tokens in adjacent elementary head ranges become one."""
    order = np.lexsort((head, partial, stop, start, owner, rank))
    columns = np.stack([rank, owner, start, stop, head, partial])[:, order]
    same = np.all(columns[[0, 1, 2, 3, 5], 1:] == columns[[0, 1, 2, 3, 5], :-1], axis=0)
    same &= columns[4, 1:] == columns[4, :-1] + 1
    first = np.concatenate([[True], ~same])[: columns.shape[1]]
    last = np.concatenate([~same, [True]])[: columns.shape[1]]
    found = columns[:, first]
    return np.stack([*found[:4], borders[found[4]], borders[columns[4, last] + 1], found[5]])


def _inputs(pieces: Pieces, kind: Kind) -> Transfers:
    return _moves(pieces, kind, 1, pieces.owner, pieces.rank, np.zeros_like(pieces.partial))


def _outputs(pieces: Pieces, kind: Kind, stage: int) -> Transfers:
    return _moves(pieces, kind, stage, pieces.rank, pieces.owner, pieces.partial)


def _moves(pieces: Pieces, kind: Kind, stage: int, source: Ints, target: Ints, partial: Ints) -> Transfers:
    return Transfers.make(
        len(pieces.rank),
        stage=stage,
        source=source,
        target=target,
        kind=int(kind),
        owner=pieces.owner,
        start=pieces.start,
        stop=pieces.stop,
        h0=pieces.h0,
        h1=pieces.h1,
        partial=partial,
    )


# --- the traffic of the static methods --------------------------------------------------------------------------------


class _Moves:
    """Collects whole-rank pieces (all tokens of an owner) as rows of a transfer table."""

    def __init__(self, tokens: Ints) -> None:
        self.tokens = tokens
        self.rows: list[tuple[int, ...]] = []

    def add(
        self, stage: int, source: int, target: int, kind: Kind, owner: int, heads: tuple[int, int], partial: bool
    ) -> None:
        if source != target:
            row = (stage, source, target, int(kind), owner, 0, int(self.tokens[owner]), *heads, int(partial))
            self.rows.append(row)

    def table(self) -> Transfers:
        return Transfers(*np.array(self.rows, np.int64).reshape(-1, len(Transfers.names())).T)


def _static_program(placement: Placement, shape: Shape, backward: bool) -> Program:
    moves = _Moves(placement.tokens)
    for grid in placement.traffic.groups:
        if placement.traffic.kind == "gather":
            _gather([rank for row in grid for rank in row], moves, shape, backward)
        else:
            _ring(grid, moves, shape, backward)
    return _program([moves.table()], own_stage=0)


def _gather(group: list[int], moves: _Moves, shape: Shape, backward: bool) -> None:
    """Everyone's keys to everyone; in the backward, everyone's partial dkv back to its owner."""
    heads = (0, shape.kv_heads)
    for owner in group:
        for rank in group:
            moves.add(1, owner, rank, Kind.KV, owner, heads, False)
            if backward:
                moves.add(3, rank, owner, Kind.DKV, owner, heads, True)


def _ring(grid: tuple[tuple[int, ...], ...], moves: _Moves, shape: Shape, backward: bool) -> None:
    """Heads are exchanged inside each row of the grid, then keys pass round the columns; dkv follows them and ends at home.

    Keys reach the s-th rank after their home in slot ``arrival(s)``. That rank adds its dkv to what came and passes the sum on two
    slots later, so the chain moves one rank a stage and needs no extra accumulator.
    """
    positions, split = len(grid), len(grid[0])
    arrival = (lambda s: s) if split == 1 else (lambda s: s + 1)
    home = arrival(positions - 1) + 2
    for j in range(split):
        q_heads = (j * shape.heads // split, (j + 1) * shape.heads // split)
        low, high = shape.kv_range(np.int64(q_heads[0]), np.int64(q_heads[1]))  # type: ignore[arg-type]
        kv_heads = (int(low), int(high))
        # A KV head that several head groups read gets its gradient from all of them.
        shared = split > shape.kv_heads
        for c, row in enumerate(grid):
            worker = row[j]
            for owner in row:
                moves.add(1, owner, worker, Kind.Q, owner, q_heads, False)
                moves.add(1, owner, worker, Kind.KV, owner, kv_heads, False)
                for s in range(1, positions):
                    source, target = grid[(c + s - 1) % positions][j], grid[(c + s) % positions][j]
                    moves.add(arrival(s), source, target, Kind.KV, owner, kv_heads, False)
                if not backward:
                    moves.add(home, worker, owner, Kind.O, owner, q_heads, False)
                    continue
                moves.add(1, owner, worker, Kind.DO, owner, q_heads, False)
                moves.add(home, worker, owner, Kind.DQ, owner, q_heads, False)
                for s in range(1, positions):
                    source, target = grid[(c + s) % positions][j], grid[(c + s + 1) % positions][j]
                    moves.add(arrival(s) + 2, source, target, Kind.DKV, owner, kv_heads, True)
                moves.add(home + (positions > 1), worker, owner, Kind.DKV, owner, kv_heads, shared)

"""Transfers: make a plan from a placement.

For each mask and direction this writes the table of transfers. Traffic is of one of two kinds:

- *needed* (all planners of flexcp): what a rank's regions read, exact to the token and head, travels in as many stages
  as are worth it (:mod:`flexcp.schedule.stages`), chosen separately for forward and backward. Keys enter each node once
  where that is faster (:mod:`flexcp.schedule.routes`). Moved queries come first. Gradients of keys return when the work
  on those keys is done, or later where that is faster, results for moved queries after all work. Results that a single
  rank computed completely travel in the model's dtype, others as partial results. Keys travel again in the backward
  unless a memory budget lets ranks keep them.
- *static* (``traffic.kind`` ``"ring"`` or ``"gather"``): the usual traffic of rings, head exchanges and gathers,
  whether the tokens are needed or not.

After that, :mod:`flexcp.schedule.execution` chooses how each stage is executed.

The inputs of the backward are those of the forward plus do, LSE and delta. Every output returns a piece that was
received, so a rank reduces it into the rows where it holds that piece.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from flexcp.arrays.intervals import spread
from flexcp.clusters import Cluster
from flexcp.cost import CostModel
from flexcp.plan.execution import one_call_ahead
from flexcp.plan.placement import Placement
from flexcp.plan.plan import Plan
from flexcp.plan.program import Program, Transfers
from flexcp.schedule.analysis import MaskAnalysis, analyse
from flexcp.schedule.execution import needed_work_ns, static_work_ns, with_execution
from flexcp.schedule.inputs_first import posting, stage_home
from flexcp.schedule.needs import Pieces
from flexcp.schedule.parts import cut_by_divisions, cut_into_stages, shares_are_long
from flexcp.schedule.rings import grids_by_shape
from flexcp.schedule.routes import Needs
from flexcp.schedule.stages import Stages
from flexcp.schedule.thin_ends import early_posting
from flexcp.shape import Kind, Shape

Ints = NDArray[np.int64]


def make_plan(
    placement: Placement,
    shape: Shape,
    cluster: Cluster,
    cost: CostModel,
    strategy: str,
    keep_kv: int = 0,
    most_ahead: int = 2,
    analysis: list[MaskAnalysis] | None = None,
) -> Plan:
    """Make the plan of a placement: the transfers of every mask, forward and backward, and how each stage is posted.

    ``strategy`` is the name of the strategy that made the placement; the plan only records it. ``keep_kv`` is how many
    bytes of received keys and values a rank may keep for the backward, over all layers, so that they are not sent
    again. ``most_ahead`` is the most slots by which the messages of a stage may be posted before the slot that waits
    for them; 1 needs less memory than 2, because fewer messages are under way at a time. If it is more than 1, all
    inputs may be posted in the first slot. ``analysis`` is what :func:`flexcp.schedule.analysis.analyse` returned for
    the same arguments; without it, it is computed here. ``keep_kv`` and ``analysis`` are used only if
    ``placement.traffic.kind`` is ``"needed"``.
    """
    how = (shape, cluster, cost)
    programs: list[tuple[Program, Program]] = []
    if placement.traffic.kind == "needed":
        for found in analysis or analyse(placement, shape, cluster, cost, keep_kv, most_ahead):
            first, second = (_needed_program(found, way, placement, how, most_ahead) for way in (False, True))
            programs.append((first, second))
    else:
        pair = [_static_program(placement, shape, way) for way in (False, True)]
        for mask in range(len(placement.batch.masks)):
            work = static_work_ns(placement, mask, (pair[0].stages, pair[1].stages), *how)
            first, second = (
                with_execution(pair[way], ns, *how, bool(way), most_ahead, None, placement.wishes)
                for way, ns in enumerate(work)
            )
            programs.append((first, second))
    return Plan(shape, cluster, cost, strategy, placement, tuple(programs))


def with_analysis(plan: Plan, analysis: list[MaskAnalysis], backward: bool, most_ahead: int = 2) -> Plan:
    """Return a plan of needed traffic with the programs of one direction made again, from another analysis.

    In the other direction the analysis must be the one that the plan was made from. ``most_ahead`` is that of
    :func:`make_plan`.
    """
    how = (plan.shape, plan.cluster, plan.cost)
    programs = []
    for found, (first, second) in zip(analysis, plan.programs, strict=True):
        made = _needed_program(found, backward, plan.placement, how, most_ahead)
        programs.append((first, made) if backward else (made, second))
    return replace(plan, programs=tuple(programs))


def _program(parts: list[Transfers], own_stage: int, held: tuple[int, ...] = (), keys_kept: bool = False) -> Program:
    """Return the program of these transfers, sorted, in which every stage is one call, posted one slot ahead.

    ``own_stage`` is the slot from which on a rank's own tokens can be computed; ``held`` and ``keys_kept`` are those of
    :class:`flexcp.plan.program.Program`.
    """
    transfers = Transfers.join([part for part in parts if len(part)])
    transfers = transfers.sorted_by("stage", "source", "target", "kind", "owner", "start", "h0")
    last = int(transfers.stage.max()) if len(transfers) else own_stage
    stages = max(last, own_stage) + 1
    return Program(transfers, own_stage, stages, held, keys_kept, execution=one_call_ahead(stages))


# --- needed traffic ---------------------------------------------------------------------------------------------------


def _needed_program(
    found: MaskAnalysis, backward: bool, placement: Placement, how: tuple[Shape, Cluster, CostModel], most_ahead: int
) -> Program:
    """Return the program of one direction of a mask whose placement has needed traffic."""
    one = found.backward if backward else found.forward
    stages, (keys, relays) = one.stages, found.needs.keys
    if placement.wishes.divisions is None:
        in_shares = shares_are_long(keys, stages, *how)
        cut = cut_into_stages(keys, stages.borders, how[1], stages.across_borders, in_shares, len(relays) > 0)
    else:
        cut = cut_by_divisions(keys, placement.wishes.divisions, placement)
    parts = _staged(found.needs, stages, cut, how[1], backward, found.keys_kept)
    held = tuple(stages.held.tolist()) if stages.held.any() else ()
    program = _program(parts, int(placement.assemble_own), held, found.keys_kept and backward)
    posted = posting(stages, program, backward) if stages.inputs_first else early_posting(stages, program)
    work = needed_work_ns(program, one.work, stages)
    return with_execution(program, work, *how, backward, most_ahead, posted, placement.wishes)


def _staged(
    needs: Needs, chosen: Stages, cut: tuple[Pieces, Ints, Ints], cluster: Cluster, backward: bool, kept: bool
) -> list[Transfers]:
    """Return the transfers of one direction of a mask with needed traffic, each with its stage.

    Queries travel in stage 1, keys in the stages of ``cut``, relays one stage later, and results two stages after the
    slot that completed them, or later with ``chosen.thin_ends``, ``inside_first`` or ``inputs_first``. ``cut`` are the
    parts of the key pieces, the stage of each and the piece of each. Queries arrive first, so the work on the keys of a
    stage is done in the slot of that stage. Keys that are ``kept`` do not travel again in the backward: they are there
    one slot earlier than in the forward, and the work on them is done then, or when the queries have arrived.
    """
    q, (direct, relays) = needs.q, needs.keys
    keys, stage, piece = cut
    there = backward and kept
    slot = stage - there
    last = np.ones(cluster.ranks, np.int64)
    np.maximum.at(last, keys.rank, slot)
    queries = np.zeros(cluster.ranks, np.int64)
    queries[q.rank] = 1
    home = np.maximum(slot, queries[keys.rank]) + 2
    if chosen.thin_ends:
        # No gradients travel beside the work of the large stage between the ends.
        most = int(chosen.number.max())
        home = np.where(slot < most, most - 1, most) + 2
        last[:] = most
    if chosen.inside_first:
        # Gradients for ranks of the same node leave only with the results.
        last = np.maximum(last, chosen.number)
        size = cluster.ranks_per_node
        home = np.where(keys.owner // size == keys.rank // size, last[keys.rank] + 2, home)
    if chosen.inputs_first:
        home = stage_home(chosen, slot, backward)
    parts = [] if there else [_transfers_of(keys, Kind.KV, stage, keys.owner, keys.rank)]
    if len(relays):
        # Every relay passes on all parts of its piece.
        part_of = np.argsort(piece, kind="stable")
        begin = np.searchsorted(piece[part_of], np.arange(len(direct) + 1))
        relay, within = spread(np.diff(begin)[relays.piece])
        part = part_of[begin[relays.piece[relay]] + within]
        passed_on, reader = keys.take(part), relays.rank[relay]
        np.maximum.at(last, reader, slot[part] + 1)
        home[part] = slot[part] + 4  # the readers return their gradients three stages after the keys
        if not there:
            parts.append(_transfers_of(passed_on, Kind.KV, stage[part] + 1, passed_on.rank, reader))
        if backward:
            parts.append(_transfers_of(passed_on, Kind.DKV, slot[part] + 3, reader, passed_on.rank, passed_on.partial))
    if backward:
        parts.append(_transfers_of(keys, Kind.DKV, home, keys.rank, keys.owner, keys.partial))
    if len(q):
        parts.append(_transfers_of(q, Kind.Q, 1, q.owner, q.rank))
        done = last[q.rank] + 2
        if chosen.inputs_first:
            done = stage_home(chosen, np.full_like(done, chosen.number.max()), backward)
        parts.append(_transfers_of(q, Kind.DQ if backward else Kind.O, done, q.rank, q.owner, q.partial))
        if backward:
            parts.append(_transfers_of(q, Kind.DO, 1, q.owner, q.rank))
    return parts


def _transfers_of(
    pieces: Pieces, kind: Kind, stage: int | Ints, source: Ints, target: Ints, partial: int | Ints = 0
) -> Transfers:
    """Return the transfers that send each piece from ``source`` to ``target``; ``partial`` 1 marks partial results."""
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


# --- static traffic ---------------------------------------------------------------------------------------------------


class _WholePieces:
    """Collects transfers that each move all tokens of one rank, their owner.

    Transfers from a rank to itself and transfers without tokens are left out.
    """

    def __init__(self, tokens: Ints) -> None:
        self.tokens = tokens
        self.found: list[Transfers] = []

    def add(
        self,
        stage: Ints | int,
        source: Ints,
        target: Ints,
        kind: Kind,
        owner: Ints,
        heads: tuple[Ints | int, Ints | int],
        partial: bool,
    ) -> None:
        """Add one transfer for each combination of stage, source, target, owner and heads (broadcast together).

        ``heads`` are the first head and the end (exclusive).
        """
        columns = np.broadcast_arrays(stage, source, target, owner, *heads)
        stage, source, target, owner, h0, h1 = (column.reshape(-1) for column in columns)
        moves = (source != target) & (self.tokens[owner] > 0)
        stage, source, target, owner, h0, h1 = (c[moves] for c in (stage, source, target, owner, h0, h1))
        ends = {"source": source, "target": target, "owner": owner, "start": 0, "stop": self.tokens[owner]}
        made = Transfers.make(len(owner), stage=stage, kind=int(kind), h0=h0, h1=h1, partial=int(partial), **ends)
        self.found.append(made)


def _static_program(placement: Placement, shape: Shape, backward: bool) -> Program:
    """Return the program of a gather or of rings in one direction."""
    pieces = _WholePieces(placement.tokens)
    for grids in grids_by_shape(placement):
        if placement.traffic.kind == "gather":
            _gather(grids.reshape(len(grids), -1), pieces, shape, backward)
        else:
            _ring(grids, pieces, shape, backward)
    return _program(pieces.found, own_stage=0)


def _gather(groups: Ints, pieces: _WholePieces, shape: Shape, backward: bool) -> None:
    """Add the transfers of a gather to ``pieces``: the keys of every rank go to all ranks of its group.

    In the backward they go again, and every rank's partial gradients (dkv) return to the owner. ``groups`` is
    ``[group, rank]``.
    """
    heads = (0, shape.kv_heads)
    owner, rank = groups[:, :, None], groups[:, None, :]
    pieces.add(1, owner, rank, Kind.KV, owner, heads, False)
    if backward:
        pieces.add(3, rank, owner, Kind.DKV, owner, heads, True)


def _ring(grids: Ints, pieces: _WholePieces, shape: Shape, backward: bool) -> None:
    """Add the transfers of rings to ``pieces``: heads are exchanged in each grid row, keys go round the columns.

    ``grids`` is ``[group, ring position, head group]`` of ranks. Keys reach the s-th rank after their owner in slot
    ``s``, or one slot later if heads are exchanged first. In the backward, dkv follows the keys and ends at their
    owner. Each rank adds its dkv to what it received and passes the sum on two slots later, so the sum moves one rank
    per stage and needs no extra accumulator.
    """
    _, positions, split = grids.shape
    exchanged = int(split > 1)
    home = positions - 1 + exchanged + 2
    # Axes: group, position, owner in the row of the position, worker in the same row, hop.
    owner = grids[:, :, :, None, None]
    worker = grids[:, :, None, :, None]
    number = np.arange(split + 1) * shape.heads // split
    q_heads = (number[:-1, None], number[1:, None])
    kv_heads = shape.kv_range(*q_heads)
    hop = np.arange(1, positions)
    at = np.arange(positions)[:, None]
    before, there, after = (
        np.moveaxis(grids[:, (at + hop + step) % positions], -1, 2)[:, :, None] for step in (-1, 0, 1)
    )
    pieces.add(1, owner, worker, Kind.Q, owner, q_heads, False)
    pieces.add(1, owner, worker, Kind.KV, owner, kv_heads, False)
    pieces.add(hop + exchanged, before, there, Kind.KV, owner, kv_heads, False)
    if not backward:
        pieces.add(home, worker, owner, Kind.O, owner, q_heads, False)
        return
    pieces.add(1, owner, worker, Kind.DO, owner, q_heads, False)
    pieces.add(home, worker, owner, Kind.DQ, owner, q_heads, False)
    pieces.add(hop + exchanged + 2, there, after, Kind.DKV, owner, kv_heads, True)
    # The gradient of a KV head that several head groups read is the sum of partial gradients from all of them.
    pieces.add(home + (positions > 1), worker, owner, Kind.DKV, owner, kv_heads, split > shape.kv_heads)

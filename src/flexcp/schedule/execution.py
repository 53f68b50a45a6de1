"""Execution: choose for every stage of a program how and how early its messages are issued, and how much room they get.

A program runs in slots: in slot s a rank waits for the messages of stage s, posts messages of later stages, and
computes. The room is the *margin*: how many multiprocessors the work beside the messages leaves free.

The choice is made by cost, stage by stage, from two tables in nanoseconds: the work of every rank in every slot (in
closed form, as in :mod:`flexcp.schedule.stages`) and how long every rank's ports need for every stage (from exact
bytes). The rules, in this order:

- *issue*. A stage is one call, unless the planner wishes for rounds or the cost model says that messages crowd each
  other at a port (``crowding``). In the second case, each call has as many rounds as take the least time: more rounds
  per call crowd more, and every further call costs its start.
- *ahead*. A stage is posted one slot ahead. If it takes longer than the work that would hide it, and the slot before
  that has time to spare, it is posted two slots ahead, if both slots together are then clearly faster. This is possible
  only for inputs that their owners send, because forwarded pieces and results are not there yet. Messages that wait
  hold memory, so nothing is posted earlier than that, and with a memory limit nothing is posted two slots ahead.
- *margin*. The cost model has rows of contention by margin (one table for transfers inside nodes, one for transfers
  that only cross nodes). The margin is chosen with which the slowest rank finishes the slot's work and the transfers
  beside it first; of equal ones the margin with the least time of all ranks, then the one that slows down work least,
  then the smallest. If no transfers are beside the slot, no multiprocessors are left free.

With latents (:func:`flexcp.latent_attention`), all transfers come before the work: every stage is one call, nothing is
posted ahead and nothing is left free.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from flexcp.arrays.totals import sums
from flexcp.clusters import Cluster
from flexcp.cost import CostModel
from flexcp.plan.execution import Execution
from flexcp.plan.placement import Placement, Wishes
from flexcp.plan.program import Program
from flexcp.plan.rounds import Messages, find_messages
from flexcp.plan.slots import held_slot
from flexcp.schedule.stages import Stages, stage_work
from flexcp.schedule.work import Work
from flexcp.shape import Shape

Ints = NDArray[np.int64]
Sent = tuple[Messages, Ints, Ints]
"""The messages of a program, the stage of each exchange and its level: see :func:`flexcp.plan.rounds.find_messages`."""
WORTH_PERMILLE = 970
"""A stage is posted two slots ahead if the two slots then take less than this, per mille of their time otherwise."""
ROUNDS_TRIED = (1, 2, 4, 8, 16)
"""The numbers of rounds per call that are tried; in a round, a rank sends to one rank and receives from one at most."""


class Posting(NamedTuple):
    """When the stages of a program are posted.

    ``ahead[s]`` is how many slots before slot s that is, and ``beside[s]`` is the slot whose work stage s is expected
    to travel beside.
    """

    ahead: Ints
    beside: Ints


def with_execution(
    program: Program,
    work: Ints,
    shape: Shape,
    cluster: Cluster,
    cost: CostModel,
    backward: bool,
    most_ahead: int = 2,
    posting: Posting | None = None,
    wishes: Wishes = Wishes(),
) -> Program:
    """Return the program with its execution chosen: how each stage's messages are issued, how early, and the margins.

    ``work[rank, slot]`` is in nanoseconds. ``most_ahead`` is the most slots by which the messages of a stage may be
    posted before the slot that waits for them. With ``posting``, it is not chosen here when stages are posted.
    ``wishes.rounds_per_call``, if not 0, is used for every stage. With latents, none of these matter: all
    transfers come before the work (see the module).
    """
    stages = program.stages
    if shape.latent is not None:
        return replace(program, execution=Execution.make(stages, rounds_per_call=0, ahead=0, margin=0))
    if wishes.rounds_per_call or not cost.crowding:
        rounds = np.full(stages, wishes.rounds_per_call, np.int64)
    else:
        rounds = _rounds_per_call(program, shape, cluster, cost)
    beside, across = np.zeros_like(work), np.zeros(work.shape, bool)
    sent = find_messages(program, shape, cluster)
    beside[:, :-1] = transfers_ns(program, sent, cluster, cost)[:, 1:]
    across[:, :-1] = crosses_only(program, sent, cluster)[:, 1:]
    rows = contention_rows(cost, across, backward)
    ahead = np.ones(stages, np.int64)
    if posting is not None:
        ahead, moved = posting.ahead, np.zeros_like(beside)
        np.add.at(moved.T, posting.beside[1:], beside.T[:-1])
        beside = moved
    elif most_ahead > 1:
        ahead, beside = _posted_early(program, work, beside, rows)
    margin = _margins(work, beside, rows)
    # Transfers may still be under way in slots after all work; what is copied there, or relayed keys that came later
    # than expected, leave them as much room.
    last = int(np.flatnonzero(work.any(axis=0)).max(initial=0))
    margin[last:] = margin[last]
    return replace(program, execution=Execution(rounds, ahead, margin))


# --- how long ---------------------------------------------------------------------------------------------------------


def overlapped_ns(work: Ints, beside: Ints, slow: Ints | int, alone: Ints | int, link: Ints | int) -> Ints:
    """Return the nanoseconds until work and the transfers beside it are both done, if they begin together.

    ``work`` and ``beside`` are the nanoseconds of each without the other. ``slow`` and ``alone`` are how long work
    takes while transfers are under way and after they are done, per mille of ``work``; ``link`` is the speed of a
    transfer beside work, per mille of its full speed. Work without transfers, and transfers without work, take their
    own time. A transfer that begins beside work keeps its lower speed after the work is done, because its thread blocks
    stay on the multiprocessors on which they found room.
    """
    linked = -(-beside * 1000 // link)
    computed = -(-work * slow // 1000)
    outlasted = linked + (work - linked * 1000 // slow) * alone // 1000
    found = np.where(linked >= computed, linked, outlasted)
    return np.where(beside > 0, np.where(work > 0, found, beside), work)


class ContentionRows(NamedTuple):
    """A cost model's contention in one direction: arguments of :func:`overlapped_ns` as ``[margin, rank, slot]``.

    A margin is a number of multiprocessors that work leaves free; the first axis follows ``margins``.
    """

    margins: tuple[int, ...]
    slow: Ints
    alone: Ints
    link: Ints

    def of(self, slots: slice) -> ContentionRows:
        """Return the same rows for a slice of the slots."""
        return ContentionRows(self.margins, *(column[:, :, slots] for column in self[1:]))

    def overlapped_ns(self, work: Ints, beside: Ints) -> Ints:
        """Return :func:`overlapped_ns` under every margin, ``[margin, rank, slot]``."""
        return overlapped_ns(work, beside, *self[1:])


def contention_rows(cost: CostModel, across: NDArray[np.bool_], backward: bool) -> ContentionRows:
    """Return the cost model's contention for every margin, rank and slot.

    ``across[rank, slot]`` says whether all transfers of a rank beside a slot cross nodes.
    """
    inside, crossing = (
        np.array([(*row.compute(backward), row.link) for row in cost.rows_beside(way)], np.int64).T[:, :, None, None]
        for way in (False, True)
    )
    return ContentionRows(tuple(row.margin for row in cost.rows_beside(False)), *np.where(across, crossing, inside))


def crosses_only(program: Program, sent: Sent, cluster: Cluster) -> NDArray[np.bool_]:
    """Return ``[rank, stage]``: whether all messages of a rank in a stage are with ranks of other nodes.

    This is also True for a rank without messages. ``sent`` is what :func:`flexcp.plan.rounds.find_messages` returned.
    """
    messages, stages, levels = sent
    stage, level = stages[messages.exchange], levels[messages.exchange]
    inside = np.zeros((cluster.ranks, program.stages), bool)
    for end in (messages.source, messages.target):
        inside[end[level == 0], stage[level == 0]] = True
    return ~inside


def transfers_ns(program: Program, sent: Sent, cluster: Cluster, cost: CostModel) -> Ints:
    """Return ``[rank, stage]``: how long the busiest port of a rank, or of a rank that sends to it, needs for a stage.

    The result is in nanoseconds and includes the start of the messages. ``sent`` is what
    :func:`flexcp.plan.rounds.find_messages` returned.
    """
    messages, stages, levels = sent
    stage, level = stages[messages.exchange], levels[messages.exchange]
    size = (2, cluster.ranks, program.stages)
    found = np.zeros(size[1:], np.int64)
    for end in (messages.source, messages.target):
        key = (level * cluster.ranks + end) * program.stages + stage
        amount, count = (
            sums(key, column, int(np.prod(size))).reshape(2, -1)
            for column in (messages.size, np.ones_like(messages.size))
        )
        for at, mbps in enumerate((cluster.intra_mbps, cluster.inter_mbps)[: 1 + (cluster.nodes > 1)]):
            ns = cost.link_ns(amount[at], mbps) + np.where(
                count[at] > 0, cluster.latency_ns + cost.message_ns * count[at], 0
            )
            found = np.maximum(found, ns.reshape(size[1:]))
    slowest = found.copy()
    np.maximum.at(slowest, (messages.target, stage), found[messages.source, stage])
    return slowest


def needed_work_ns(program: Program, work: Work, stages: Stages) -> Ints:
    """Return the work ``[rank, slot]`` of a program with needed traffic, in nanoseconds.

    Slot ``own_stage`` has the own work that is not held back, the slot of each input stage the work on its keys, and
    the slot after a rank's last inputs the own work that is held back.
    """
    number = stages.number
    begin = 0 if program.keys_kept else 1
    found = np.zeros((len(number), max(program.stages, begin + stages.borders.shape[1] - 1)), np.int64)
    found[:, begin : begin + stages.borders.shape[1] - 1] = stage_work(work, stages.number, stages.borders)
    found = found[:, : program.stages]
    after = work.own * stages.held // 1000 if program.held else np.zeros_like(work.own)
    found[:, program.own_stage] += work.own - after
    found[np.arange(len(number)), held_slot(program, begin + number - 1)] += after
    return found


def static_work_ns(
    placement: Placement, mask: int, stages: tuple[int, int], shape: Shape, cluster: Cluster, cost: CostModel
) -> tuple[Ints, Ints]:
    """Return the work ``[rank, slot]`` of a static method, forward and backward, in nanoseconds.

    ``mask`` is the number of a mask, and ``stages`` are the numbers of stages of the forward and the backward. The work
    of a group's documents is spread evenly over its ranks, and the work of a rank evenly over the positions of its
    ring. If heads are exchanged first, a rank computes during the exchange what it can from its own tokens. A gather
    brings all other keys at once.
    """
    groups = placement.traffic.groups
    group_of = np.zeros(placement.ranks, np.int64)
    for number, grid in enumerate(groups):
        group_of[[rank for row in grid for rank in row]] = number
    batch, runs = placement.batch, placement.runs
    real = runs.start < batch.tokens
    home = np.zeros(batch.documents, np.int64)
    home[batch.document_of(runs.start[real])] = group_of[runs.rank[real]]
    documents = np.arange(batch.documents)
    area = batch.masks[mask].rows_area(documents, np.zeros_like(documents), batch.lengths)
    area = (area + cost.row_tiles_work(batch.lengths)) * shape.heads
    size = np.bincount(group_of, minlength=len(groups))
    each = (sums(home, area, len(groups)) // size)[group_of]
    found = []
    for backward in (False, True):
        total = cost.attention_ns(each, shape, cluster, backward)
        work = np.zeros((placement.ranks, stages[backward]), np.int64)
        for grid in groups:
            ranks = np.array(grid, np.int64).reshape(-1)
            positions, split = len(grid), len(grid[0])
            if placement.traffic.kind == "gather":
                positions, split = len(ranks), 1
                shares = [1, positions - 1]
            elif split == 1:
                shares = [1] * positions
            else:
                shares = [1, split - 1] + [split] * (positions - 1)
            shares = shares[: work.shape[1]]
            work[ranks[:, None], np.arange(len(shares))] = (
                total[ranks][:, None] * np.array(shares) // (positions * split)
            )
        found.append(work)
    return found[0], found[1]


# --- the choices ------------------------------------------------------------------------------------------------------


def _margins(work: Ints, beside: Ints, rows: ContentionRows) -> Ints:
    """Return the margin of each slot: how many multiprocessors its work leaves free for the transfers beside it.

    ``work`` and ``beside`` (the transfers) are ``[rank, slot]`` in nanoseconds.
    """
    margin = np.full(work.shape[1], rows.margins[0], np.int64)
    if len(rows.margins) == 1 or not beside.any():
        return margin
    prices = _prices(work, beside, rows)
    best = prices[0]
    for number in range(1, len(rows.margins)):
        other = prices[number]
        # The first of the three times that differs decides.
        differs = np.argmax(other != best, axis=0)
        better = np.take_along_axis(other, differs[None], 0)[0] < np.take_along_axis(best, differs[None], 0)[0]
        margin = np.where(better, rows.margins[number], margin)
        best = np.where(better, other, best)
    return margin


def _prices(work: Ints, beside: Ints, rows: ContentionRows) -> Ints:
    """Return ``[margin, 3, slot]``: three times by which margins are compared, in nanoseconds.

    They are the time of the slowest rank, the sum over all ranks, and the sum of their work alone as transfers slow it
    down.
    """
    ns = rows.overlapped_ns(work, beside)
    slowed = np.where(beside > 0, work * rows.slow // 1000, work)
    return np.stack([ns.max(axis=1), ns.sum(axis=1), slowed.sum(axis=1)], axis=1)


def _least_ns(work: Ints, beside: Ints, rows: ContentionRows) -> int:
    """Return the nanoseconds of some slots under their best margins; each slot takes as long as its slowest rank."""
    return int(rows.overlapped_ns(work, beside).max(axis=1).min(axis=0).sum())


def _posted_early(program: Program, work: Ints, beside: Ints, rows: ContentionRows) -> tuple[Ints, Ints]:
    """Return (how many slots ahead each stage is posted: 1 or 2, the transfers that are then beside each slot).

    ``work`` and ``beside`` (the transfers, if every stage is posted one slot ahead) are ``[rank, slot]`` in
    nanoseconds, and so is the second result.
    """
    t = program.transfers
    moves = t.source != t.target
    bound = np.zeros(program.stages, bool)
    bound[t.stage[moves & (t.is_output | (t.source != t.owner))]] = True
    ahead = np.ones(program.stages, np.int64)
    for stage in range(2, program.stages):
        if bound[stage]:
            continue
        two = slice(stage - 2, stage)
        spare = np.maximum(work[:, stage - 2] - beside[:, stage - 2], 0)
        early = np.minimum(beside[:, stage - 1], spare)
        if not early.any():  # posting this stage earlier would change nothing
            continue
        moved = beside.copy()
        moved[:, stage - 2] += early
        moved[:, stage - 1] -= early
        before, after = (_least_ns(work[:, two], x[:, two], rows.of(two)) for x in (beside, moved))
        if after * 1000 < before * WORTH_PERMILLE:
            ahead[stage], beside = 2, moved
    return ahead, beside


def _rounds_per_call(program: Program, shape: Shape, cluster: Cluster, cost: CostModel) -> Ints:
    """Return the number of rounds per call for each stage, or 0 for a stage that is fastest as a single call.

    In a round, each rank sends to at most one rank and receives from at most one.
    """
    messages, stages, levels = find_messages(program, shape, cluster)
    at = messages.exchange * cluster.ranks + messages.target
    count, size = (
        sums(at, column, len(stages) * cluster.ranks).reshape(-1, cluster.ranks).max(axis=1)
        for column in (np.ones_like(at), messages.size)
    )
    port = np.where(levels, cost.link_ns(size, cluster.inter_mbps), cost.link_ns(size, cluster.intra_mbps))

    def stage_ns(rounds: Ints) -> Ints:
        ns = port * (1000 + cost.crowding * (np.minimum(rounds, count) - 1)) // 1000
        ns += cluster.latency_ns * (-(-count // rounds) - 1)
        found = np.zeros(program.stages, np.int64)
        np.maximum.at(found, stages, ns)
        return found

    best, chosen = stage_ns(np.maximum(count, 1)), np.zeros(program.stages, np.int64)
    for rounds in ROUNDS_TRIED:
        ns = stage_ns(np.full_like(count, rounds))
        better = ns < best
        best, chosen = np.where(better, ns, best), np.where(better, rounds, chosen)
    return chosen

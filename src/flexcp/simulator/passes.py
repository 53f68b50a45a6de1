"""Passes: one mask's program in one direction on all ranks, from when each begins to when each is done,
and its timeline.

A :class:`PassModel` is what does not change from layer to layer (work, copies, chunks); :func:`run_pass` puts it on
simulated time. A rank is *busy* while it copies and computes; the rest of the time between its first slot and its end
it *waits*.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from flexcp.cost import CostModel, row_for
from flexcp.plan.execution import Execution, margins
from flexcp.plan.plan import Plan
from flexcp.plan.program import Program, Transfers
from flexcp.plan.slots import pass_inputs
from flexcp.simulator.copies import Copies, copy_mbps, find_copies
from flexcp.simulator.messages import TimedChunks, find_chunks
from flexcp.simulator.slot_work import MaskWork, SlotWork, slot_ns, slot_work

Ints = NDArray[np.int64]
TRACKS = ("compute", "wait", "send inside", "send across", "receive inside", "receive across")
ROOMY_BITS = 36
"""A pass of 68 seconds; the clock of events has 39 bits."""


@dataclass(frozen=True)
class Rules:
    """What a simulation assumes beside the plan, which says itself how it is executed (:mod:`flexcp.plan.execution`).

    ``contention``: compute and transfers slow each other as the cost model says. ``ranks_per_nic``: so many neighbours
    share one network port, which carries as much as all of them together; one of them alone may then use all of it. The
    others are questions, what if the plan said something else of every stage: so many ``rounds_per_call``, posted so
    far ``ahead`` (0: transfers and compute take turns); or if each rank sent its messages peer by peer, ``in_line``.
    ``copy_mbps`` is how fast packing and merging read and write memory, in megabytes a second (None: as fast as copies
    are on the cluster, 0: nothing is copied). ``copies_messages_only``: of another executor's copies, only those of
    messages in and out are counted.
    """

    contention: bool = True
    ranks_per_nic: int = 1
    rounds_per_call: int | None = None
    ahead: int | None = None
    in_line: bool = False
    copy_mbps: int | None = None
    copies_messages_only: bool = False

    def applied(self, program: Program) -> Program:
        """The program as it is asked about."""
        how, stages = program.execution, np.arange(program.stages)
        if self.rounds_per_call is not None:
            how = replace(how, rounds_per_call=np.full_like(stages, self.rounds_per_call))
        if self.ahead is not None:
            how = replace(how, ahead=np.minimum(self.ahead, stages))
        return replace(program, execution=how)


class Event(NamedTuple):
    """One bar of a timeline: nanoseconds, and bytes where something moves."""

    rank: int
    track: str
    name: str
    begin: int
    end: int
    size: int


@dataclass(frozen=True, eq=False)
class PassModel:
    """Work and messages of a pass, the same in every layer, and how it is executed.

    ``ns[rank, slot]`` is undisturbed compute under the slot's margin; ``slow[rank, slot]`` how long it takes while the
    rank's transfers are under way, ``link[rank, slot]`` how fast those are meanwhile, both per mille. ``copies`` are
    part of the time a slot is busy.
    """

    name: str
    ranks: int
    backward: bool
    found: SlotWork
    ns: Ints
    chunks: TimedChunks
    rules: Rules
    latency_ns: int
    execution: Execution
    slow: Ints
    link: Ints
    copies: Copies


@dataclass(frozen=True, eq=False)
class Pass:
    """A pass that ran: begin and end of every slot ``[rank, slot]``, copies and compute, of every chunk,
    and when each rank started.
    """

    model: PassModel
    start: Ints
    begin: Ints
    end: Ints
    chunk_begin: Ints
    chunk_end: Ints

    @property
    def done(self) -> Ints:
        """When each rank is done."""
        return self.end[:, -1]

    @property
    def compute_ns(self) -> Ints:
        """Time in which each rank computes, or copies what comes and goes."""
        return np.asarray((self.end - self.begin).sum(axis=1))

    @property
    def wait_ns(self) -> Ints:
        """Time in which it does not."""
        return self.done - self.start - self.compute_ns

    def events(self) -> Iterator[Event]:
        """The timeline: compute and waits of every rank, and its messages at both ends."""
        name = self.model.name
        for rank in range(self.model.ranks):
            free = int(self.start[rank])
            for slot in range(self.begin.shape[1]):
                begin, end = int(self.begin[rank, slot]), int(self.end[rank, slot])
                if begin > free:
                    yield Event(rank, "wait", f"{name}, stage {slot}", free, begin, 0)
                if end > begin:
                    yield Event(rank, "compute", f"{name}, slot {slot}", begin, end, 0)
                free = max(free, end)
        c = self.model.chunks
        columns = (c.source, c.target, c.across, c.stage, c.size, self.chunk_begin, self.chunk_end)
        for source, target, across, stage, size, begin, end in zip(*(x.tolist() for x in columns), strict=True):
            level = "across" if across else "inside"
            yield Event(source, f"send {level}", f"{name}, stage {stage}, to rank {target}", begin, end, size)
            yield Event(target, f"receive {level}", f"{name}, stage {stage}, from rank {source}", begin, end, size)


def pass_model(
    plan: Plan,
    mask: int,
    backward: bool,
    cost: CostModel,
    rules: Rules,
    ns: Ints | None = None,
    shared: MaskWork | None = None,
) -> PassModel:
    """Work and messages of a mask's program in one direction; ``ns[rank, slot]`` replaces modelled by measured compute.

    ``shared`` is what both directions of the mask count with, where it is at hand.
    """
    program = rules.applied(plan.programs[mask][backward])
    inputs = pass_inputs(plan, mask, backward)
    found = slot_work(plan, mask, backward, shared, inputs)
    if ns is None:
        ns = slot_ns(found, plan, cost, backward)
    elif ns.shape != found.work.shape:
        raise ValueError(
            f"measured compute is [rank, slot] = {found.work.shape} for this program; got an array of {ns.shape}"
        )
    how = program.execution
    chunks = find_chunks(plan, mask, backward, cost, how.rounds_per_call, rules.in_line, rules.ranks_per_nic)
    alone, slow, link = _contention(program, chunks, plan.ranks, cost, rules, backward)
    ns = -(-ns * alone // 1000)
    name = f"{plan.batch.masks[mask].name} {'backward' if backward else 'forward'}"
    copies = _copies(plan, mask, backward, cost, rules, inputs)
    return PassModel(
        name, plan.ranks, backward, found, ns, chunks, rules, plan.cluster.latency_ns, how, slow, link, copies
    )


def _copies(plan: Plan, mask: int, backward: bool, cost: CostModel, rules: Rules, inputs: Transfers) -> Copies:
    if rules.copy_mbps == 0:
        return Copies(*np.zeros((2, plan.ranks, plan.programs[mask][backward].stages), np.int64))
    mbps = copy_mbps(plan.cluster) if rules.copy_mbps is None else rules.copy_mbps
    return find_copies(plan, mask, backward, mbps, cost.kernel_ns, rules.copies_messages_only, inputs)


def _contention(
    program: Program, chunks: TimedChunks, ranks: int, cost: CostModel, rules: Rules, backward: bool
) -> tuple[Ints, Ints, Ints]:
    """``[rank, slot]``, per mille, under the plan's margins: compute alone; beside transfers, against that;
    speed of those.

    What travels beside a slot is taken to be the stage after it: inside the node if any of it is.
    """
    if not rules.contention:
        alone, slow, link = np.full((3, ranks, program.stages), 1000, np.int64)
        return alone, slow, link
    margin = margins(program, ranks)
    across = np.ones((ranks, program.stages + 1), np.int64)
    here = np.flatnonzero(chunks.across == 0)
    for end in (chunks.source, chunks.target):
        across[end[here], chunks.stage[here]] = 0
    margins_left = {0, *program.execution.margin.tolist()}
    at_margin = np.zeros((3, 2, max(margins_left) + 1), np.int64)
    for level, rows in enumerate(map(cost.rows_beside, (False, True))):
        for left in margins_left:
            row = row_for(rows, left)
            beside, undisturbed = row.compute(backward)
            at_margin[:, level, left] = undisturbed, -(-beside * 1000 // undisturbed), row.link
    alone, slow, link = at_margin.reshape(3, -1)[:, across[:, 1:] * at_margin.shape[2] + margin]
    return alone, slow, link


def run_pass(model: PassModel, start: Ints) -> Pass:
    """Run a pass in which each rank begins when it is ready."""
    from flexcp.simulator.compiled_events import run_events  # compiled: only who simulates loads Numba

    work, c, ranks = model.ns, model.chunks, model.ranks
    stage, posted, pace, copies = (
        c.stage,
        model.execution.posted,
        np.stack([model.slow, model.link]),
        np.stack(model.copies),
    )
    in_turns = bool((model.execution.ahead[1:] == 0).any())
    if in_turns:
        work, copies, stage, posted, pace = _in_turns(work, copies, stage, model.execution, pace)
    opens = np.searchsorted(posted[1:], np.arange(len(posted) + 1)) + 1
    everyone = np.arange(ranks, dtype=np.int64)
    ports = np.stack([everyone, ranks + everyone // model.rules.ranks_per_nic])
    out, into = ports[c.across, c.source], ports[c.across, c.target]
    ends = np.zeros_like(c.ns)
    coarser = _bits_too_long(start, work, copies, c.ns, out)
    table = np.stack([stage, out, into, c.source, c.target, c.ns >> coarser, ends, ends], axis=1)
    rule = np.array([model.latency_ns >> coarser, model.rules.in_line], np.int64)
    tables = (table, ports, rule, np.ascontiguousarray(pace), opens)
    times = (np.ascontiguousarray(x, np.int64) >> coarser for x in (start, work, copies))
    begin, end = run_events(*times, *tables)
    begin, end = begin << coarser, end << coarser
    table[:, -2:] <<= coarser
    if in_turns:
        begin, end = begin[:, 1::3], end[:, 1::3]
    return Pass(model, start, begin, end, *table[:, -2:].T.copy())


def _bits_too_long(start: Ints, work: Ints, copies: Ints, chunk_ns: Ints, port: Ints) -> int:
    """By how many bits the times of a pass must be shortened for the clock of events: none, unless it takes minutes.

    What takes longest is estimated by the busiest rank and the busiest port, with room for what they wait and are
    slowed by.
    """
    longest = int(start.max()) + int(work.sum(axis=1).max()) + int(copies.sum(axis=2).max())
    if len(chunk_ns):
        longest += int(np.bincount(port, chunk_ns).max())
    return max(0, longest.bit_length() - ROOMY_BITS)


def _in_turns(work: Ints, copies: Ints, stage: Ints, how: Execution, pace: Ints) -> tuple[Ints, Ints, Ints, Ints, Ints]:
    """Every slot as three, where some stages are posted beside nothing: one that receives, one that takes in, posts
    what is ahead and computes, and one that posts the next slot's own stage when all is computed.
    """
    number = np.arange(len(how))
    apart, copied = (
        np.zeros((work.shape[0], 3 * work.shape[1]), np.int64),
        np.zeros((*copies.shape[:2], 3 * copies.shape[2]), np.int64),
    )
    apart[:, 1::3] = work
    copied[0, :, ::3], copied[1, :, 1::3] = copies
    posted = np.maximum(np.where(how.ahead == 0, 3 * number - 1, 3 * how.posted + 1), 0)
    return apart, copied, 3 * stage, np.repeat(posted, 3), np.repeat(pace, 3, axis=2)

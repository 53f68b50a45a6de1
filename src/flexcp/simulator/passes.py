"""Passes: one mask's program in one direction on all ranks, on simulated time, and its timeline.

A :class:`PassModel` holds what is the same in every layer (work, copies, chunks); :func:`run_pass` runs it on simulated
time. A rank is *busy* while it copies or computes. The rest of the time, from the start of its pass to its end, it
*waits*.
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
from flexcp.simulator.slot_work import MaskWork, slot_ns, slot_work

Ints = NDArray[np.int64]
TRACKS = ("compute", "wait", "send inside", "send across", "receive inside", "receive across")
ROOMY_BITS = 36
"""A pass whose estimated nanoseconds have at most this many bits (68 seconds) is simulated exactly.

Longer passes are simulated with a coarser clock; the clock of events has 39 bits.
"""


@dataclass(frozen=True)
class Rules:
    """What a simulation assumes besides the plan, which says itself how it is executed (:mod:`flexcp.plan.execution`).

    - ``contention``: compute and transfers slow each other down as the cost model says.
    - ``ranks_per_nic``: this many neighbouring ranks share one network port, which carries as much as the ports of all
      of them together. If only one of them sends, it can use all of it.
    - ``rounds_per_call``, ``ahead``: replace the plan's own values in every stage (``ahead=0``: transfers and compute
      take turns).
    - ``in_line``: each rank sends its messages peer by peer.
    - ``copy_mbps``: how fast packing and merging read and write memory, in megabytes per second (None: the speed of
      copies on the cluster, 0: no time for copies).
    - ``copies_messages_only``: count only copies of messages, as for an executor that copies nothing else.
    """

    contention: bool = True
    ranks_per_nic: int = 1
    rounds_per_call: int | None = None
    ahead: int | None = None
    in_line: bool = False
    copy_mbps: int | None = None
    copies_messages_only: bool = False

    def applied(self, program: Program) -> Program:
        """Return the program with the execution that these rules ask for."""
        how, stages = program.execution, np.arange(program.stages)
        if self.rounds_per_call is not None:
            how = replace(how, rounds_per_call=np.full_like(stages, self.rounds_per_call))
        if self.ahead is not None:
            how = replace(how, ahead=np.minimum(self.ahead, stages))
        return replace(program, execution=how)


class Event(NamedTuple):
    """One bar of a timeline: begin and end in nanoseconds, and bytes (``size``) if it is a message."""

    rank: int
    track: str
    name: str
    begin: int
    end: int
    size: int


@dataclass(frozen=True, eq=False)
class PassModel:
    """Work and messages of a pass (one mask in one direction), the same in every layer, and how it is executed.

    ``ns[rank, slot]`` are the nanoseconds of its compute without disturbance,
    under the slot's margin (multiprocessors left to transfers). While transfers of the rank are under way, compute
    takes ``slow[rank, slot]`` per mille of that time, and the transfers have ``link[rank, slot]`` per mille of their
    speed. ``copies`` are added to the time in which a slot is busy. ``latency_ns`` passes between posting a stage and
    its start.
    """

    name: str
    ranks: int
    backward: bool
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
    """A pass (one mask in one direction) that was simulated, with all times in nanoseconds.

    ``start[rank]`` is when each rank was ready; ``begin`` and ``end`` are ``[rank, slot]``, copies and compute
    together; ``chunk_begin`` and ``chunk_end`` are those of every chunk of the model.
    """

    model: PassModel
    start: Ints
    begin: Ints
    end: Ints
    chunk_begin: Ints
    chunk_end: Ints

    @property
    def done(self) -> Ints:
        """When each rank has finished the pass, in nanoseconds."""
        return self.end[:, -1]

    @property
    def compute_ns(self) -> Ints:
        """How many nanoseconds each rank computes or copies."""
        return np.asarray((self.end - self.begin).sum(axis=1))

    @property
    def wait_ns(self) -> Ints:
        """How many nanoseconds each rank neither computes nor copies, between its start and its end."""
        return self.done - self.start - self.compute_ns

    def events(self) -> Iterator[Event]:
        """Yield the timeline: compute and waits of every rank, and every chunk of a message at both of its ends."""
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
    """Return the work and messages of a mask's program in one direction.

    ``ns[rank, slot]`` are measured nanoseconds of compute, which replace the modelled ones; ValueError is raised if the
    array has another shape than the program. ``shared`` is the :class:`MaskWork` that both directions of the mask use,
    if the caller has it.
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
    return PassModel(name, plan.ranks, backward, ns, chunks, rules, plan.cluster.latency_ns, how, slow, link, copies)


def _copies(plan: Plan, mask: int, backward: bool, cost: CostModel, rules: Rules, inputs: Transfers) -> Copies:
    """Return the nanoseconds of copies in a pass under these rules."""
    if rules.copy_mbps == 0:
        return Copies(*np.zeros((2, plan.ranks, plan.programs[mask][backward].stages), np.int64))
    mbps = copy_mbps(plan.cluster) if rules.copy_mbps is None else rules.copy_mbps
    return find_copies(plan, mask, backward, mbps, cost.kernel_ns, rules.copies_messages_only, inputs)


def _contention(
    program: Program, chunks: TimedChunks, ranks: int, cost: CostModel, rules: Rules, backward: bool
) -> tuple[Ints, Ints, Ints]:
    """Return three tables ``[rank, slot]``, per mille, under the plan's margins.

    They are: the time of compute under the slot's margin without transfers, the time of compute beside transfers
    relative to that, and the speed of transfers beside compute. Without ``rules.contention`` all are 1000. The
    transfers beside a slot are assumed to be those of the next stage; they count as transfers inside the node if any of
    them is.
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
    """Run a pass on simulated time; rank r begins at ``start[r]`` nanoseconds."""
    from flexcp.simulator.compiled_events import run_events  # compiled: only simulations need Numba

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
    """Return by how many bits the times of a pass must be shortened for the clock of events: 0 unless it takes minutes.

    The length of the pass is estimated from the busiest rank and the busiest port (``port`` is the port of each chunk);
    ``ROOMY_BITS`` leaves room for waits and contention.
    """
    longest = int(start.max()) + int(work.sum(axis=1).max()) + int(copies.sum(axis=2).max())
    if len(chunk_ns):
        longest += int(np.bincount(port, chunk_ns).max())
    return max(0, longest.bit_length() - ROOMY_BITS)


def _in_turns(work: Ints, copies: Ints, stage: Ints, how: Execution, pace: Ints) -> tuple[Ints, Ints, Ints, Ints, Ints]:
    """Divide every slot into three, for programs in which some stages are posted in their own slot (``ahead`` 0).

    The messages of such stages travel without work beside them. The first of the three slots receives; the second takes
    in, posts stages ahead of their slot and computes; the third posts the stage of the next slot when all work is done.
    Return (work, copies, stage, posted, pace) for the divided slots; ``posted`` is the slot that posts each stage.
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

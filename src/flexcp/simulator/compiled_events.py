"""Loops of the event simulator: slots begin, compute ends, chunks start and arrive (compiled).

A rank enters slot s when it has computed slot s - 1 and all messages of stage s have arrived, those it sends as well as
those it receives, because a grouped call ends only when all its transfers have. In the slot it unpacks what it
received, packs and posts the stages that the plan posts there one after the other (``opens[s]`` to ``opens[s + 1]``,
usually just stage s + 1), and computes. The stages of a rank travel one after the other, as NCCL runs the calls of a
group: a rank *opens* a stage when it has posted it and all its chunks of earlier stages have arrived. A chunk may start
when both its ranks have opened its stage and when the sender's outgoing and the receiver's incoming port of its level
are free; it holds both ports until it arrives. If several chunks may start, the first in order does. So a port is never
idle while a chunk could use it. With the rule IN_LINE, a sender takes its chunks strictly in order and waits for the
receiver of the first one.

While chunks of a rank are under way, its compute takes ``pace[SLOW, rank, slot]`` per mille of the usual time. A chunk
that starts while one of its ranks computes takes 1000 / ``pace[LINK, rank, slot]`` of the usual time; if both ranks
compute, the slower one counts. All numbers are integers, so the same plan gives the same times on every machine.

An event is one integer: its time, then what happens, then the number of the rank or chunk it happens to.

The state is in tables whose last columns are named below: ``rule`` (for the whole simulation), ``rank``, ``chunk``, and
for each port ``queue[OUT or IN]``. A rank has a port inside its node and a port across nodes, ``ports[level, rank]``;
ranks may share a port. The queue of a port is a linked list of places in the order of stages, which begins with the
place HEAD. Each place has a chunk, ``chunk_at[OUT or IN, place]``, and each chunk has a place on both sides,
``place[OUT or IN, chunk]``. If ranks have hundreds of messages, searching the queues takes most of the time. A search
therefore reads only ``waits[OUT or IN, place]``: the stage that has to be open (FOR), the port at the other end of the
chunk (AT) and the places after and before this one in the queue (AFTER, BEFORE; NONE at its ends). A chunk that starts
leaves the queue. OPEN is the stage up to which the ranks of a free port have opened stages, or BUSY; OPENED_UP_TO is
the same for a port that is not free.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from flexcp.arrays.compiled_heap import empty_heap, pop, push
from flexcp.arrays.jit import compiled, compiled_leaf

Ints = NDArray[np.int64]
POSTED, COMPUTED, ARRIVED = range(3)
"""Kinds of events; of events at the same time, the kind listed first comes first."""
WHOM, WHAT = 22, 2
"""Bits for the rank or chunk and for the kind of an event; 39 bits are left for its nanoseconds, nine minutes."""
MOST_CHUNKS = 1 << WHOM
LATENCY, IN_LINE = range(2)
SLOW, LINK = range(2)
PACK, TAKE_IN = range(2)
SLOT, STAGE_POSTED, STAGE_OPEN, COMPUTING, LEFT, SINCE, READY, FORESEEN, UNDER_WAY, RANK_ROWS = range(10)
STAGE, PORT_OUT, PORT_IN, SOURCE, TARGET, NS, BEGIN, END, CHUNK_ROWS = range(9)
OPEN, HEAD, OPENED_UP_TO, QUEUE_ROWS = range(4)
BUSY = NONE = -1
FOR, AT, AFTER, BEFORE, WAITS_ROWS = range(5)
OUT, IN = range(2)


@compiled
def run_events(
    start: Ints,
    work: Ints,
    copies: Ints,
    chunk: Ints,
    ports: Ints,
    rule: Ints,
    pace: Ints,
    opens: Ints,
) -> tuple[Ints, Ints]:
    """Run a pass; return (begin, end) of every slot in nanoseconds, both ``[rank, slot]``.

    ``start[rank]``, ``work[rank, slot]`` and ``copies[PACK or TAKE_IN, rank, stage]`` are in nanoseconds. The table
    ``chunk`` has the columns STAGE to END; BEGIN and END are filled in. Ports take chunks in the order of its rows. The
    other arguments are explained in the module's docstring.
    """
    ranks, slots = work.shape
    begin = np.zeros((ranks, slots), np.int64)
    end = np.zeros((ranks, slots), np.int64)
    missing = np.zeros((ranks, slots), np.int64)
    takes_part = np.zeros((ranks, slots), np.int64)
    for c in range(len(chunk)):
        for r in (chunk[c, SOURCE], chunk[c, TARGET]):
            missing[r, chunk[c, STAGE]] += 1
            takes_part[r, chunk[c, STAGE]] = 1
    rank = np.zeros((ranks, RANK_ROWS), np.int64)
    rank[:, SLOT] = -1
    queue = np.zeros((2, ports.max() + 1, QUEUE_ROWS), np.int64)
    waits, chunk_at, place = queued(chunk, queue)
    rank[:, READY] = rank[:, FORESEEN] = start
    # A rank posts and computes once per slot. A chunk arrives once, and changes the pace of two ranks twice: when it
    # starts and when it arrives.
    events = empty_heap(ranks + 2 * ranks * slots + 5 * len(chunk))
    for r in range(ranks):
        push(events, event(start[r], COMPUTED, r))
    while events[0] > 0:
        next_event = pop(events)
        now, what, number = next_event >> (WHOM + WHAT), (next_event >> WHOM) & 3, next_event & (MOST_CHUNKS - 1)
        if what == COMPUTED:
            if now == rank[number, READY]:
                rank[number, READY] = -1
                rank[number, COMPUTING] = 0
                if rank[number, SLOT] >= 0:
                    end[number, rank[number, SLOT]] = now
                go_on(number, now, rank, begin, end, missing, takes_part, work, copies, rule, pace, opens, events)
            elif now == rank[number, FORESEEN] and rank[number, COMPUTING] == 1:  # slowed down since this was pushed
                foresee(number, rank, events)
        elif what == POSTED:
            stage = next_stage(number, rank[number, STAGE_POSTED], takes_part)
            rank[number, STAGE_POSTED] = stage
            if missing[number, rank[number, STAGE_OPEN]] == 0:
                rank[number, STAGE_OPEN] = stage
                open_stage(number, now, rank, chunk, ports, queue, waits, chunk_at, place, rule, pace, events)
        else:
            out, into = chunk[number, PORT_OUT], chunk[number, PORT_IN]
            source, target, stage = chunk[number, SOURCE], chunk[number, TARGET], chunk[number, STAGE]
            chunk[number, END] = now
            queue[OUT, out, OPEN] = queue[OUT, out, OPENED_UP_TO]
            queue[IN, into, OPEN] = queue[IN, into, OPENED_UP_TO]
            change_pace(source, -1, now, rank, pace, events)
            change_pace(target, -1, now, rank, pace, events)
            for r in (source, target):
                missing[r, stage] -= 1
                if missing[r, stage] == 0 and rank[r, COMPUTING] == 0 and rank[r, SLOT] == stage - 1:
                    go_on(r, now, rank, begin, end, missing, takes_part, work, copies, rule, pace, opens, events)
            for r in (source, target):
                if missing[r, stage] == 0 and stage < rank[r, STAGE_POSTED]:
                    rank[r, STAGE_OPEN] = next_stage(r, stage, takes_part)
                    open_stage(r, now, rank, chunk, ports, queue, waits, chunk_at, place, rule, pace, events)
            start_one(out, OUT, now, rank, chunk, queue, waits, chunk_at, place, rule, pace, events)
            start_one(into, IN, now, rank, chunk, queue, waits, chunk_at, place, rule, pace, events)
    return begin, end


@compiled_leaf
def next_stage(r, stage, takes_part):
    """Return the next stage after ``stage`` in which rank ``r`` sends or receives anything; there must be one."""
    stage += 1
    while takes_part[r, stage] == 0:
        stage += 1
    return stage


@compiled_leaf
def open_stage(r, now, rank, chunk, ports, queue, waits, chunk_at, place, rule, pace, events):
    """Let chunks of the stage that rank ``r`` has just opened start, where ports are free."""
    for level in range(2):
        for side in range(2):
            port = ports[level, r]
            open_port(port, side, rank[r, STAGE_OPEN], queue)
            start_one(port, side, now, rank, chunk, queue, waits, chunk_at, place, rule, pace, events)


@compiled_leaf
def event(time, what, whom):
    """Return an event as one integer: its time in nanoseconds, its kind and the number of a rank or chunk."""
    return (time << (WHOM + WHAT)) | (what << WHOM) | whom


@compiled_leaf
def go_on(r, now, rank, begin, end, missing, takes_part, work, copies, rule, pace, opens, events):
    """Let rank ``r``, which is not computing, enter slot after slot, until one has work or lacks messages.

    Copies count as work.
    """
    slots = work.shape[1]
    while rank[r, SLOT] + 1 < slots and missing[r, rank[r, SLOT] + 1] == 0:
        rank[r, SLOT] += 1
        s = rank[r, SLOT]
        begin[r, s] = now
        copied = copies[TAKE_IN, r, s]
        for stage in range(opens[s], opens[s + 1]):
            copied += copies[PACK, r, stage]
            if takes_part[r, stage] == 1:
                push(events, event(now + copied + rule[LATENCY], POSTED, r))
        if copied + work[r, s] > 0:
            rank[r, COMPUTING] = 1
            rank[r, LEFT] = copied + work[r, s]
            compute(r, now, rank, pace, events)
            return
        end[r, s] = now


@compiled_leaf
def compute(r, now, rank, pace, events):
    """Set when rank ``r`` will have finished its compute at the present pace, in the column READY of ``rank``.

    This replaces an earlier estimate. The event of the earlier estimate is kept if it comes no later than the new end;
    it then pushes the next one.
    """
    slow = pace[SLOW, r, rank[r, SLOT]] if rank[r, UNDER_WAY] > 0 else 1000
    rank[r, SINCE] = now
    rank[r, READY] = now + (rank[r, LEFT] * slow + 999) // 1000
    if not now < rank[r, FORESEEN] <= rank[r, READY]:
        foresee(r, rank, events)


@compiled_leaf
def foresee(r, rank, events):
    """Push an event at the time when rank ``r`` will have finished its compute at the present pace."""
    rank[r, FORESEEN] = rank[r, READY]
    push(events, event(rank[r, READY], COMPUTED, r))


@compiled_leaf
def change_pace(r, change, now, rank, pace, events):
    """Note that a chunk of rank ``r`` starts (``change`` +1) or ends (-1), and update when the rank's compute ends."""
    before = rank[r, UNDER_WAY]
    rank[r, UNDER_WAY] += change
    slow = pace[SLOW, r, rank[r, SLOT]]
    if rank[r, COMPUTING] == 1 and slow != 1000 and (before > 0) != (rank[r, UNDER_WAY] > 0):
        done = slow if before > 0 else 1000
        rank[r, LEFT] = max(0, rank[r, LEFT] - (now - rank[r, SINCE]) * 1000 // done)
        compute(r, now, rank, pace, events)


@compiled_leaf
def open_port(p, side, stage, queue):
    """Note that a rank of port ``p`` has opened ``stage``; a free port becomes open for chunks of this stage."""
    queue[side, p, OPENED_UP_TO] = max(queue[side, p, OPENED_UP_TO], stage)
    if queue[side, p, OPEN] != BUSY:
        queue[side, p, OPEN] = queue[side, p, OPENED_UP_TO]


@compiled_leaf
def start_one(p, side, now, rank, chunk, queue, waits, chunk_at, place, rule, pace, events):
    """Start the first chunk in the queue of port ``p`` that can start, if there is one."""
    opened = queue[side, p, OPEN]
    at = queue[side, p, HEAD]
    while at != NONE:
        stage = waits[side, at, FOR]
        if stage > opened:
            return
        if stage <= queue[1 - side, waits[side, at, AT], OPEN]:
            c = chunk_at[side, at]
            if can_start(c, rank, chunk, queue, place, rule):
                start_chunk(c, now, rank, chunk, queue, waits, place, pace, events)
                return
        if rule[IN_LINE] == 1 and side == OUT:
            return
        at = waits[side, at, AFTER]


@compiled_leaf
def can_start(c, rank, chunk, queue, place, rule):
    """Return whether a chunk whose ports are free may start.

    Both its ranks must have opened its stage, and with the rule IN_LINE it must be first in its sender's queue.
    """
    opened = min(rank[chunk[c, SOURCE], STAGE_OPEN], rank[chunk[c, TARGET], STAGE_OPEN])
    turn = rule[IN_LINE] == 0 or queue[OUT, chunk[c, PORT_OUT], HEAD] == place[OUT, c]
    return turn and opened >= chunk[c, STAGE]


@compiled_leaf
def start_chunk(c, now, rank, chunk, queue, waits, place, pace, events):
    """Start chunk ``c``: occupy its ports, take it out of their queues and push the event of its arrival."""
    out, into, source, target = chunk[c, PORT_OUT], chunk[c, PORT_IN], chunk[c, SOURCE], chunk[c, TARGET]
    queue[OUT, out, OPEN] = queue[IN, into, OPEN] = BUSY
    take_out(place[OUT, c], OUT, out, queue, waits)
    take_out(place[IN, c], IN, into, queue, waits)
    chunk[c, BEGIN] = now
    link = 1000
    for r in (source, target):
        if rank[r, COMPUTING] == 1:
            link = min(link, pace[LINK, r, rank[r, SLOT]])
    time = (chunk[c, NS] * 1000 + link - 1) // link
    change_pace(source, 1, now, rank, pace, events)
    change_pace(target, 1, now, rank, pace, events)
    push(events, event(now + time, ARRIVED, c))


@compiled
def queued(chunk, queue):
    """Put all chunks into the queues of their ports; return the tables ``waits``, ``chunk_at`` and ``place``.

    The module's docstring explains the tables.
    """
    waits = np.empty((2, len(chunk), WAITS_ROWS), np.int32)
    chunk_at, place = np.empty((2, len(chunk)), np.int32), np.empty((2, len(chunk)), np.int32)
    for side in range(2):
        mine, other = (PORT_OUT, PORT_IN) if side == OUT else (PORT_IN, PORT_OUT)
        end = np.zeros(queue.shape[1], np.int64)
        for c in range(len(chunk)):
            end[chunk[c, mine]] += 1
        end = np.cumsum(end)
        queue[side, :, HEAD] = NONE
        for c in range(len(chunk) - 1, -1, -1):  # fills the places of each port from the last to the first
            port = chunk[c, mine]
            end[port] -= 1
            at, after = end[port], queue[side, port, HEAD]
            waits[side, at, FOR], waits[side, at, AT] = chunk[c, STAGE], chunk[c, other]
            waits[side, at, AFTER], waits[side, at, BEFORE] = after, NONE
            if after != NONE:
                waits[side, after, BEFORE] = at
            queue[side, port, HEAD] = at
            chunk_at[side, at], place[side, c] = c, at
    return waits, chunk_at, place


@compiled_leaf
def take_out(at, side, port, queue, waits):
    """Take place ``at`` out of the queue of a port."""
    after, before = waits[side, at, AFTER], waits[side, at, BEFORE]
    if after != NONE:
        waits[side, after, BEFORE] = before
    if before == NONE:
        queue[side, port, HEAD] = after
    else:
        waits[side, before, AFTER] = after

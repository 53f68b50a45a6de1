"""Loops of the event simulator: slots begin, compute ends, chunks come and go; compiled.

A rank enters slot s when it has computed slot s - 1 and all messages of stage s, those it sends as well as those it receives, have
arrived: a grouped call is over when all its transfers are. It takes them in, packs and posts the stages that the plan posts there
(``opens[s]`` to ``opens[s + 1]``; most often stage s + 1), one after the other, and computes. A chunk of a stage may go when both its
ranks have posted that stage; it goes when the sender's outgoing and the receiver's incoming port of its level are free, the earliest in
order first, and holds both until it is there. So a port is never idle while something can use it. In line, a sender takes its chunks
strictly in order, and waits for the receiver of the first.

While chunks of a rank are under way its compute takes ``pace[SLOW, rank, slot]`` per mille of its time; a chunk that starts while one of
its ranks computes takes 1000 / ``pace[LINK, rank, slot]`` of its own, the slower one's where both do. Everything is integers, so the same
plan gives the same times on every machine.

An event is one integer: its time, then what happens, then to whom (a rank or a chunk).

State is in tables whose rows are named below: ``rule`` (what holds for all), ``rank``, ``chunk``, and for each port ``queue[OUT or IN]``. A
rank has a port inside its node and one across nodes, ``ports[level, rank]``; ranks may share one. ``order[OUT]`` are the chunks by the port
they leave through, beginning at ``first[OUT, port]``. None of a port's from ``order[OUT, i]`` on is of a stage before ``earliest[OUT, i]``,
so a search for a chunk ends where no rank of the port has posted that.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from flexcp.arrays.compiled_heap import empty_heap, pop, push
from flexcp.arrays.jit import compiled, compiled_leaf

Ints = NDArray[np.int64]
POSTED, COMPUTED, ARRIVED = range(3)
"""Events; of the same time the first comes first."""
WHOM, WHAT = 22, 2
"""Bits of an event's last two parts; 39 are left for its time, nine minutes."""
MOST_CHUNKS = 1 << WHOM
LATENCY, IN_LINE, RULES = range(3)
SLOW, LINK = range(2)
PACK, TAKE_IN = range(2)
SLOT, STAGE_POSTED, COMPUTING, LEFT, SINCE, READY, UNDER_WAY, RANK_ROWS = range(8)
STAGE, PORT_OUT, PORT_IN, SOURCE, TARGET, NS, BEGIN, END, CHUNK_ROWS = range(9)
BUSY, NEXT, POSTED_UP_TO, QUEUE_ROWS = range(4)
OUT, IN = range(2)


@compiled
def run_events(
    start: Ints,
    work: Ints,
    copies: Ints,
    chunk: Ints,
    order: Ints,
    first: Ints,
    ports: Ints,
    rule: Ints,
    pace: Ints,
    opens: Ints,
) -> tuple[Ints, Ints]:
    """Runs a pass: begin and end of every slot on each rank; BEGIN and END of ``chunk`` are filled in.

    ``start[rank]``, ``work[rank, slot]`` and ``copies[PACK or TAKE_IN, rank, stage]`` are nanoseconds, ``order[OUT or IN]`` the chunks by
    port, ``first[OUT or IN, port]`` where a port's begin.
    """
    ranks, slots = work.shape
    begin = np.zeros((ranks, slots), np.int64)
    end = np.zeros((ranks, slots), np.int64)
    missing = np.zeros((ranks, slots), np.int64)
    takes_part = np.zeros((ranks, slots), np.int64)
    for c in range(chunk.shape[1]):
        chunk[BEGIN, c] = -1
        missing[chunk[TARGET, c], chunk[STAGE, c]] += 1
        missing[chunk[SOURCE, c], chunk[STAGE, c]] += 1
        takes_part[chunk[TARGET, c], chunk[STAGE, c]] = 1
        takes_part[chunk[SOURCE, c], chunk[STAGE, c]] = 1
    rank = np.zeros((RANK_ROWS, ranks), np.int64)
    rank[SLOT] = -1
    queue = np.zeros((2, QUEUE_ROWS, first.shape[1] - 1), np.int64)
    queue[:, NEXT] = first[:, :-1]
    earliest = earliest_stages(chunk, order, first)
    rank[READY] = start
    # A rank posts and computes once a slot; a chunk arrives once, and changes the pace of two ranks when it starts and when it does.
    events = empty_heap(ranks + 2 * ranks * slots + 5 * chunk.shape[1])
    for r in range(ranks):
        push(events, event(start[r], COMPUTED, r))
    while events[0] > 0:
        next_event = pop(events)
        now, what, number = next_event >> (WHOM + WHAT), (next_event >> WHOM) & 3, next_event & (MOST_CHUNKS - 1)
        if what == COMPUTED:
            if now == rank[READY, number]:
                rank[READY, number] = -1
                rank[COMPUTING, number] = 0
                if rank[SLOT, number] >= 0:
                    end[number, rank[SLOT, number]] = now
                go_on(number, now, rank, begin, end, missing, takes_part, work, copies, rule, pace, opens, events)
        elif what == POSTED:
            stage = rank[STAGE_POSTED, number] + 1
            while takes_part[number, stage] == 0:
                stage += 1
            rank[STAGE_POSTED, number] = stage
            for level in range(2):
                for side in range(2):
                    port = ports[level, number]
                    queue[side, POSTED_UP_TO, port] = max(queue[side, POSTED_UP_TO, port], stage)
                    start_one(port, side, now, rank, chunk, queue, order, first, earliest, rule, pace, events)
        else:
            out, into = chunk[PORT_OUT, number], chunk[PORT_IN, number]
            source, target, stage = chunk[SOURCE, number], chunk[TARGET, number], chunk[STAGE, number]
            chunk[END, number] = now
            queue[OUT, BUSY, out] = queue[IN, BUSY, into] = 0
            change_pace(source, -1, now, rank, pace, events)
            change_pace(target, -1, now, rank, pace, events)
            for r in (source, target):
                missing[r, stage] -= 1
                if missing[r, stage] == 0 and rank[COMPUTING, r] == 0 and rank[SLOT, r] == stage - 1:
                    go_on(r, now, rank, begin, end, missing, takes_part, work, copies, rule, pace, opens, events)
            start_one(out, OUT, now, rank, chunk, queue, order, first, earliest, rule, pace, events)
            start_one(into, IN, now, rank, chunk, queue, order, first, earliest, rule, pace, events)
    return begin, end


@compiled_leaf
def event(time, what, whom):
    """An event as one integer."""
    return (time << (WHOM + WHAT)) | (what << WHOM) | whom


@compiled_leaf
def go_on(r, now, rank, begin, end, missing, takes_part, work, copies, rule, pace, opens, events):
    """Let a rank that computes nothing enter slots, as far as what has arrived allows."""
    slots = work.shape[1]
    while rank[SLOT, r] + 1 < slots and missing[r, rank[SLOT, r] + 1] == 0:
        rank[SLOT, r] += 1
        s = rank[SLOT, r]
        begin[r, s] = now
        copied = copies[TAKE_IN, r, s]
        for stage in range(opens[s], opens[s + 1]):
            copied += copies[PACK, r, stage]
            if takes_part[r, stage] == 1:
                push(events, event(now + copied + rule[LATENCY], POSTED, r))
        if copied + work[r, s] > 0:
            rank[COMPUTING, r] = 1
            rank[LEFT, r] = copied + work[r, s]
            compute(r, now, rank, pace, events)
            return
        end[r, s] = now


@compiled_leaf
def compute(r, now, rank, pace, events):
    """Foresee the end of a rank's compute at today's pace; what was foreseen before is void."""
    slow = pace[SLOW, r, rank[SLOT, r]] if rank[UNDER_WAY, r] > 0 else 1000
    rank[SINCE, r] = now
    rank[READY, r] = now + (rank[LEFT, r] * slow + 999) // 1000
    push(events, event(rank[READY, r], COMPUTED, r))


@compiled_leaf
def change_pace(r, change, now, rank, pace, events):
    """A chunk of a rank starts (+1) or ends (-1)."""
    before = rank[UNDER_WAY, r]
    rank[UNDER_WAY, r] += change
    slow = pace[SLOW, r, rank[SLOT, r]]
    if rank[COMPUTING, r] == 1 and slow != 1000 and (before > 0) != (rank[UNDER_WAY, r] > 0):
        done = slow if before > 0 else 1000
        rank[LEFT, r] = max(0, rank[LEFT, r] - (now - rank[SINCE, r]) * 1000 // done)
        compute(r, now, rank, pace, events)


@compiled_leaf
def start_one(p, side, now, rank, chunk, queue, order, first, earliest, rule, pace, events):
    """Start the first chunk that can use a free port on one side."""
    if queue[side, BUSY, p] == 1:
        return
    skip_started(p, side, chunk, queue, order, first)
    for i in range(queue[side, NEXT, p], first[side, p + 1]):
        if earliest[side, i] > queue[side, POSTED_UP_TO, p]:
            return
        c = order[side, i]
        if chunk[BEGIN, c] >= 0:
            continue
        out, into, source, target = chunk[PORT_OUT, c], chunk[PORT_IN, c], chunk[SOURCE, c], chunk[TARGET, c]
        free = queue[OUT, BUSY, out] == 0 and queue[IN, BUSY, into] == 0
        if rule[IN_LINE] == 1:
            skip_started(out, OUT, chunk, queue, order, first)
            free = free and order[OUT, queue[OUT, NEXT, out]] == c
        posted = min(rank[STAGE_POSTED, source], rank[STAGE_POSTED, target])
        if free and posted >= chunk[STAGE, c]:
            queue[OUT, BUSY, out] = queue[IN, BUSY, into] = 1
            chunk[BEGIN, c] = now
            time = chunk[NS, c]
            link = 1000
            for r in (source, target):
                if rank[COMPUTING, r] == 1:
                    link = min(link, pace[LINK, r, rank[SLOT, r]])
            time = (time * 1000 + link - 1) // link
            change_pace(source, 1, now, rank, pace, events)
            change_pace(target, 1, now, rank, pace, events)
            push(events, event(now + time, ARRIVED, c))
            return
        if rule[IN_LINE] == 1 and side == OUT:
            return


@compiled
def earliest_stages(chunk, order, first):
    """The earliest stage of each port's chunks from each one on."""
    earliest = np.empty_like(order)
    for side in range(2):
        for p in range(first.shape[1] - 1):
            for i in range(first[side, p + 1] - 1, first[side, p] - 1, -1):
                stage = chunk[STAGE, order[side, i]]
                earliest[side, i] = min(stage, earliest[side, i + 1]) if i + 1 < first[side, p + 1] else stage
    return earliest


@compiled_leaf
def skip_started(p, side, chunk, queue, order, first):
    """Move a port's queue past what has started."""
    while queue[side, NEXT, p] < first[side, p + 1] and chunk[BEGIN, order[side, queue[side, NEXT, p]]] >= 0:
        queue[side, NEXT, p] += 1

"""Loops that choose the number of stages of each rank (compiled); :mod:`flexcp.schedule.stages` says what a stage is.

All times are in nanoseconds. Arguments that several functions share:

- ``work[row, rank]``: the rows are own work, work on inputs, and what one more stage adds to the latter.
- ``times[row, rank]``: the rows are those of :class:`flexcp.schedule.stages.ExchangeTimes`.
- ``latency``: how long it takes until a message's first byte arrives.
- ``parts[row, rank]``: what a rank does in its slots, for a given number of stages; the rows are named below.
- ``source`` and ``senders``: rank r receives from ``source[senders[2 * r]]`` to ``source[senders[2 * r + 2] - 1]``.
"""

from __future__ import annotations

import numpy as np

from flexcp.arrays.jit import compiled, compiled_inline

OWN, REST, AGAIN = range(3)
THERE, RELAYS, BACK, RELAYED, HOME = range(5)
NUMBER, HELD, BEFORE, EACH, AFTER, FIRST, INTO, OUT, LAST = range(9)
"""The rows of ``parts``.

``NUMBER`` is the number of stages. ``BEFORE`` and ``AFTER`` are own work before and after the stages, ``EACH`` is the
work of one stage, and ``HELD`` the share of ``AFTER`` in own work, per mille. ``FIRST`` travels beside ``BEFORE``,
``INTO`` and ``OUT`` are the inputs and the gradients of one stage, and ``LAST`` travels beside ``AFTER``.
"""


@compiled
def divided(number, work, times, latency):
    """Return ``parts``: work and transfers of each rank, divided for ``number[rank]`` stages."""
    parts = np.zeros((LAST + 1, len(number)), np.int64)
    parts[NUMBER] = number
    for r in range(len(number)):
        divide(parts, r, work, times, latency)
    return parts


@compiled_inline
def divide(parts, r, work, times, latency):
    """Fill in the parts of rank ``r``, whose number of stages is there."""
    stages = parts[NUMBER, r]
    travel = np.zeros(4, np.int64)
    for i in range(4):
        travel[i] = -(-times[i, r] // stages)
        if stages > 1 and times[i, r] > 0:
            travel[i] += latency
    # What is relayed needs one more exchange before the first work and after the last.
    parts[INTO, r], parts[OUT, r] = travel[THERE], travel[BACK]
    parts[FIRST, r] = travel[THERE] + travel[RELAYS]
    parts[LAST, r] = travel[BACK] + travel[RELAYED] + times[HOME, r]
    if travel[BACK] > 0 and times[HOME, r] > 0:
        parts[LAST, r] -= latency  # both travel in one exchange
    parts[EACH, r] = -(-(work[REST, r] + (stages - 1) * work[AGAIN, r]) // stages)
    parts[HELD, r] = 1000 * parts[LAST, r] // max(parts[FIRST, r] + parts[LAST, r], 1)
    parts[AFTER, r] = work[OWN, r] * parts[HELD, r] // 1000
    parts[BEFORE, r] = work[OWN, r] - parts[AFTER, r]


@compiled_inline
def slot_of(parts, r, slot):
    """Return (work, transfers beside it) of rank ``r`` in a slot; both are 0 after the rank's last slot."""
    stages = parts[NUMBER, r]
    computed, moved = 0, 0
    if slot == 0:
        computed, moved = parts[BEFORE, r], parts[FIRST, r]
    elif slot <= stages:
        computed = parts[EACH, r]
        if slot < stages:
            moved = parts[INTO, r]
        if slot > 1:
            moved = max(moved, parts[OUT, r])
    elif slot == stages + 1:
        computed, moved = parts[AFTER, r], parts[LAST, r]
    return computed, moved


@compiled
def slots(parts):
    """Return (work, transfers beside it) of all slots, both ``[slot, rank]``."""
    found = np.zeros((2, parts[NUMBER].max() + 2, parts.shape[1]), np.int64)
    for slot in range(found.shape[1]):
        for r in range(parts.shape[1]):
            found[0, slot, r], found[1, slot, r] = slot_of(parts, r, slot)
    return found


@compiled
def best_alone(reads, work, times, latency, most, worth):
    """Return the number of stages with which each rank would be fastest if all others were always ready.

    Only ranks with ``reads`` that have to wait get more than one, and at most ``most``; each further stage must reduce
    the rank's time to less than ``worth``, per mille.
    """
    number = np.ones(len(reads), np.int64)
    parts = np.zeros((LAST + 1, len(reads)), np.int64)
    for r in range(len(reads)):
        best = np.int64(0)
        for count in range(1, most + 1 if reads[r] else 1):
            parts[NUMBER, r] = count
            divide(parts, r, work, times, latency)
            ns = np.int64(0)
            for slot in range(count + 2):
                computed, moved = slot_of(parts, r, slot)
                ns += max(computed, moved)
            if count == 1 and ns <= work[OWN, r] + work[REST, r]:
                break
            if count == 1 or ns * 1000 < best * worth:
                number[r], best = count, ns
    return number


@compiled
def together_ns(parts, source, senders):
    """Return the time of each rank if the transfers beside a slot wait until all senders have begun it."""
    begin = np.zeros(parts.shape[1], np.int64)
    before = np.zeros_like(begin)
    for slot in range(parts[NUMBER].max() + 2):
        before[:] = begin
        for r in range(len(begin)):
            computed, moved = slot_of(parts, r, slot)
            begin[r] += computed
            if moved > 0:
                ready = before[r]
                for i in range(senders[2 * r], senders[2 * r + 2]):
                    ready = max(ready, before[source[i]])
                begin[r] = max(begin[r], ready + moved)
    return begin


@compiled
def capped(number, work, times, latency, source, senders, near):
    """Return (parts, time of each rank) for the largest limit on the number of stages that is nearly the fastest.

    Nearly means at most ``near``, per mille of the fastest, in time over all ranks together (:func:`together_ns`).
    """
    most = number.max()
    longest = np.zeros(most + 1, np.int64)
    for cap in range(1, most + 1):
        longest[cap] = together_ns(divided(np.minimum(number, cap), work, times, latency), source, senders).max()
    least = longest[1:].min()
    cap = most
    while longest[cap] * 1000 > least * near:
        cap -= 1
    parts = divided(np.minimum(number, cap), work, times, latency)
    return parts, together_ns(parts, source, senders)

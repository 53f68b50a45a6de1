"""Loops of dealing: documents, the largest first, each to the group that has least so far, compiled."""

from __future__ import annotations

import numpy as np

from flexcp.arrays.jit import compiled, compiled_leaf


@compiled_leaf
def sink(heap, load, at):
    """Put the group at place ``at`` of a heap, whose load has grown, where it belongs: behind smaller loads, of equal ones the first group."""
    group = heap[at]
    while 2 * at + 1 < len(heap):
        below = 2 * at + 1
        if below + 1 < len(heap):
            left, right = heap[below], heap[below + 1]
            if load[right] < load[left] or (load[right] == load[left] and right < left):
                below += 1
        other = heap[below]
        if load[other] > load[group] or (load[other] == load[group] and other > group):
            break
        heap[at] = other
        at = below
    heap[at] = group


@compiled_leaf
def place_with_room(heap, load, kept, more, room):
    """Where in the heap the least loaded group is that has room for ``more`` tokens, or where none has, the one that keeps the fewest."""
    best, emptiest = -1, 0
    for at in range(len(heap)):
        group, least = heap[at], heap[emptiest]
        if kept[group] < kept[least] or (kept[group] == kept[least] and group < least):
            emptiest = at
        if kept[group] + more > room:
            continue
        if best < 0 or load[group] < load[heap[best]] or (load[group] == load[heap[best]] and group < heap[best]):
            best = at
    return best if best >= 0 else emptiest


@compiled
def deal(order, loads, tokens, groups, room):
    """The group of each document; ``room`` is the most tokens of a group, -1 for any number."""
    found, heap = np.empty(len(loads), np.int64), np.arange(groups)
    load, kept = np.zeros(groups, np.int64), np.zeros(groups, np.int64)
    for document in order:
        at = 0
        if room >= 0 and kept[heap[0]] + tokens[document] > room:
            at = place_with_room(heap, load, kept, tokens[document], room)
        group = heap[at]
        found[document] = group
        load[group] += loads[document]
        kept[group] += tokens[document]
        sink(heap, load, at)
    return found

"""Loops of a heap: integers of which the smallest is taken first, compiled.

It is our own because ``heapq`` works on lists, whose references Numba counts in every function that they are handed to.
Here a heap is an array of integers with room for all there will be: the first is how many there are, the others are the
heap from index 1 on.
"""

from __future__ import annotations

import numpy as np

from flexcp.arrays.jit import compiled, compiled_leaf


@compiled
def empty_heap(room):
    """A heap for so many integers at a time."""
    heap = np.empty(room + 1, np.int64)
    heap[0] = 0
    return heap


@compiled_leaf
def push(heap, value):
    """Put an integer on a heap."""
    heap[0] += 1
    at = heap[0]
    while at > 1 and heap[at // 2] > value:
        heap[at] = heap[at // 2]
        at //= 2
    heap[at] = value


@compiled_leaf
def pop(heap):
    """Take the smallest integer off a heap that is not empty."""
    found, last, count = heap[1], heap[heap[0]], heap[0] - 1
    heap[0] = count
    at = 1
    while 2 * at <= count:
        below = 2 * at
        if below < count and heap[below + 1] < heap[below]:
            below += 1
        if heap[below] >= last:
            break
        heap[at] = heap[below]
        at = below
    heap[at] = last
    return found

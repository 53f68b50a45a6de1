"""Compiled loops of a heap: a priority queue of integers from which the smallest is taken first.

``heapq`` is not used because it works on lists, and Numba counts references to a list in every function that takes one.
Here a heap is an array of integers of fixed size: element 0 is the number of integers in the heap, and the heap itself
begins at element 1.
"""

from __future__ import annotations

import numpy as np

from flexcp.arrays.jit import compiled, compiled_leaf


@compiled
def empty_heap(room):
    """Return an empty heap with room for ``room`` integers."""
    heap = np.empty(room + 1, np.int64)
    heap[0] = 0
    return heap


@compiled_leaf
def push(heap, value):
    """Put an integer into a heap."""
    heap[0] += 1
    at = heap[0]
    while at > 1 and heap[at // 2] > value:
        heap[at] = heap[at // 2]
        at //= 2
    heap[at] = value


@compiled_leaf
def pop(heap):
    """Remove the smallest integer from a heap, which must not be empty, and return it."""
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

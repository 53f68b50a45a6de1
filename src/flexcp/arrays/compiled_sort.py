"""Loops of sorting: a stable order of integers, compiled.

It is our own because ``np.argsort`` takes Numba long to compile.
"""

from __future__ import annotations

import numpy as np

from flexcp.arrays.jit import compiled

SHORT_RUN = 16


@compiled
def stable_order(keys):
    """Where the keys are from the smallest on, equal ones in their order:
    short runs by insertion, merged two by two.
    """
    n = len(keys)
    order, merged = np.empty(n, np.int64), np.empty(n, np.int64)
    for i in range(n):
        at = i
        while at % SHORT_RUN > 0 and keys[order[at - 1]] > keys[i]:
            order[at] = order[at - 1]
            at -= 1
        order[at] = i
    width = SHORT_RUN
    while width < n:
        for lo in range(0, n, 2 * width):
            middle, hi = min(lo + width, n), min(lo + 2 * width, n)
            a, b = lo, middle
            for at in range(lo, hi):
                if a < middle and (b >= hi or keys[order[a]] <= keys[order[b]]):
                    merged[at] = order[a]
                    a += 1
                else:
                    merged[at] = order[b]
                    b += 1
        order, merged = merged, order
        width *= 2
    return order

"""Compiled loops of sorting: a stable argsort of integers.

``np.argsort`` is not used because Numba takes long to compile it.
"""

from __future__ import annotations

import numpy as np

from flexcp.arrays.jit import compiled

SHORT_RUN = 16
"""How many neighbouring keys are sorted by insertion before runs are merged."""


@compiled
def stable_order(keys):
    """Return the indices that sort the keys; equal keys keep their order.

    Short runs are sorted by insertion, then merged two by two.
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

"""Compiled areas: the closed form of :func:`flexcp.masks.rows_area`, for loops (compiled)."""

from __future__ import annotations

from flexcp.arrays.jit import compiled_leaf


@compiled_leaf
def band_area(q0, q1, k0, k1, lo, hi):
    """Return the number of pairs (q, k) with ``lo <= k - q <= hi``, ``q0 <= q < q1`` and ``k0 <= k < k1``."""
    lo, hi = max(lo, k0 - q1 + 1), min(hi, k1 - 1 - q0)
    if q0 >= q1 or k0 >= k1 or lo > hi:
        return 0
    width = k1 - k0
    upper = ramp(q1 + hi + 1 - k0, width) - ramp(q0 + hi + 1 - k0, width)
    return upper - ramp(q1 + lo - k0, width) + ramp(q0 + lo - k0, width)


@compiled_leaf
def ramp(x, width):
    """Return the sum of ``min(j, width)`` over all j from 0 to ``x - 1``; 0 if ``x`` is not positive."""
    x = max(x, 0)
    inside = min(x, width + 1)
    return inside * (inside - 1) // 2 + (x - inside) * width

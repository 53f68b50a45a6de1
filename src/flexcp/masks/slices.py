"""Slices: rectangles of queries x keys cut by a diagonal band, and their algebra.

    q0 <= q < q1,    k0 <= k < k1,    lo <= k - q <= hi

is one row of an int64 array with the columns ``q0 q1 k0 k1 lo hi``. All operations that flexcp needs keep this form:
cutting a slice by a range of queries or keys gives a slice, a change of coordinates shifts the band, and areas have a
closed form. So the user's mask, a rank's region and a kernel's work list have the same representation.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

Q0, Q1, K0, K1, LO, HI = range(6)
UNBOUNDED = 1 << 40
"""Band limits of at least this size mean "no limit": it exceeds the length of any document."""
LONGEST = UNBOUNDED >> 10
"""Documents have fewer tokens than this, so that 64-bit integers count their areas exactly."""


PAIRS_AT_ONCE = 1 << 16
"""Pairs of slices that are compared in one NumPy call, to limit memory."""


def _ramp(x: Ints, width: Ints) -> Ints:
    """Return the sum of clamp(j, 0, width) over all j < x."""
    x = np.maximum(x, 0)
    inside = np.minimum(x, width + 1)
    return np.asarray(inside * (inside - 1) // 2 + (x - inside) * width)


def rows_area(slices: Ints, first: Ints | int, last: Ints | int) -> Ints:
    """Count the (query, key) pairs of each slice in the rows ``first <= q < last``."""
    q0, q1, k0, k1, lo, hi = (slices[..., column] for column in range(6))
    a = np.clip(first, q0, q1)
    b = np.clip(last, a, q1)
    width = np.maximum(k1 - k0, 0)
    # Row q holds clamp(q + hi + 1 - k0, 0, width) - clamp(q + lo - k0, 0, width) keys.
    upper = _ramp(b + hi + 1 - k0, width) - _ramp(a + hi + 1 - k0, width)
    lower = _ramp(b + lo - k0, width) - _ramp(a + lo - k0, width)
    return np.asarray(upper - lower)


def area(slices: Ints) -> Ints:
    """Count the (query, key) pairs of each slice."""
    return rows_area(slices, slices[..., Q0], slices[..., Q1])


def cut(slices: Ints, q0: Ints | int, q1: Ints | int, k0: Ints | int, k1: Ints | int) -> Ints:
    """Return each slice restricted to the half-open ranges q0..q1 of queries and k0..k1 of keys, and trimmed.

    :func:`trim` says what trimmed means.
    """
    out = slices.copy()
    out[..., Q0] = np.maximum(slices[..., Q0], q0)
    out[..., Q1] = np.minimum(slices[..., Q1], q1)
    out[..., K0] = np.maximum(slices[..., K0], k0)
    out[..., K1] = np.minimum(slices[..., K1], k1)
    return trim(out)


def trim(slices: Ints) -> Ints:
    """Return slices of the same pairs with the smallest rectangle and narrowest band; empty slices become zeros."""
    q0, q1, k0, k1, lo, hi = (slices[..., column] for column in range(6))
    rows0 = np.maximum(q0, k0 - hi)
    rows1 = np.minimum(q1, k1 - lo)
    keys0 = np.maximum(k0, rows0 + lo)
    keys1 = np.minimum(k1, rows1 + hi)
    empty = (rows0 >= rows1) | (keys0 >= keys1) | (lo > hi)
    band_lo = np.maximum(lo, keys0 - (rows1 - 1))
    band_hi = np.minimum(hi, (keys1 - 1) - rows0)
    out = np.stack([rows0, rows1, keys0, keys1, band_lo, band_hi], axis=-1)
    out[empty] = 0
    return out


def is_empty(slices: Ints) -> NDArray[np.bool_]:
    """Return which of the slices, which must be trimmed, hold no pair."""
    return np.asarray(slices[..., Q0] >= slices[..., Q1])


def shift(slices: Ints, queries: Ints | int, keys: Ints | int) -> Ints:
    """Return the slices moved by ``queries`` rows and ``keys`` keys; their bands move with them."""
    out = slices.copy()
    out[..., Q0] += queries
    out[..., Q1] += queries
    out[..., K0] += keys
    out[..., K1] += keys
    out[..., LO] += keys
    out[..., LO] -= queries
    out[..., HI] += keys
    out[..., HI] -= queries
    return out


def overlapping_pair(slices: Ints) -> tuple[int, int] | None:
    """Return the indices of two slices that share a (query, key) pair, or None if all are disjoint.

    Each slice is compared only with the slices whose first row lies in its rows.
    """
    order = np.argsort(slices[:, Q0], kind="stable")
    rows = slices[order]
    # Slice i is compared with the slices i + 1 to i + others[i].
    others = np.maximum(np.searchsorted(rows[:, Q0], rows[:, Q1], side="left") - np.arange(1, len(rows) + 1), 0)
    before = np.concatenate([np.zeros(1, np.int64), np.cumsum(others)])
    for start in range(0, int(before[-1]), PAIRS_AT_ONCE):
        number = np.arange(start, min(start + PAIRS_AT_ONCE, int(before[-1])))
        i = np.searchsorted(before, number, side="right") - 1
        j = i + 1 + number - before[i]
        a, b = rows[i], rows[j]
        both = cut(b, a[:, Q0], a[:, Q1], a[:, K0], a[:, K1])
        both[:, LO] = np.maximum(both[:, LO], a[:, LO])
        both[:, HI] = np.minimum(both[:, HI], a[:, HI])
        hit = np.flatnonzero(~is_empty(trim(both)))
        if len(hit):
            return int(order[i[hit[0]]]), int(order[j[hit[0]]])
    return None

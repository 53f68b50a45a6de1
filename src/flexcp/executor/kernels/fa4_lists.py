"""FA4 lists: which work lists FlashAttention-4 can run in one call, and whether it is faster than the CuTe kernel.

A list is *simple* if its slices are whole documents, one after the other in rows and in keys, that are all causal, all
full, or all under one window. The time of a kernel on it is estimated by counting blocks and tiles, at prices that were
fitted to both kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flexcp import masks
from flexcp.masks import HI, K0, K1, LO, Q0, Q1

Ints = NDArray[np.int64]
BLOCK = 128
Prices = tuple[float, float, float]
"""The price of a block (128 queries x 128 keys of one head), the extra price of a tile of 128 queries, and the price of
a call, in blocks of the CuTe kernel.
"""
OWN_PRICES: tuple[Prices, Prices] = ((1.0, 3.0, 0.0), (1.0, 6.0, 0.0))
DOCUMENTS_PRICES: tuple[Prices, Prices] = ((0.935, 3.85, 0.0), (1.0, 7.4, 2700.0))
"""Prices (forward, backward) of the CuTe kernel, and of FlashAttention-4 on several documents.

These and the next ones were set by hand to match the measured ratios of eight workloads on an H200.
"""
FULL_FORWARD: Prices = (0.945, 3.0, 0.0)
CAUSAL_FORWARD: Prices = (1.02, 1.5, 0.0)
WINDOW_FORWARD: Prices = (1.03, 3.0, 0.0)
DOCUMENT_BACKWARD: Prices = (0.905, 7.1, 2700.0)
"""Prices of FlashAttention-4 on one document: forward by its mask, backward under any."""
HOST_BLOCKS = (32_000.0, 12_000.0)
"""Lists of fewer blocks, forward and backward, are the CuTe kernel's, so that the GPU does not wait for the host.

A call of FlashAttention-4 takes the host of an H200 90 to 130 microseconds forward and 220 to 530 backward, the
launches of the CuTe kernel 18 to 27 and 57.
"""


@dataclass(frozen=True)
class Form:
    """A list that can be one call of FlashAttention-4: the borders of its documents in rows and keys, and their window.

    ``[0, 3, 5]`` are the borders of documents of 3 and 2 rows. ``left`` and ``right`` are how far the window reaches
    from the diagonal through a document's last row and last key; None means no limit on that side.
    """

    rows_at: Ints
    keys_at: Ints
    left: int | None
    right: int | None

    @property
    def window(self) -> dict[str, Any]:
        """The mask as keyword arguments of FlashAttention-4."""
        if self.left is None and self.right == 0:
            return {"causal": True}
        return {"causal": False, "window_size_left": self.left, "window_size_right": self.right}


def form_of(slices: Ints) -> Form | None:
    """Return the slices as one call of FlashAttention-4, or None if one call cannot compute them.

    They must be whole documents, end to end in rows and keys, under one window. FlashAttention's windows count from the
    diagonal through a document's last row and last key.
    """
    slices = masks.trim(slices.reshape(-1, 6))
    slices = slices[~masks.is_empty(slices)]
    slices = slices[np.argsort(slices[:, Q0], kind="stable")]
    if not len(slices) or slices[0, Q0] or slices[0, K0]:
        return None
    if (slices[1:, [Q0, K0]] != slices[:-1, [Q1, K1]]).any():
        return None
    diagonal = slices[:, K1] - slices[:, Q1]
    # For the left and the right side: the limit of each slice, and the limit from which on it hides nothing.
    sides = (
        (diagonal - slices[:, LO], diagonal - (slices[:, K0] - (slices[:, Q1] - 1))),
        (slices[:, HI] - diagonal, (slices[:, K1] - 1 - slices[:, Q0]) - diagonal),
    )
    limits: list[int | None] = []
    for limit, reach in sides:
        cut = limit < reach
        found = np.unique(limit[cut])
        if len(found) > 1 or (len(found) and ((found[0] < 0) or (reach[~cut] > found[0]).any())):
            return None
        limits.append(int(found[0]) if len(found) else None)
    rows_at, keys_at = (np.append(slices[:, a], slices[-1, b]) for a, b in ((Q0, Q1), (K0, K1)))
    return Form(rows_at, keys_at, *limits)


def cheaper(form: Form, pairs: int, heads: int) -> tuple[bool, bool]:
    """Return whether FlashAttention-4 is estimated to be faster than the CuTe kernel: (forward, backward).

    ``pairs`` is the number of (query, key) pairs that attend, for one head; ``heads`` is the number of query heads.
    """
    counts = np.array([pairs / BLOCK**2 * heads, (-(-np.diff(form.rows_at) // BLOCK)).sum() * heads, 1.0])
    theirs = DOCUMENTS_PRICES if len(form.rows_at) > 2 else _document_prices(form)
    forward, backward = (
        bool(host < counts @ np.array(a) < counts @ np.array(b))
        for host, a, b in zip(HOST_BLOCKS, theirs, OWN_PRICES, strict=True)
    )
    return forward, backward


def _document_prices(form: Form) -> tuple[Prices, Prices]:
    """Return FlashAttention-4's prices (forward, backward) for one document under its mask."""
    if form.left is not None:
        return WINDOW_FORWARD, DOCUMENT_BACKWARD
    return CAUSAL_FORWARD if form.right is not None else FULL_FORWARD, DOCUMENT_BACKWARD

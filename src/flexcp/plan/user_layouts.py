"""User layouts: turn the user's ``layout=`` argument, which says where tokens already are, into index maps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


def user_layout(layout: str | Sequence[Sequence[int]], tokens: int, ranks: int) -> tuple[Ints, ...] | None:
    """Return the stream tokens of each rank, from the name of a layout or from one index array per rank.

    Names are ``"contiguous"`` and ``"zigzag"``. Return None for ``"free"``, which leaves the choice to the planner.
    Raise ValueError for anything else, and unless the arrays hold every token exactly once.
    """
    if isinstance(layout, str):
        if layout == "free":
            return None
        stream = np.arange(tokens, dtype=np.int64)
        if layout == "contiguous":
            return tuple(np.array_split(stream, ranks))
        if layout == "zigzag":
            parts = np.array_split(stream, 2 * ranks)
            return tuple(np.concatenate([parts[i], parts[2 * ranks - 1 - i]]) for i in range(ranks))
        raise ValueError(f"unknown layout {layout!r}; use 'free', 'contiguous', 'zigzag' or one index array per rank")
    if not isinstance(layout, Sequence):
        raise ValueError(f"layout must be 'free', 'contiguous', 'zigzag' or one index array per rank; got {layout!r}")
    try:
        given = [np.asarray(m).reshape(-1) for m in layout]
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"layout= is one index array per rank, the stream tokens of each; one cannot be read: {error}"
        ) from error
    if any(len(m) and not np.issubdtype(m.dtype, np.integer) for m in given):
        raise ValueError("layout= index arrays must hold integers: the stream tokens of each rank")
    maps = tuple(m.astype(np.int64) for m in given)
    if len(maps) != ranks:
        raise ValueError(
            f"layout= has {len(maps)} index arrays for {ranks} ranks; give one per rank (empty ones are fine)"
        )
    flat = np.concatenate(maps)
    outside = flat[(flat < 0) | (flat >= tokens)]
    if len(outside):
        raise ValueError(f"layout= names token {int(outside[0])}, but the stream has tokens 0..{tokens - 1}")
    counts = np.bincount(flat, minlength=tokens)
    if np.any(counts != 1):
        wrong = int(np.flatnonzero(counts != 1)[0])
        raise ValueError(
            f"layout= keeps token {wrong} {int(counts[wrong])} times; every token belongs to exactly one rank"
        )
    return maps

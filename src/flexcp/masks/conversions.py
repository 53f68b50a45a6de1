"""Conversions: make masks from slices, key ranges of every query, cumulative lengths, or mask functions.

Key ranges and mask functions are read query by query, and ranges of neighbouring queries are joined into few slices: a
range end that stays the same from query to query is the side of a rectangle, and one that moves by one key per query is
the side of a band.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flexcp.masks.mask import EXPLICIT, Mask, document_length, token_count
from flexcp.masks.named import causal
from flexcp.masks.slices import UNBOUNDED, Ints, is_empty, overlapping_pair, trim

SliceRow = tuple[int, int, int, int, int | None, int | None]

MASK_MOD_MAX_LENGTH = 32_768
"""The most tokens of a document for :func:`from_mask_mod`, which evaluates every pair."""
MASK_MOD_MAX_SLICES = 4_096
"""The most slices of a mask from :func:`from_mask_mod`."""


def from_slices(length: int, slices: Iterable[Sequence[int | None]]) -> Mask:
    """Make an explicit mask for one document of ``length`` tokens from rows ``(q0, q1, k0, k1, lo, hi)``.

    A row allows the pairs with ``q0 <= q < q1``, ``k0 <= k < k1`` and ``lo <= k - q <= hi``; None for lo or hi is no
    limit. Raise ValueError if a row lies outside the document or two rows share a pair.
    """
    length = document_length(length)
    if not isinstance(slices, Iterable):
        raise ValueError(f"slices is a list of (q0, q1, k0, k1, lo, hi); got {slices!r}")
    table = []
    for row in slices:
        if not hasattr(row, "__len__") or len(row) != 6:
            raise ValueError(f"a slice is (q0, q1, k0, k1, lo, hi); got {row!r}")
        q0, q1, k0, k1 = (token_count(_required(x, row)) for x in row[:4])
        lo = -UNBOUNDED if row[4] is None else token_count(row[4])
        hi = UNBOUNDED if row[5] is None else token_count(row[5])
        if q0 > q1 or k0 > k1 or lo > hi:
            raise ValueError(f"slice {tuple(row)} needs q0 <= q1, k0 <= k1 and lo <= hi")
        if q0 < 0 or k0 < 0 or q1 > length or k1 > length:
            raise ValueError(f"slice {tuple(row)} lies outside its document of {length} tokens")
        table.append((q0, q1, k0, k1, _bounded(lo), _bounded(hi)))
    array = trim(np.array(table, np.int64).reshape(-1, 6))
    kept = np.flatnonzero(~is_empty(array))
    clash = overlapping_pair(array[kept])
    if clash:
        a, b = (table[kept[i]] for i in clash)
        raise ValueError(f"slices {a} and {b} share a (query, key) pair; make them disjoint")
    return Mask(EXPLICIT, length=length, table=tuple(table))


def from_key_ranges(ranges: Sequence[Sequence[Sequence[int]]] | NDArray[np.integer]) -> Mask:
    """Make an explicit mask from the half-open key ranges of every query: ``ranges[q] = [(start, end), ...]``.

    A query may have any number of ranges; overlapping ranges are united.
    """
    if not hasattr(ranges, "__len__"):
        raise ValueError(f"ranges is a list with the key ranges [(start, end), ...] of every query; got {ranges!r}")
    length = len(ranges)
    rows = [_united(_pairs(r, q), length, q) for q, r in enumerate(ranges)]
    return from_slices(length, _compressed(rows))


def from_cu_seqlens(
    cu_seqlens: Sequence[int] | NDArray[np.integer], mask: Mask | None = None
) -> tuple[list[int], Mask]:
    """Return the ``(lengths, mask)`` that a :class:`flexcp.Planner` takes, from cumulative lengths that start at 0.

    The mask is causal by default.
    """
    borders = _integers(cu_seqlens, "cu_seqlens")
    if borders.ndim != 1 or len(borders) < 2 or borders[0] != 0:
        raise ValueError(f"cu_seqlens is a list that starts at 0 and ends at the token count; got {cu_seqlens!r}")
    if np.any(borders[1:] <= borders[:-1]):
        raise ValueError(f"cu_seqlens must ascend: documents have at least 1 token; got {cu_seqlens!r}")
    return [int(n) for n in np.diff(borders)], mask or causal()


def from_mask_mod(mask_mod: Callable[..., Any], length: int) -> Mask:
    """Make an explicit mask from a FlexAttention-style ``mask_mod(b, h, q_idx, kv_idx)``, evaluated for every pair.

    ``mask_mod`` is called with b and h of 0. Masks of more than ``MASK_MOD_MAX_LENGTH`` tokens or
    ``MASK_MOD_MAX_SLICES`` slices raise NotImplementedError: slices are the wrong tool for them. This is the only
    conversion that imports torch.
    """
    import torch

    length = document_length(length)
    if not callable(mask_mod):
        raise ValueError(f"mask_mod is a function mask_mod(b, h, q_idx, kv_idx); got {mask_mod!r}")
    if length > MASK_MOD_MAX_LENGTH:
        raise NotImplementedError(
            f"mask_mod is evaluated for every pair, up to {MASK_MOD_MAX_LENGTH} tokens; got {length}. "
            "Use a named mask or from_slices"
        )
    zero = torch.zeros((), dtype=torch.long)
    keys = torch.arange(length)
    rows = []
    chunk = max(1, (1 << 24) // length)
    for first in range(0, length, chunk):
        queries = torch.arange(first, min(first + chunk, length))
        found = mask_mod(zero, zero, queries[:, None], keys[None, :])
        if not isinstance(found, torch.Tensor):
            raise ValueError(f"mask_mod returned {found!r}; it returns a tensor of True and False for every pair")
        shape = (len(queries), length)
        if len(found.shape) > 2 or any(n not in (1, m) for n, m in zip(found.shape[::-1], shape[::-1], strict=False)):
            raise ValueError(
                f"mask_mod returned a tensor of shape {tuple(found.shape)} for {shape[0]} queries and {shape[1]} keys; "
                "it returns one of True and False for every pair, computed from q_idx and kv_idx"
            )
        seen = found.expand(shape).numpy()
        padded = np.zeros((len(queries), length + 2), np.int8)
        padded[:, 1:-1] = seen != 0
        edges = np.diff(padded, axis=1)
        for row in edges:
            rows.append(np.stack([np.flatnonzero(row == 1), np.flatnonzero(row == -1)], axis=1))
    slices = _compressed(rows)
    if len(slices) > MASK_MOD_MAX_SLICES:
        raise NotImplementedError(
            f"this mask_mod needs {len(slices)} slices, more than {MASK_MOD_MAX_SLICES}; it is not made of bands. "
            "Use a block-sparse kernel for it"
        )
    return from_slices(length, slices)


def _bounded(offset: int) -> int:
    """Limit a band offset to -UNBOUNDED..UNBOUNDED."""
    return max(-UNBOUNDED, min(offset, UNBOUNDED))


def _pairs(ranges: Any, query: int) -> Ints:
    """Return the key ranges of a query as an array of (start, end); raise ValueError if they are no pairs."""
    found = _integers(ranges, f"query {query}: key ranges")
    if found.size and (found.ndim != 2 or found.shape[1] != 2):
        raise ValueError(f"query {query}: key ranges are [(start, end), ...]; got {ranges!r}")
    return found.reshape(-1, 2)


def _integers(values: Any, what: str) -> Ints:
    """Return the values as 64-bit integers; raise ValueError if one is no integer or too large. ``what`` names them."""
    given = np.asarray(values)
    fits = given.dtype.kind in "iu" and (given.dtype != np.uint64 or int(given.max(initial=0)) < 1 << 63)
    if given.size and not fits:
        raise ValueError(f"{what} must hold integers of at most 64 bits; got {values!r}")
    return given.astype(np.int64)


def _required(value: int | None, row: Sequence[int | None]) -> int:
    """Return a coordinate of the slice ``row``; raise ValueError if it is None."""
    if value is None:
        raise ValueError(f"slice {tuple(row)}: only lo and hi may be None")
    return value


def _united(ranges: Ints, length: int, query: int) -> Ints:
    """Return the key ranges of one query sorted, without empty ones, and merged if they touch or overlap.

    Raise ValueError if one does not lie in ``0..length``; ``query`` is for the message.
    """
    if len(ranges) and (ranges.min() < 0 or ranges.max() > length or np.any(ranges[:, 0] > ranges[:, 1])):
        raise ValueError(f"query {query}: key ranges {ranges.tolist()} must be start <= end within 0..{length}")
    ranges = ranges[ranges[:, 0] < ranges[:, 1]]
    ranges = ranges[np.argsort(ranges[:, 0], kind="stable")]
    if len(ranges) < 2:
        return ranges
    reach = np.maximum.accumulate(ranges[:, 1])
    first = np.concatenate([[True], ranges[1:, 0] > reach[:-1]])
    last = np.concatenate([first[1:], [True]])
    return np.stack([ranges[first, 0], reach[last]], axis=1)


def _compressed(rows: Sequence[Ints]) -> list[SliceRow]:
    """Join the key ranges of consecutive queries into slices; ``rows[q]`` are the ranges ``[n, 2]`` of query q.

    A range continues a slice if each of its ends stays the same or moves by one key per query throughout the slice.
    """
    done: list[SliceRow] = []
    # A slice under construction: q0, last q, start at q0, start and end at last q, steps of start and of end
    # (-1: not known yet).
    open_: list[list[int]] = []
    for q, ranges in enumerate(rows):
        following: list[list[int]] = []
        waiting = [tuple(map(int, r)) for r in ranges]
        for run in open_:
            fit = next((r for r in waiting if _continues(run, r)), None)
            if fit is None:
                done.append(_closed(run))
                continue
            waiting.remove(fit)
            steps = [fit[0] - run[3], fit[1] - run[4]]
            following.append([run[0], q, run[2], *fit, *steps])
        following += [[q, q, a, a, b, -1, -1] for a, b in waiting]
        open_ = following
    return done + [_closed(run) for run in open_]


def _continues(run: list[int], found: tuple[int, ...]) -> bool:
    """Return whether the key range ``found`` of the next query continues the slice under construction ``run``."""
    steps = (found[0] - run[3], found[1] - run[4])
    return all(s in (0, 1) and known in (-1, s) for s, known in zip(steps, run[5:], strict=True))


def _closed(run: list[int]) -> SliceRow:
    """Return the finished slice of a slice under construction."""
    q0, q, start, last_start, last_end, start_step, end_step = run
    lo = start - q0 if start_step == 1 else None
    hi = last_end - 1 - q if end_step == 1 else None
    return q0, q + 1, min(start, last_start), last_end, lo, hi

"""Masks: which (query, key) pairs of a document attend.

A mask is a disjoint union of *slices*. A slice is a rectangle of queries x keys cut by a diagonal band,

    q0 <= q < q1,    k0 <= k < k1,    lo <= k - q <= hi

stored as one row of an int64 array with the columns ``q0 q1 k0 k1 lo hi``. Slices are closed under everything the
house does with them: cutting one by a range of queries or keys gives a slice, moving to other coordinates shifts the
band, and areas have a closed form. So the user's mask, a rank's region and a kernel's work list are the same thing.

The first half of this file is that algebra on arrays of slices; the second half is :class:`Mask`, a rule that yields the
slices of a document of a given length, with the named masks and the conversions from other people's descriptions.
"""

from __future__ import annotations

import difflib
import json
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
SliceRow = tuple[int, int, int, int, int | None, int | None]

Q0, Q1, K0, K1, LO, HI = range(6)
UNBOUNDED = 1 << 40
"""Band limits at or beyond this are "no limit"; it exceeds any document, and its square fits nothing we multiply."""

MASK_MOD_MAX_LENGTH = 32_768
MASK_MOD_MAX_SLICES = 4_096


# --- the algebra -----------------------------------------------------------------------------------------------------


def _ramp(x: Ints, width: Ints) -> Ints:
    """Sum of clamp(j, 0, width) over all j < x."""
    x = np.maximum(x, 0)
    inside = np.minimum(x, width + 1)
    return np.asarray(inside * (inside - 1) // 2 + (x - inside) * width)


def rows_area(slices: Ints, first: Ints | int, last: Ints | int) -> Ints:
    """Pairs of each slice in the rows ``first <= q < last`` (clipped to the slice)."""
    q0, q1, k0, k1, lo, hi = (slices[..., column] for column in range(6))
    a = np.clip(first, q0, q1)
    b = np.clip(last, a, q1)
    width = np.maximum(k1 - k0, 0)
    # Row q holds clamp(q + hi + 1 - k0, 0, width) - clamp(q + lo - k0, 0, width) keys.
    upper = _ramp(b + hi + 1 - k0, width) - _ramp(a + hi + 1 - k0, width)
    lower = _ramp(b + lo - k0, width) - _ramp(a + lo - k0, width)
    return np.asarray(upper - lower)


def area(slices: Ints) -> Ints:
    """Number of (query, key) pairs of each slice."""
    return rows_area(slices, slices[..., Q0], slices[..., Q1])


def cut(slices: Ints, q0: Ints | int, q1: Ints | int, k0: Ints | int, k1: Ints | int) -> Ints:
    """Each slice restricted to the given query and key ranges, tightened as by :func:`trim`."""
    out = slices.copy()
    out[..., Q0] = np.maximum(slices[..., Q0], q0)
    out[..., Q1] = np.minimum(slices[..., Q1], q1)
    out[..., K0] = np.maximum(slices[..., K0], k0)
    out[..., K1] = np.minimum(slices[..., K1], k1)
    return trim(out)


def trim(slices: Ints) -> Ints:
    """The same pairs in the smallest rectangle and the narrowest band; an empty slice becomes all zeros."""
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
    """Which trimmed slices hold no pair."""
    return np.asarray(slices[..., Q0] >= slices[..., Q1])


def shift(slices: Ints, queries: Ints | int, keys: Ints | int) -> Ints:
    """The slices in coordinates moved by ``queries`` and ``keys``; the band moves with them."""
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
    """Two slices that share a pair, or None. Slices are compared only with those whose rows begin inside their own."""
    order = np.argsort(slices[:, Q0], kind="stable")
    rows = slices[order]
    ends = np.searchsorted(rows[:, Q0], rows[:, Q1], side="left")
    for i, end in enumerate(ends):
        others = rows[i + 1 : end]
        if len(others) == 0:
            continue
        both = cut(others, rows[i, Q0], rows[i, Q1], rows[i, K0], rows[i, K1])
        both[..., LO] = np.maximum(both[..., LO], rows[i, LO])
        both[..., HI] = np.minimum(both[..., HI], rows[i, HI])
        hit = np.flatnonzero(~is_empty(trim(both)))
        if len(hit):
            return int(order[i]), int(order[i + 1 + hit[0]])
    return None


# --- masks -----------------------------------------------------------------------------------------------------------

Columns = tuple[Any, Any, Any, Any, Any, Any]


@dataclass(frozen=True)
class Mask:
    """A rule that gives every document its slices.

    ``name`` and ``params`` identify a named mask. An explicit mask has the name ``"slices"``, the one ``length`` it fits,
    and its ``table``. Equality is by value; use the functions of this module to make one.
    """

    name: str
    params: tuple[int | float | bool | tuple[int, ...], ...] = ()
    length: int | None = None
    table: tuple[tuple[int, ...], ...] = ()

    def slices(self, length: int) -> Ints:
        """The trimmed, non-empty slices of a document of ``length`` tokens, int64 ``[slices, 6]``."""
        return self.slices_of(np.array([length], np.int64))[1]

    def slices_of(self, lengths: Ints) -> tuple[Ints, Ints]:
        """(document of each slice, slices) for many documents at once, sorted by document."""
        if self.length is not None and np.any(lengths != self.length):
            wrong = int(lengths[lengths != self.length][0])
            raise ValueError(
                f"mask {self} is for a document of {self.length} tokens but was given one of {wrong}; "
                "pass one mask per document (a list as long as lengths)"
            )
        parts = [np.stack(np.broadcast_arrays(*c, lengths)[:6], axis=-1) for c in _NAMED[self.name](self, lengths)]
        if not parts:
            return np.zeros(0, np.int64), np.zeros((0, 6), np.int64)
        docs = np.repeat(np.arange(len(lengths))[None, :], len(parts), axis=0).reshape(-1)
        table = trim(np.concatenate(parts).astype(np.int64))
        keep = np.flatnonzero(~is_empty(table))
        order = keep[np.argsort(docs[keep], kind="stable")]
        return docs[order], table[order]

    def dense(self, length: int) -> NDArray[np.bool_]:
        """The mask as a boolean ``[length, length]`` matrix, for tests and small pictures."""
        q = np.arange(length)[:, None]
        k = np.arange(length)[None, :]
        out = np.zeros((length, length), bool)
        for q0, q1, k0, k1, lo, hi in self.slices(length):
            out |= (q >= q0) & (q < q1) & (k >= k0) & (k < k1) & (k - q >= lo) & (k - q <= hi)
        return out

    def __str__(self) -> str:
        if self.name == "slices":
            return f"slices[{len(self.table)} for {self.length} tokens]"
        return self.name + (":" + ",".join(map(str, self.params)) if self.params else "")


def full() -> Mask:
    """Every query sees every key of its document."""
    return Mask("full")


def causal() -> Mask:
    """Query i sees keys 0..i."""
    return Mask("causal")


def window(left: int | None, right: int | None = 0) -> Mask:
    """Query q sees key k when ``-left <= k - q <= right``; None is no limit on that side."""
    sides = []
    for name, value in (("left", left), ("right", right)):
        reach = UNBOUNDED if value is None else _count(value)
        if reach < 0:
            raise ValueError(f"window {name} must be 0 or more, or None for no limit; got {value}")
        sides.append(reach)
    return Mask("window", tuple(sides))


def lambda_(sink: int = 64, window: int = 4096) -> Mask:
    """Attention sink and window: query i sees the first ``sink`` keys and the last ``window`` up to itself."""
    sink, window = _count(sink), _count(window)
    if sink < 0 or window < 1:
        raise ValueError(f"lambda needs sink >= 0 and window >= 1; got sink {sink}, window {window}")
    return Mask("lambda", (sink, window))


def shared_question(answers: int | Sequence[int] = 4, question: float | int = 0.2) -> Mask:
    """One question followed by answers that see the question and themselves, all causal.

    With an integer count of answers, ``question`` is the question's share of the document and the rest is cut evenly (the
    last answer takes the remainder). With a sequence of answer lengths, ``question`` is the question's length in tokens.
    """
    if isinstance(answers, int | np.integer):
        answers = int(answers)
        if answers < 1 or not 0 <= question <= 1:
            raise ValueError(f"shared_question needs answers >= 1 and 0 <= question <= 1; got {answers} and {question}")
        return Mask("shared-question", (answers, float(question)))
    lengths = tuple(_count(a) for a in answers)
    if not lengths or min(lengths) < 0 or int(question) != question or question < 0:
        raise ValueError(
            f"answer lengths and the question's length must be integers >= 0; got {answers} and {question}"
        )
    starts = np.cumsum((int(question), *lengths))
    total = int(starts[-1])
    rows = [(0, total, 0, int(question), -UNBOUNDED, 0)]
    rows += [(int(a), int(b), int(a), int(b), -UNBOUNDED, 0) for a, b in pairwise(starts)]
    return Mask("slices", length=total, table=tuple(rows))


def causal_blockwise(block: int = 256, local: int = 2) -> Mask:
    """Causal; the first and last block of ``block`` tokens as usual, the others see block 0 and ``local`` blocks back."""
    block, local = _count(block), _count(local)
    if block < 1 or local < 0:
        raise ValueError(f"causal_blockwise needs block >= 1 and local >= 0; got block {block}, local {local}")
    return Mask("blockwise", (block, local))


def prefix(tokens: int) -> Mask:
    """The first ``tokens`` keys are seen by all; the rest is causal."""
    tokens = _count(tokens)
    if tokens < 0:
        raise ValueError(f"prefix needs a length of 0 or more; got {tokens}")
    return Mask("prefix", (tokens,))


def modality(spans: Iterable[tuple[int, int]], self_only: bool = False) -> Mask:
    """Causal text with image spans ``[(start, end), ...]``.

    A token of an image sees everything up to the end of its image, or with ``self_only`` just its image.
    """
    flat: list[int] = []
    for start, end in spans:
        if start < (flat[-1] if flat else 0) or end < start:
            raise ValueError(f"spans must be ascending, disjoint (start, end) pairs; got ({start}, {end}) after {flat}")
        flat += [_count(start), _count(end)]
    return Mask("modality", (tuple(flat), bool(self_only)))


def from_slices(length: int, slices: Iterable[Sequence[int | None]]) -> Mask:
    """An explicit mask of one document from rows ``(q0, q1, k0, k1, lo, hi)``; None is no limit."""
    if length < 1:
        raise ValueError(f"a document has at least 1 token; got length {length}")
    table = []
    for row in slices:
        if len(row) != 6:
            raise ValueError(f"a slice is (q0, q1, k0, k1, lo, hi); got {tuple(row)}")
        q0, q1, k0, k1 = (_count(_required(x, row)) for x in row[:4])
        lo = -UNBOUNDED if row[4] is None else _count(row[4])
        hi = UNBOUNDED if row[5] is None else _count(row[5])
        if q0 > q1 or k0 > k1 or lo > hi:
            raise ValueError(f"slice {tuple(row)} needs q0 <= q1, k0 <= k1 and lo <= hi")
        if q0 < 0 or k0 < 0 or q1 > length or k1 > length:
            raise ValueError(f"slice {tuple(row)} lies outside its document of {length} tokens")
        table.append((q0, q1, k0, k1, max(lo, -UNBOUNDED), min(hi, UNBOUNDED)))
    array = trim(np.array(table, np.int64).reshape(-1, 6))
    kept = np.flatnonzero(~is_empty(array))
    clash = overlapping_pair(array[kept])
    if clash:
        a, b = (table[kept[i]] for i in clash)
        raise ValueError(f"slices {a} and {b} share a (query, key) pair; make them disjoint")
    return Mask("slices", length=length, table=tuple(table))


def from_key_ranges(ranges: Sequence[Sequence[Sequence[int]]] | NDArray[np.integer]) -> Mask:
    """An explicit mask from the half-open key ranges of every query: ``ranges[q] = [(start, end), ...]``.

    Any number of ranges per query; they are united where they overlap.
    """
    length = len(ranges)
    rows = [_united(np.asarray(r, np.int64).reshape(-1, 2), length, q) for q, r in enumerate(ranges)]
    return from_slices(length, _compressed(rows))


def from_cu_seqlens(
    cu_seqlens: Sequence[int] | NDArray[np.integer], mask: Mask | None = None
) -> tuple[list[int], Mask]:
    """``(lengths, mask)`` from cumulative lengths that start at 0: what :class:`flexcp.Planner` takes. Causal by default."""
    given = np.asarray(cu_seqlens)
    if given.size and not np.issubdtype(given.dtype, np.integer):
        raise ValueError(f"cu_seqlens must hold integers; got {cu_seqlens!r}")
    borders = given.astype(np.int64)
    if borders.ndim != 1 or len(borders) < 2 or borders[0] != 0:
        raise ValueError(f"cu_seqlens is a list that starts at 0 and ends at the token count; got {cu_seqlens!r}")
    lengths = np.diff(borders)
    if np.any(lengths < 1):
        raise ValueError(f"cu_seqlens must ascend: documents have at least 1 token; got {cu_seqlens!r}")
    return [int(n) for n in lengths], mask or causal()


def from_mask_mod(mask_mod: Callable[..., Any], length: int) -> Mask:
    """An explicit mask from a FlexAttention-style ``mask_mod(b, h, q_idx, kv_idx)``, evaluated exactly.

    Refused above ``MASK_MOD_MAX_LENGTH`` tokens or ``MASK_MOD_MAX_SLICES`` slices, where slices are the wrong tool. This is
    the one conversion that imports torch.
    """
    import torch

    if length < 1:
        raise ValueError(f"a document has at least 1 token; got length {length}")
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
        seen = mask_mod(zero, zero, queries[:, None], keys[None, :]).expand(len(queries), length).numpy()
        padded = np.zeros((len(queries), length + 2), np.int8)
        padded[:, 1:-1] = seen != 0
        edges = np.diff(padded, axis=1)
        for row in edges:
            rows.append(np.stack([np.flatnonzero(row == 1), np.flatnonzero(row == -1)], axis=1))
    found = _compressed(rows)
    if len(found) > MASK_MOD_MAX_SLICES:
        raise NotImplementedError(
            f"this mask_mod needs {len(found)} slices, more than {MASK_MOD_MAX_SLICES}; it is not made of bands. "
            "Use a block-sparse kernel for it"
        )
    return from_slices(length, found)


MASK_FORMS = "causal, full, window:4096, lambda:64,4096, shared-question:4,0.2, blockwise:256,2, prefix:128, @mask.json"


def parse_mask(text: str) -> Mask | list[Mask]:
    """A mask from its text form (see ``MASK_FORMS``); ``@file.json`` gives one mask per document."""
    if text.startswith("@"):
        return _from_json(Path(text[1:]))
    name, _, tail = text.partition(":")
    makers: dict[str, tuple[Callable[..., Mask], tuple[type, ...]]] = {
        "causal": (causal, ()),
        "full": (full, ()),
        "window": (lambda w: window(w - 1, 0), (int,)),
        "lambda": (lambda_, (int, int)),
        "shared-question": (shared_question, (int, float)),
        "blockwise": (causal_blockwise, (int, int)),
        "prefix": (prefix, (int,)),
    }
    if name not in makers:
        close = difflib.get_close_matches(name, makers, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ValueError(f"unknown mask {text!r}: {hint}known forms are {MASK_FORMS}")
    make, types = makers[name]
    given = tail.split(",") if tail else []
    if len(given) > len(types) or (name in ("window", "prefix") and not given):
        raise ValueError(f"mask {text!r} takes {len(types)} number(s) after the colon; known forms are {MASK_FORMS}")
    try:
        numbers = [kind(x) for kind, x in zip(types, given, strict=False)]
    except ValueError:
        raise ValueError(f"mask {text!r}: {tail!r} is not a list of numbers; known forms are {MASK_FORMS}") from None
    if name == "window" and numbers[0] < 1:
        raise ValueError(f"mask {text!r}: a window holds at least 1 key (itself)")
    return make(*numbers)


def _from_json(path: Path) -> list[Mask]:
    try:
        content = json.loads(path.read_text())
        documents = content["documents"]
        pairs = [
            (_count(d["length"]), [[None if x is None else _count(x) for x in row] for row in d["slices"]])
            for d in documents
        ]
    except OSError as error:
        raise ValueError(f"cannot read mask file {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"mask file {path} must hold "
            f'{{"documents": [{{"length": n, "slices": [[q0, q1, k0, k1, lo, hi], ...]}}, ...]}}: {error!r}'
        ) from None
    return [from_slices(n, slices) for n, slices in pairs]


def _count(value: int) -> int:
    """A whole number of tokens, as a plain int."""
    try:
        return operator.index(value)
    except TypeError:
        raise ValueError(f"a number of tokens must be an integer; got {value!r}") from None


def _required(value: int | None, row: Sequence[int | None]) -> int:
    if value is None:
        raise ValueError(f"slice {tuple(row)}: only lo and hi may be None")
    return value


def _united(ranges: Ints, length: int, query: int) -> Ints:
    """The ranges of one query, sorted, without empties, merged where they touch or overlap."""
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
    """Slices of per-query ranges: consecutive rows join while each end of a range stands still or moves by one."""
    done: list[SliceRow] = []
    open_: list[list[int]] = []  # q0, q, start at q0, end at q0, start at q, end at q, start step, end step (-1: free)
    for q, ranges in enumerate(rows):
        following: list[list[int]] = []
        waiting = [tuple(map(int, r)) for r in ranges]
        for run in open_:
            fit = next((r for r in waiting if _continues(run, r)), None)
            if fit is None:
                done.append(_closed(run))
                continue
            waiting.remove(fit)
            steps = [fit[0] - run[4], fit[1] - run[5]]
            following.append([run[0], q, run[2], run[3], *fit, *steps])
        following += [[q, q, a, b, a, b, -1, -1] for a, b in waiting]
        open_ = following
    return done + [_closed(run) for run in open_]


def _continues(run: list[int], found: tuple[int, ...]) -> bool:
    steps = (found[0] - run[4], found[1] - run[5])
    return all(s in (0, 1) and known in (-1, s) for s, known in zip(steps, run[6:], strict=True))


def _closed(run: list[int]) -> SliceRow:
    q0, q, start, _, last_start, last_end, start_step, end_step = run
    lo = start - q0 if start_step == 1 else None
    hi = last_end - 1 - q if end_step == 1 else None
    return q0, q + 1, min(start, last_start), last_end, lo, hi


# --- the slices of the named masks: one tuple of columns per slice, each an array over documents or a number ----------


def _full_columns(mask: Mask, n: Ints) -> list[Columns]:
    return [(0, n, 0, n, -UNBOUNDED, UNBOUNDED)]


def _causal_columns(mask: Mask, n: Ints) -> list[Columns]:
    return [(0, n, 0, n, -UNBOUNDED, 0)]


def _window_columns(mask: Mask, n: Ints) -> list[Columns]:
    left, right = mask.params
    return [(0, n, 0, n, -left, right)]  # type: ignore[operator]


def _lambda_columns(mask: Mask, n: Ints) -> list[Columns]:
    sink, width = (int(p) for p in mask.params)  # type: ignore[arg-type]
    return [(0, n, 0, n, -(width - 1), 0), (0, n, 0, np.minimum(sink, n), -UNBOUNDED, -width)]


def _shared_question_columns(mask: Mask, n: Ints) -> list[Columns]:
    answers, share = int(mask.params[0]), float(mask.params[1])  # type: ignore[arg-type]
    q = np.array([int(share * int(x)) for x in n], np.int64)
    each = (n - q) // answers
    columns: list[Columns] = [(0, n, 0, q, -UNBOUNDED, 0)]
    for i in range(answers):
        a = q + i * each
        b = n if i == answers - 1 else a + each
        columns.append((a, b, a, b, -UNBOUNDED, 0))
    return columns


def _blockwise_columns(mask: Mask, n: Ints) -> list[Columns]:
    block, local = (int(p) for p in mask.params)  # type: ignore[arg-type]
    last = (n - 1) // block * block
    return [
        (0, n, 0, np.minimum(block, n), -UNBOUNDED, 0),
        (block, last, block, last, -local * block, 0),
        (np.maximum(last, block), n, block, n, -UNBOUNDED, 0),
    ]


def _prefix_columns(mask: Mask, n: Ints) -> list[Columns]:
    p = np.minimum(int(mask.params[0]), n)  # type: ignore[arg-type]
    return [(0, n, 0, p, -UNBOUNDED, UNBOUNDED), (p, n, p, n, -UNBOUNDED, 0)]


def _modality_columns(mask: Mask, n: Ints) -> list[Columns]:
    flat, self_only = mask.params
    assert isinstance(flat, tuple)
    if flat and np.any(n < flat[-1]):
        short = int(n[n < flat[-1]][0])
        raise ValueError(f"modality span ({flat[-2]}, {flat[-1]}) lies outside a document of {short} tokens")
    columns: list[Columns] = []
    text = 0
    for start, end in zip(flat[::2], flat[1::2], strict=True):
        columns.append((text, start, 0, start, -UNBOUNDED, 0))
        columns.append((start, end, start if self_only else 0, end, -UNBOUNDED, UNBOUNDED))
        text = end
    columns.append((text, n, 0, n, -UNBOUNDED, 0))
    return columns


def _explicit_columns(mask: Mask, n: Ints) -> list[Columns]:
    return [tuple(np.full(len(n), x, np.int64) for x in row) for row in mask.table]  # type: ignore[misc]


_NAMED: dict[str, Callable[[Mask, Ints], list[Columns]]] = {
    "full": _full_columns,
    "causal": _causal_columns,
    "window": _window_columns,
    "lambda": _lambda_columns,
    "shared-question": _shared_question_columns,
    "blockwise": _blockwise_columns,
    "prefix": _prefix_columns,
    "modality": _modality_columns,
    "slices": _explicit_columns,
}

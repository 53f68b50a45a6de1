"""Mask: a rule that gives every document its slices.

A mask is its name and its numbers, so it is small, hashable and the same on every rank; the slices of a document are found when its length
is known. The rules stand here, next to their reader; :mod:`flexcp.masks.named` makes the masks that they are for, and checks their numbers.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flexcp.masks.slices import LONGEST, UNBOUNDED, Ints, is_empty, trim

Columns = tuple[Any, Any, Any, Any, Any, Any]


@dataclass(frozen=True)
class Mask:
    """A rule that gives every document its slices.

    ``name`` and ``params`` identify a named mask. An explicit mask has the name ``"slices"``, the one ``length`` it fits,
    and its ``table``. Equality is by value; use the functions of :mod:`flexcp.masks` to make one.
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


def token_count(value: int) -> int:
    """A whole number of tokens, as a plain int."""
    try:
        return operator.index(value)
    except TypeError:
        raise ValueError(f"a number of tokens must be an integer; got {value!r}") from None


NO_LIMIT = 1 << 62
"""Numbers of tokens from here on mean "no limit", as ``sys.maxsize`` does in configurations; no file or table holds a larger one."""


def reach(value: int) -> int:
    """How many tokens a mask reaches: the number itself, or ``UNBOUNDED`` for one that means no limit."""
    tokens = token_count(value)
    return tokens if tokens < NO_LIMIT else UNBOUNDED


def document_length(value: int) -> int:
    """The length of a document, as a plain int."""
    tokens = token_count(value)
    if tokens < 1:
        raise ValueError(f"a document has at least 1 token; got length {tokens}")
    if tokens >= LONGEST:
        raise ValueError(f"a document of {tokens} tokens is beyond what flexcp counts exactly (2**30)")
    return tokens


# --- the slices of the named masks: one tuple of columns per slice, each an array over documents or a number ----------
# Numbers of a mask may exceed every document by far: they are bounded here, before anything is computed from them in 64 bits.


def _bounded(tokens: Any) -> int:
    return min(int(tokens), UNBOUNDED)


def _full_columns(mask: Mask, n: Ints) -> list[Columns]:
    return [(0, n, 0, n, -UNBOUNDED, UNBOUNDED)]


def _causal_columns(mask: Mask, n: Ints) -> list[Columns]:
    return [(0, n, 0, n, -UNBOUNDED, 0)]


def _window_columns(mask: Mask, n: Ints) -> list[Columns]:
    left, right = map(_bounded, mask.params)
    return [(0, n, 0, n, -left, right)]


def _lambda_columns(mask: Mask, n: Ints) -> list[Columns]:
    sink, width = map(_bounded, mask.params)
    return [(0, n, 0, n, -(width - 1), 0), (0, n, 0, np.minimum(sink, n), -UNBOUNDED, -width)]


def question_and_answer(mask: Mask, n: Ints) -> tuple[Ints, Ints]:
    """Tokens of the question and of each answer but the last, which takes the remainder, in documents under a shared question."""
    answers, share = int(mask.params[0]), float(mask.params[1])  # type: ignore[arg-type]
    q = np.array([int(share * int(x)) for x in n], np.int64)
    return q, (n - q) // answers


def _shared_question_columns(mask: Mask, n: Ints) -> list[Columns]:
    answers, (q, each) = int(mask.params[0]), question_and_answer(mask, n)  # type: ignore[arg-type]
    columns: list[Columns] = [(0, n, 0, q, -UNBOUNDED, 0)]
    # With more answers than tokens all but the last are empty.
    for i in range(0 if each.any() else answers - 1, answers):
        a = q + i * each
        b = n if i == answers - 1 else a + each
        columns.append((a, b, a, b, -UNBOUNDED, 0))
    return columns


def _blockwise_columns(mask: Mask, n: Ints) -> list[Columns]:
    block, local = map(_bounded, mask.params)
    last = (n - 1) // block * block
    return [
        (0, n, 0, np.minimum(block, n), -UNBOUNDED, 0),
        (block, last, block, last, -_bounded(local * block), 0),
        (np.maximum(last, block), n, block, n, -UNBOUNDED, 0),
    ]


def _prefix_columns(mask: Mask, n: Ints) -> list[Columns]:
    p = np.minimum(_bounded(mask.params[0]), n)
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

"""Mask: a rule that gives every document its slices.

A mask consists of a name and numbers, so it is small, hashable and the same on every rank. Its slices are computed for
the length of a document, by the rule that :mod:`flexcp.masks.named` has for the mask's name.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flexcp.io.plain_values import shown
from flexcp.masks.slices import LONGEST, UNBOUNDED, Ints, is_empty, trim

EXPLICIT = "slices"
"""The name of masks that are given as a table of slices."""
TREE = "tree"
"""The name of masks of trees (:mod:`flexcp.masks.tree`)."""


@dataclass(frozen=True)
class Mask:
    """A rule that gives every document its slices.

    ``name`` and ``params`` identify a named mask. ``length`` is set for masks that fit documents of one length only:
    trees and explicit masks. An explicit mask has the name ``EXPLICIT`` and its slices in ``table``. Masks are compared
    by value. Make one with the functions of :mod:`flexcp.masks`.
    """

    name: str
    params: tuple[int | float | bool | tuple[int, ...], ...] = ()
    length: int | None = None
    table: tuple[tuple[int, ...], ...] = ()

    def slices(self, length: int) -> Ints:
        """Return the trimmed, non-empty slices of a document of ``length`` tokens, int64 ``[slices, 6]``.

        The columns are ``q0 q1 k0 k1 lo hi`` (:mod:`flexcp.masks.slices`). Raise ValueError if the mask does not fit
        the length.
        """
        return self.slices_of(np.array([length], np.int64))[1]

    def slices_of(self, lengths: Ints) -> tuple[Ints, Ints]:
        """Return (document of each slice, slices) of documents of the given lengths, sorted by document.

        Slices are as in :meth:`slices`. Raise ValueError if the mask does not fit a length.
        """
        if self.length is not None and np.any(lengths != self.length):
            wrong = int(lengths[lengths != self.length][0])
            raise ValueError(
                f"mask {self} is for a document of {self.length} tokens but was given one of {wrong}; "
                "pass one mask per document (a list as long as lengths)"
            )
        from flexcp.masks.named import named_mask  # imported here because flexcp.masks.named imports this module

        columns = self.table if self.name == EXPLICIT else named_mask(self.name).rule(self, lengths)
        if self.length is not None:
            table = trim(np.array(columns, np.int64).reshape(-1, 6))
            table = table[~is_empty(table)]
            return np.repeat(np.arange(len(lengths)), len(table)), np.tile(table, (len(lengths), 1))
        parts = [np.stack(np.broadcast_arrays(*c, lengths)[:6], axis=-1) for c in columns]
        docs = np.repeat(np.arange(len(lengths))[None, :], len(parts), axis=0).reshape(-1)
        table = trim(np.concatenate(parts).astype(np.int64))
        keep = np.flatnonzero(~is_empty(table))
        order = keep[np.argsort(docs[keep], kind="stable")]
        return docs[order], table[order]

    def dense(self, length: int) -> NDArray[np.bool_]:
        """Return the mask as a boolean ``[length, length]`` matrix, for tests and small pictures."""
        q = np.arange(length)[:, None]
        k = np.arange(length)[None, :]
        out = np.zeros((length, length), bool)
        for q0, q1, k0, k1, lo, hi in self.slices(length):
            out |= (q >= q0) & (q < q1) & (k >= k0) & (k < k1) & (k - q >= lo) & (k - q <= hi)
        return out

    def __str__(self) -> str:
        if self.name == EXPLICIT:
            return f"slices[{len(self.table)} for {self.length} tokens]"
        if self.name == TREE:
            parents, _, ends, left = self.params
            counts = f"{len(parents)} segments, {len(ends)} sequences, {self.length} tokens"  # type: ignore[arg-type]
            unbounded = int(left) >= UNBOUNDED  # type: ignore[arg-type]
            return f"tree[{counts}]" if unbounded else f"tree[{counts}, left {left}]"
        # In words, because the numbers are ambiguous: the text form counts keys, flexcp.window tokens beside a query.
        if self.name == "window":
            return f"window of {_window_words(*self.params)}"  # type: ignore[arg-type]
        return self.name + (":" + ",".join(map(str, self.params)) if self.params else "")


def _window_words(left: int, right: int) -> str:
    """Describe a window: ``4,096 keys``, or both of its sides if it also looks ahead or has no limit."""
    if right == 0 and left < UNBOUNDED:
        return f"{left + 1:,} key{'s' if left else ''}"
    return " and ".join(
        f"{'all' if tokens >= UNBOUNDED else f'{tokens:,}'} keys {side}"
        for tokens, side in ((left, "before"), (right, "after"))
    )


def token_count(value: int) -> int:
    """Return a number of tokens as a plain int; raise ValueError if it is no integer."""
    try:
        return operator.index(value)
    except TypeError:
        raise ValueError(f"a number of tokens must be an integer; got {shown(value)}") from None


NO_LIMIT = 1 << 62
"""This and larger numbers of tokens mean "no limit", as ``sys.maxsize`` does in model configurations."""


def reach(value: int) -> int:
    """Return how many tokens a mask reaches: ``value``, or ``UNBOUNDED`` if it is ``NO_LIMIT`` or more."""
    tokens = token_count(value)
    return tokens if tokens < NO_LIMIT else UNBOUNDED


def document_length(value: int) -> int:
    """Return the length of a document as a plain int; raise ValueError if no document can have it."""
    tokens = token_count(value)
    if tokens < 1:
        raise ValueError(f"a document has at least 1 token; got length {tokens}")
    if tokens >= LONGEST:
        raise ValueError(f"a document of {tokens} tokens is beyond what flexcp counts exactly (2**30)")
    return tokens

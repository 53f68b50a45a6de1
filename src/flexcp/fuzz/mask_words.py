"""Mask words: masks as plain values that fit into a file, and the pairs that each allows by its definition.

A mask is a list: a kind and its numbers, as in ``["window", 6, 0]``. :func:`rule_of` makes the mask as a user would.
:func:`allowed` returns which (query, key) pairs attend, from the definition of the mask and without slices, so that an
error in the arithmetic of slices is found. Numbers may be far larger than every document.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flexcp import masks
from flexcp.masks import Mask

Bools = NDArray[np.bool_]
Words = list[Any]
"""A mask as plain values: its kind and its numbers, as in ``["window", 6, 0]``."""

FAR = 1 << 40
"""A number larger than any document, which replaces larger ones that would not fit into 64 bits."""


def rule_of(words: Words) -> Mask:
    """Return the mask, made as a user would make it; raise ValueError for an unknown kind."""
    kind, *numbers = words
    makers: dict[str, Callable[..., Mask]] = {
        "full": masks.full,
        "causal": masks.causal,
        "window": masks.window,
        "lambda": masks.lambda_,
        "shared-question": masks.shared_question,
        "blockwise": masks.causal_blockwise,
        "prefix": masks.prefix,
        "modality": masks.modality,
        "slices": masks.from_slices,
        "key-ranges": masks.from_key_ranges,
        "tree": masks.tree,
    }
    if kind not in makers:
        raise ValueError(f"unknown kind of mask {kind!r}; known are {', '.join(makers)}")
    return makers[kind](*numbers)


def allowed(words: Words, length: int) -> Bools:
    """Return which pairs attend in a document of ``length`` tokens, as a boolean matrix ``[query, key]``."""
    return np.asarray(_allowed(words, length), bool)


def _allowed(words: Words, length: int) -> Any:
    kind, *numbers = words
    q, k = np.arange(length)[:, None], np.arange(length)[None, :]
    causal = k <= q
    if kind == "full":
        return np.ones((length, length), bool)
    if kind == "causal":
        return causal
    if kind == "window":
        left, right = (FAR if x is None else min(x, FAR) for x in numbers)
        return (q - k <= left) & (k - q <= right)
    if kind == "lambda":
        sink, width = (min(x, FAR) for x in numbers)
        return causal & ((k < sink) | (q - k < width))
    if kind == "blockwise":
        block, back = (min(x, 1 << 20) for x in numbers)
        middle = (q // block > 0) & (q // block < (length - 1) // block)
        return causal & (~middle | (k < block) | (q - k <= back * block))
    if kind == "prefix":
        return causal | (k < min(numbers[0], FAR))
    if kind == "modality":
        return _modality(numbers[0], numbers[1], causal)
    if kind == "shared-question":
        return _shared_question(numbers[0], numbers[1], length) & causal
    if kind == "tree":
        return _tree(numbers[0], numbers[1], None if len(numbers) < 4 else numbers[3])
    found = np.zeros((length, length), bool)
    if kind == "slices":
        for q0, q1, k0, k1, lo, hi in numbers[1]:
            inside = (q >= q0) & (q < q1) & (k >= k0) & (k < k1)
            inside &= k - q >= (-FAR if lo is None else max(lo, -FAR))
            found |= inside & (k - q <= (FAR if hi is None else min(hi, FAR)))
        return found
    for row, ranges in enumerate(numbers[0]):
        for start, stop in ranges:
            found[row, start:stop] = True
    return found


def _modality(spans: list[list[int]], self_only: bool, causal: Bools) -> Bools:
    found = causal.copy()
    for start, end in spans:
        found[start:end] = False
        found[start:end, start if self_only else 0 : end] = True
    return found


def _shared_question(answers: int | list[int], question: float, length: int) -> Bools:
    """Return the pairs of each row with the keys of the question and of its own answer, before the causal restriction.

    ``answers`` is the number of answers, with ``question`` a share of the length, or a list of their lengths, with
    ``question`` a number of tokens.
    """
    if isinstance(answers, int):
        asked = int(question * length)
        each = (length - asked) // answers
        sizes = [each] * (answers - 1)
        sizes.append(length - asked - sum(sizes))
    else:
        asked, sizes = int(question), answers
    part = np.repeat(np.arange(len(sizes) + 1), [asked, *sizes])
    return np.asarray((part[None, :] == 0) | (part[:, None] == part[None, :]))


def _tree(parents: list[int], lengths: list[int], left: int | None) -> Bools:
    """Return the pairs of a tree by walking from each token to its root.

    With ``left``, a token sees only itself and the ``left`` nearest tokens of that path.
    """
    starts = np.cumsum([0, *lengths])
    found = np.zeros((int(starts[-1]), int(starts[-1])), bool)
    for segment, length in enumerate(lengths):
        above: list[int] = []
        at = parents[segment]
        while at != -1:
            above = [*range(int(starts[at]), int(starts[at + 1])), *above]
            at = parents[at]
        for place in range(length):
            path = [*above, *range(int(starts[segment]), int(starts[segment]) + place + 1)]
            found[path[-1], path if left is None else path[-min(left, FAR) - 1 :]] = True
    return found

"""Named masks: one function for each, which checks its numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from numbers import Real

import numpy as np

from flexcp.masks.mask import Mask, document_length, reach, token_count
from flexcp.masks.slices import UNBOUNDED

MAX_ANSWERS = 1 << 14
"""Answers that a count may ask for: each is a slice of every document."""


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
        tokens = UNBOUNDED if value is None else reach(value)
        if tokens < 0:
            raise ValueError(f"window {name} must be 0 or more, or None for no limit; got {value}")
        sides.append(tokens)
    return Mask("window", tuple(sides))


def lambda_(sink: int = 64, window: int = 4096) -> Mask:
    """Attention sink and window: query i sees the first ``sink`` keys and the last ``window`` up to itself."""
    sink, window = reach(sink), reach(window)
    if sink < 0 or window < 1:
        raise ValueError(f"lambda needs sink >= 0 and window >= 1; got sink {sink}, window {window}")
    return Mask("lambda", (sink, window))


def shared_question(answers: int | Sequence[int] = 4, question: float | int = 0.2) -> Mask:
    """One question followed by answers that see the question and themselves, all causal.

    With an integer count of answers, ``question`` is the question's share of the document and the rest is cut evenly (the
    last answer takes the remainder). With a sequence of answer lengths, ``question`` is the question's length in tokens.
    """
    if not isinstance(question, Real) or not isinstance(answers, int | np.integer | Iterable):
        raise ValueError(
            "shared_question takes the answers first, then the question: shared_question([4, 4, 4], 6) or shared_question(3, 0.2); "
            f"got answers {answers!r} and question {question!r}"
        )
    if isinstance(answers, int | np.integer):
        answers = int(answers)
        if answers < 1 or not 0 <= question <= 1:
            raise ValueError(
                f"shared_question needs answers >= 1 and 0 <= question <= 1, the question's share of the document; got {answers} and "
                f"{question} (with a list of answer lengths the question is in tokens)"
            )
        if answers > MAX_ANSWERS:
            raise ValueError(
                f"shared_question cuts a document into at most {MAX_ANSWERS} answers; got {answers}. Give the answers' lengths instead"
            )
        return Mask("shared-question", (answers, float(question)))
    lengths = tuple(token_count(a) for a in answers)
    if not lengths or min(lengths) < 0 or not question >= 0 or question % 1:
        raise ValueError(
            f"answer lengths and the question's length must be integers >= 0; got {answers} and {question}"
        )
    total = document_length(int(question) + sum(lengths))
    starts = np.cumsum((int(question), *lengths))
    rows = [(0, total, 0, int(question), -UNBOUNDED, 0)]
    rows += [(int(a), int(b), int(a), int(b), -UNBOUNDED, 0) for a, b in pairwise(starts)]
    return Mask("slices", length=total, table=tuple(rows))


def causal_blockwise(block: int = 256, local: int = 2) -> Mask:
    """Causal; the first and last block of ``block`` tokens as usual, the others see block 0 and ``local`` blocks back."""
    block, local = reach(block), reach(local)
    if block < 1 or local < 0:
        raise ValueError(f"causal_blockwise needs block >= 1 and local >= 0; got block {block}, local {local}")
    return Mask("blockwise", (block, local))


def prefix(tokens: int) -> Mask:
    """The first ``tokens`` keys are seen by all; the rest is causal."""
    tokens = reach(tokens)
    if tokens < 0:
        raise ValueError(f"prefix needs a length of 0 or more; got {tokens}")
    return Mask("prefix", (tokens,))


def modality(spans: Iterable[tuple[int, int]], self_only: bool = False) -> Mask:
    """Causal text with image spans ``[(start, end), ...]``.

    A token of an image sees everything up to the end of its image, or with ``self_only`` just its image.
    """
    flat: list[int] = []
    try:
        pairs = [(a, b) for a, b in spans]
    except (TypeError, ValueError) as error:
        raise ValueError(f"spans is a list of (start, end) pairs; got {spans!r}") from error
    for start, end in ((token_count(a), token_count(b)) for a, b in pairs):
        if start < (flat[-1] if flat else 0) or end < start:
            raise ValueError(f"spans must be ascending, disjoint (start, end) pairs; got ({start}, {end}) after {flat}")
        document_length(max(end, 1))  # no document holds a span that ends beyond the longest
        flat += [start, end]
    return Mask("modality", (tuple(flat), bool(self_only)))

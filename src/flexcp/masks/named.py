"""Named masks: one function for each, which checks its numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np

from flexcp.masks.mask import Mask, token_count
from flexcp.masks.slices import UNBOUNDED


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
        reach = UNBOUNDED if value is None else token_count(value)
        if reach < 0:
            raise ValueError(f"window {name} must be 0 or more, or None for no limit; got {value}")
        sides.append(reach)
    return Mask("window", tuple(sides))


def lambda_(sink: int = 64, window: int = 4096) -> Mask:
    """Attention sink and window: query i sees the first ``sink`` keys and the last ``window`` up to itself."""
    sink, window = token_count(sink), token_count(window)
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
    lengths = tuple(token_count(a) for a in answers)
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
    block, local = token_count(block), token_count(local)
    if block < 1 or local < 0:
        raise ValueError(f"causal_blockwise needs block >= 1 and local >= 0; got block {block}, local {local}")
    return Mask("blockwise", (block, local))


def prefix(tokens: int) -> Mask:
    """The first ``tokens`` keys are seen by all; the rest is causal."""
    tokens = token_count(tokens)
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
        flat += [token_count(start), token_count(end)]
    return Mask("modality", (tuple(flat), bool(self_only)))

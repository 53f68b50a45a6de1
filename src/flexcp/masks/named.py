"""Named masks: of each, the function that makes it, the rule that finds its slices, and a row of :data:`NAMED`.

``NAMED`` is the one table of them: whatever has to know all masks (text forms, plan files, the command line, lines of
code in a report) reads it, and a name that is not in it is an error. A new mask is a function here that checks its
numbers and makes a :class:`Mask`, a rule, a row of the table, the function's name in ``flexcp/__init__.py`` and
``flexcp/masks/__init__.py``, and a row of docs/concepts.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from numbers import Real
from typing import Any

import numpy as np

from flexcp.masks.mask import EXPLICIT, Mask, document_length, reach, token_count
from flexcp.masks.slices import UNBOUNDED, Ints
from flexcp.masks.tree import most_slices, tree, tree_slices

Columns = tuple[Any, Any, Any, Any, Any, Any]

MAX_ANSWERS = 1 << 14
"""Answers that a count may ask for: each is a slice of every document."""

MAX_CHUNKS = 1 << 14
"""Chunks of a document, each a slice."""

# A rule gives one tuple of columns per slice, each an array over documents or a number. Numbers of a mask may exceed
# every document by far: they are bounded before anything is computed from them in 64 bits.


def _bounded(tokens: Any) -> int:
    return min(int(tokens), UNBOUNDED)


def full() -> Mask:
    """Every query sees every key of its document."""
    return Mask("full")


def _full_columns(mask: Mask, n: Ints) -> list[Columns]:
    return [(0, n, 0, n, -UNBOUNDED, UNBOUNDED)]


def causal() -> Mask:
    """Query i sees keys 0..i."""
    return Mask("causal")


def _causal_columns(mask: Mask, n: Ints) -> list[Columns]:
    return [(0, n, 0, n, -UNBOUNDED, 0)]


def window(left: int | None, right: int | None = 0) -> Mask:
    """Query q sees key k when ``-left <= k - q <= right``; None is no limit on that side."""
    sides = []
    for name, value in (("left", left), ("right", right)):
        tokens = UNBOUNDED if value is None else reach(value)
        if tokens < 0:
            raise ValueError(f"window {name} must be 0 or more, or None for no limit; got {value}")
        sides.append(tokens)
    return Mask("window", tuple(sides))


def _window_of_keys(keys: int) -> Mask:
    """The window of a text form: so many keys up to its own."""
    if keys < 1:
        raise ValueError(f"mask 'window:{keys}': a window holds at least 1 key (itself)")
    return window(keys - 1, 0)


def _window_columns(mask: Mask, n: Ints) -> list[Columns]:
    left, right = map(_bounded, mask.params)
    return [(0, n, 0, n, -left, right)]


def lambda_(sink: int = 64, window: int = 4096) -> Mask:
    """Attention sink and window: query i sees the first ``sink`` keys and the last ``window`` up to itself."""
    sink, window = reach(sink), reach(window)
    if sink < 0 or window < 1:
        raise ValueError(f"lambda needs sink >= 0 and window >= 1; got sink {sink}, window {window}")
    return Mask("lambda", (sink, window))


def _lambda_columns(mask: Mask, n: Ints) -> list[Columns]:
    sink, width = map(_bounded, mask.params)
    return [(0, n, 0, n, -(width - 1), 0), (0, n, 0, np.minimum(sink, n), -UNBOUNDED, -width)]


def shared_question(answers: int | Sequence[int] = 4, question: float | int = 0.2) -> Mask:
    """One question followed by answers that see the question and themselves, all causal.

    With an integer count of answers, ``question`` is the question's share of the document and the rest is cut evenly
    (the last answer takes the remainder). With a sequence of answer lengths, ``question`` is the question's length in
    tokens.
    """
    if not isinstance(question, Real) or not isinstance(answers, int | np.integer | Iterable):
        raise ValueError(
            "shared_question takes the answers first, then the question: shared_question([4, 4, 4], 6) or "
            f"shared_question(3, 0.2); got answers {answers!r} and question {question!r}"
        )
    if isinstance(answers, int | np.integer):
        answers = int(answers)
        if answers < 1 or not 0 <= question <= 1:
            raise ValueError(
                "shared_question needs answers >= 1 and 0 <= question <= 1, the question's share of the document; got "
                f"{answers} and {question} (with a list of answer lengths the question is in tokens)"
            )
        if answers > MAX_ANSWERS:
            raise ValueError(
                f"shared_question cuts a document into at most {MAX_ANSWERS} answers; got {answers}. "
                "Give the answers' lengths instead"
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
    return Mask(EXPLICIT, length=total, table=tuple(rows))


def question_and_answer(mask: Mask, n: Ints) -> tuple[Ints, Ints]:
    """Tokens of the question and of each answer but the last, which takes the remainder,
    in documents under a shared question.
    """
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


def causal_blockwise(block: int = 256, local: int = 2) -> Mask:
    """Causal; the first and last block of ``block`` tokens as usual,
    the others see block 0 and ``local`` blocks back.
    """
    block, local = reach(block), reach(local)
    if block < 1 or local < 0:
        raise ValueError(f"causal_blockwise needs block >= 1 and local >= 0; got block {block}, local {local}")
    return Mask("blockwise", (block, local))


def _blockwise_columns(mask: Mask, n: Ints) -> list[Columns]:
    block, local = map(_bounded, mask.params)
    last = (n - 1) // block * block
    return [
        (0, n, 0, np.minimum(block, n), -UNBOUNDED, 0),
        (block, last, block, last, -_bounded(local * block), 0),
        (np.maximum(last, block), n, block, n, -UNBOUNDED, 0),
    ]


def chunked(tokens: int) -> Mask:
    """A document is cut every ``tokens`` tokens, and query i sees the keys of its chunk up to itself."""
    tokens = reach(tokens)
    if tokens < 1:
        raise ValueError(f"a chunk has at least 1 token; got {tokens}")
    return Mask("chunked", (tokens,))


def _chunks(mask: Mask, longest: int) -> int:
    """Chunks of a document of so many tokens."""
    return max(1, -(-int(longest) // int(mask.params[0])))  # type: ignore[arg-type]


def _chunked_columns(mask: Mask, n: Ints) -> list[Columns]:
    size, count = _bounded(mask.params[0]), _chunks(mask, int(n.max(initial=1)))
    if count > MAX_CHUNKS:
        raise ValueError(
            f"chunks of {size} tokens cut a document of {int(n.max())} into {count}, and each is a slice; at most "
            f"{MAX_CHUNKS} are made"
        )
    ends = [np.minimum(size * i, n) for i in range(count + 1)]
    return [(a, b, a, b, -UNBOUNDED, 0) for a, b in pairwise(ends)]


def prefix(tokens: int) -> Mask:
    """The first ``tokens`` keys are seen by all; the rest is causal."""
    tokens = reach(tokens)
    if tokens < 0:
        raise ValueError(f"prefix needs a length of 0 or more; got {tokens}")
    return Mask("prefix", (tokens,))


def _prefix_columns(mask: Mask, n: Ints) -> list[Columns]:
    p = np.minimum(_bounded(mask.params[0]), n)
    return [(0, n, 0, p, -UNBOUNDED, UNBOUNDED), (p, n, p, n, -UNBOUNDED, 0)]


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


def _pairs(params: tuple[Any, ...]) -> tuple[Any, ...]:
    flat, self_only = params
    return list(zip(flat[::2], flat[1::2], strict=True)), self_only


# --- the table --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TextForm:
    """How a command line writes a mask: its name, a colon, and numbers,
    of which the first ``required`` must be given.
    """

    signature: str
    """With letters for the numbers, as help shows it."""
    example: str
    numbers: tuple[type, ...] = ()
    required: int = 0
    make: Callable[..., Mask] | None = None
    """What makes it of these numbers, where that is not the mask's own function."""


@dataclass(frozen=True)
class NamedMask:
    """What is known of all masks of one name."""

    make: Callable[..., Mask]
    """The public function."""
    rule: Callable[[Mask, Ints], list[Columns] | Ints]
    """The slices of documents of these lengths; the table of them, ``[slices, 6]``, for masks that fit one length."""
    most_slices: Callable[[Mask, int], int]
    """Slices of a document of at most so many tokens: the memory that a plan file may take for them."""
    text: TextForm | None = None
    """None: a command line cannot say it."""
    arguments: Callable[[tuple[Any, ...]], tuple[Any, ...]] = tuple
    """What to call ``make`` with for a mask of these ``params``, which are what a plan file holds."""


NAMED: dict[str, NamedMask] = {
    "causal": NamedMask(causal, _causal_columns, lambda _, n: 1, TextForm("causal", "causal")),
    "full": NamedMask(full, _full_columns, lambda _, n: 1, TextForm("full", "full")),
    "window": NamedMask(
        window,
        _window_columns,
        lambda _, n: 1,
        TextForm("window:W", "window:4096", (int,), required=1, make=_window_of_keys),
    ),
    "lambda": NamedMask(lambda_, _lambda_columns, lambda _, n: 2, TextForm("lambda:S,W", "lambda:64,4096", (int, int))),
    "shared-question": NamedMask(
        shared_question,
        _shared_question_columns,
        lambda mask, n: int(mask.params[0]) + 1,  # type: ignore[arg-type]
        TextForm("shared-question:N,SHARE", "shared-question:4,0.2", (int, float)),
    ),
    "blockwise": NamedMask(
        causal_blockwise,
        _blockwise_columns,
        lambda _, n: 3,
        TextForm("blockwise:B,L", "blockwise:256,2", (int, int)),
    ),
    "chunked": NamedMask(chunked, _chunked_columns, _chunks, TextForm("chunked:C", "chunked:8192", (int,), required=1)),
    "prefix": NamedMask(
        prefix, _prefix_columns, lambda _, n: 2, TextForm("prefix:P", "prefix:128", (int,), required=1)
    ),
    "modality": NamedMask(
        modality,
        _modality_columns,
        lambda mask, n: len(mask.params[0]) + 1,  # type: ignore[arg-type]
        arguments=_pairs,
    ),
    "tree": NamedMask(tree, lambda mask, _: tree_slices(mask), lambda mask, n: most_slices(mask)),
}
"""All named masks, in the order in which their text forms are shown."""


def named_mask(name: str) -> NamedMask:
    """The table's row of a name."""
    if name not in NAMED:
        raise ValueError(f"no mask is called {name!r}; the named ones are {', '.join(NAMED)}")
    return NAMED[name]

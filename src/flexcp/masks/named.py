"""Named masks: for each, the public function that makes it, the rule that finds its slices, and a row of :data:`NAMED`.

``NAMED`` is the only list of named masks. All code that handles every mask reads it: text forms, plan files, the
command line, and the lines of code in a report. A name that is not in the table is an error. To add a mask, add here a
function that checks its numbers and makes a :class:`Mask`, a rule, and a row of the table; then add the function's name
to ``flexcp/masks/__init__.py`` and ``docs/api_names.py``, and a row to docs/concepts.md.
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
"""The most answers that ``shared_question`` accepts as a count: each adds a slice to every document."""

MAX_CHUNKS = 1 << 14
"""The most chunks that a document may have under ``chunked``: each is a slice."""

# A rule takes a mask and the document lengths ``n``, and returns a tuple of six columns for each slice of a document; a
# column is an array over the documents or a number. The numbers of a mask may be far larger than any document, so they
# are bounded before 64-bit integers are computed from them.


def _bounded(tokens: Any) -> int:
    """Return a number of tokens, at most ``UNBOUNDED``."""
    return min(int(tokens), UNBOUNDED)


def full() -> Mask:
    """Make the mask under which every query sees every key of its document."""
    return Mask("full")


def _full_columns(mask: Mask, n: Ints) -> list[Columns]:
    """Return one slice for documents of ``n`` tokens, with all pairs."""
    return [(0, n, 0, n, -UNBOUNDED, UNBOUNDED)]


def causal() -> Mask:
    """Make the mask under which query i sees keys 0 to i."""
    return Mask("causal")


def _causal_columns(mask: Mask, n: Ints) -> list[Columns]:
    """Return one slice for documents of ``n`` tokens, with the band k <= q."""
    return [(0, n, 0, n, -UNBOUNDED, 0)]


def window(left: int | None, right: int | None = 0) -> Mask:
    """Make the mask under which query q sees key k when ``-left <= k - q <= right``; None is no limit on that side."""
    sides = []
    for name, value in (("left", left), ("right", right)):
        tokens = UNBOUNDED if value is None else reach(value)
        if tokens < 0:
            raise ValueError(f"window {name} must be 0 or more, or None for no limit; got {value}")
        sides.append(tokens)
    return Mask("window", tuple(sides))


def _window_of_keys(keys: int) -> Mask:
    """Make the mask of the text form ``window:keys``: a query sees ``keys`` keys, of which its own is the last."""
    if keys < 1:
        raise ValueError(f"mask 'window:{keys}': a window holds at least 1 key (itself)")
    return window(keys - 1, 0)


def _window_columns(mask: Mask, n: Ints) -> list[Columns]:
    """Return one slice for documents of ``n`` tokens, with the band of the window."""
    left, right = map(_bounded, mask.params)
    return [(0, n, 0, n, -left, right)]


def lambda_(sink: int = 64, window: int = 4096) -> Mask:
    """Make the mask of an attention sink and a window.

    Query i sees the first ``sink`` keys and the last ``window`` keys, all up to and including its own.
    """
    sink, window = reach(sink), reach(window)
    if sink < 0 or window < 1:
        raise ValueError(f"lambda needs sink >= 0 and window >= 1; got sink {sink}, window {window}")
    return Mask("lambda", (sink, window))


def _lambda_columns(mask: Mask, n: Ints) -> list[Columns]:
    """Return two slices for documents of ``n`` tokens: the window, and the sink's keys before the window."""
    sink, width = map(_bounded, mask.params)
    return [(0, n, 0, n, -(width - 1), 0), (0, n, 0, np.minimum(sink, n), -UNBOUNDED, -width)]


def shared_question(answers: int | Sequence[int] = 4, question: float | int = 0.2) -> Mask:
    """Make the mask of a question followed by answers; each answer sees the question and itself, all causal.

    If ``answers`` is a count, ``question`` is the question's share of the document, and the rest of the document is cut
    into equal answers (the last one takes the remainder). If ``answers`` is a sequence of answer lengths, ``question``
    is the question's length in tokens, and the mask fits only documents with exactly as many tokens as all of these.
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
    """Return the tokens of the question and of one answer for each document length in ``n``.

    ``mask`` is a shared question with a number of answers. The last answer may be longer: it takes the remainder.
    """
    answers, share = int(mask.params[0]), float(mask.params[1])  # type: ignore[arg-type]
    q = np.array([int(share * int(x)) for x in n], np.int64)
    return q, (n - q) // answers


def _shared_question_columns(mask: Mask, n: Ints) -> list[Columns]:
    """Return slices for documents of ``n`` tokens: one with the keys of the question, and one for each answer."""
    answers, (q, each) = int(mask.params[0]), question_and_answer(mask, n)  # type: ignore[arg-type]
    columns: list[Columns] = [(0, n, 0, q, -UNBOUNDED, 0)]
    # If no document has a token for each answer, all answers but the last are empty.
    for i in range(0 if each.any() else answers - 1, answers):
        a = q + i * each
        b = n if i == answers - 1 else a + each
        columns.append((a, b, a, b, -UNBOUNDED, 0))
    return columns


def causal_blockwise(block: int = 256, local: int = 2) -> Mask:
    """Make a causal mask in blocks of ``block`` tokens.

    A query sees the keys of block 0 and those at most ``local * block`` tokens back. Queries of the first and of the
    last block see all keys up to their own.
    """
    block, local = reach(block), reach(local)
    if block < 1 or local < 0:
        raise ValueError(f"causal_blockwise needs block >= 1 and local >= 0; got block {block}, local {local}")
    return Mask("blockwise", (block, local))


def _blockwise_columns(mask: Mask, n: Ints) -> list[Columns]:
    """Return three slices for documents of ``n`` tokens.

    They are the keys of block 0, and the other keys for the queries of the middle blocks and of the last block.
    """
    block, local = map(_bounded, mask.params)
    last = (n - 1) // block * block
    return [
        (0, n, 0, np.minimum(block, n), -UNBOUNDED, 0),
        (block, last, block, last, -_bounded(local * block), 0),
        (np.maximum(last, block), n, block, n, -UNBOUNDED, 0),
    ]


def chunked(tokens: int) -> Mask:
    """Make the mask that cuts a document every ``tokens`` tokens; query i sees the keys of its chunk up to its own."""
    tokens = reach(tokens)
    if tokens < 1:
        raise ValueError(f"a chunk has at least 1 token; got {tokens}")
    return Mask("chunked", (tokens,))


def _chunks(mask: Mask, longest: int) -> int:
    """Return the number of chunks of a document of ``longest`` tokens."""
    return max(1, -(-int(longest) // int(mask.params[0])))  # type: ignore[arg-type]


def _chunked_columns(mask: Mask, n: Ints) -> list[Columns]:
    """Return a slice for each chunk of the longest document; shorter documents have empty ones at the end.

    ``n`` are the document lengths. Raise ValueError if there are more than ``MAX_CHUNKS``.
    """
    size, count = _bounded(mask.params[0]), _chunks(mask, int(n.max(initial=1)))
    if count > MAX_CHUNKS:
        raise ValueError(
            f"chunks of {size} tokens cut a document of {int(n.max())} tokens into {count} slices, more than "
            f"{MAX_CHUNKS}; use larger chunks"
        )
    ends = [np.minimum(size * i, n) for i in range(count + 1)]
    return [(a, b, a, b, -UNBOUNDED, 0) for a, b in pairwise(ends)]


def prefix(tokens: int) -> Mask:
    """Make the mask under which all queries see the first ``tokens`` keys, and the rest is causal."""
    tokens = reach(tokens)
    if tokens < 0:
        raise ValueError(f"prefix needs a length of 0 or more; got {tokens}")
    return Mask("prefix", (tokens,))


def _prefix_columns(mask: Mask, n: Ints) -> list[Columns]:
    """Return two slices for documents of ``n`` tokens: the keys of the prefix, and the causal rest."""
    p = np.minimum(_bounded(mask.params[0]), n)
    return [(0, n, 0, p, -UNBOUNDED, UNBOUNDED), (p, n, p, n, -UNBOUNDED, 0)]


def modality(spans: Iterable[tuple[int, int]], self_only: bool = False) -> Mask:
    """Make the mask of causal text with image spans ``[(start, end), ...]`` of tokens, each without its ``end``.

    A token of an image sees all keys up to the end of its image, or with ``self_only`` only the keys of its image. Text
    sees all keys up to its own. Spans must be ascending and disjoint.
    """
    flat: list[int] = []
    try:
        pairs = [(a, b) for a, b in spans]
    except (TypeError, ValueError) as error:
        raise ValueError(f"spans is a list of (start, end) pairs; got {spans!r}") from error
    for start, end in ((token_count(a), token_count(b)) for a, b in pairs):
        if start < (flat[-1] if flat else 0) or end < start:
            raise ValueError(f"spans must be ascending, disjoint (start, end) pairs; got ({start}, {end}) after {flat}")
        document_length(max(end, 1))  # raises if the span ends beyond the longest supported document
        flat += [start, end]
    return Mask("modality", (tuple(flat), bool(self_only)))


def _modality_columns(mask: Mask, n: Ints) -> list[Columns]:
    """Return slices for documents of ``n`` tokens: a causal one for each stretch of text, and one for each span.

    Raise ValueError if a span ends after a document.
    """
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
    """Return the arguments of :func:`modality` for the params of its mask, which hold the spans as one flat tuple."""
    flat, self_only = params
    return list(zip(flat[::2], flat[1::2], strict=True)), self_only


# --- the table --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TextForm:
    """How a mask is written on a command line: its name, and its numbers after a colon, as in ``lambda:64,4096``.

    ``numbers`` are the types of the numbers. The first ``required`` of them must be given; the others have defaults.
    """

    signature: str
    """The form with letters for the numbers, as help texts show it."""
    example: str
    numbers: tuple[type, ...] = ()
    required: int = 0
    make: Callable[..., Mask] | None = None
    """The function that makes the mask from the numbers, if it is not the mask's public function."""


@dataclass(frozen=True)
class NamedMask:
    """Everything that the code has to know about the masks of one name."""

    make: Callable[..., Mask]
    """The public function that makes the mask."""
    rule: Callable[[Mask, Ints], list[Columns] | Ints]
    """Gives the slices of documents of the given lengths, as columns.

    For a mask that fits one length only, it gives the table ``[slices, 6]`` instead.
    """
    most_slices: Callable[[Mask, int], int]
    """Gives an upper bound on the slices of a document of at most this many tokens; plan files limit memory with it."""
    text: TextForm | None = None
    """None for masks that cannot be given on a command line."""
    arguments: Callable[[tuple[Any, ...]], tuple[Any, ...]] = tuple
    """Gives the arguments of ``make`` for the ``params`` of a mask, which a plan file holds."""


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


SHORT_NAMES = ("causal", "full", "tree", "window")
"""The functions of ``NAMED`` that ``flexcp`` itself exports; the others are only in ``flexcp.masks``."""


def public_name(make: Callable[..., Any]) -> str:
    """Return how users write a function that makes masks: ``flexcp.causal`` or ``flexcp.masks.prefix``."""
    name = getattr(make, "__name__", "causal")
    return f"flexcp.{name}" if name in SHORT_NAMES else f"flexcp.masks.{name}"


def named_mask(name: str) -> NamedMask:
    """Return the entry of :data:`NAMED` for a name; raise ValueError if there is none."""
    if name not in NAMED:
        raise ValueError(f"no mask is called {name!r}; the named ones are {', '.join(NAMED)}")
    return NAMED[name]

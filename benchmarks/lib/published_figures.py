"""Published figures in a file: one JSON object a line, completely validated, so that any user's file can be run.

================  ====================================================================================================
field             content
================  ====================================================================================================
``source``        where the figure is published: paper, table, repository
``system``        the system that was timed
``cluster``       a preset or a measured machine with its size, as in ``h100:4x8``
``heads``         query heads, KV heads and their size: ``[64, 8, 128]``, or ``"64/8/128"``; the size is 128 by default
``lengths``       documents: ``"8x32768"``, ``"web:65536:0"``, ``[4096, 512]``, or a list of such
                  lists; a time is the mean over the batches
``mask``          as ``--mask`` takes it: ``causal``, ``full``, ``window:4096``, ``lambda:64,4096``
``method``        a strategy with its degree, as in ``zigzag:8``; a list stands for the fastest in it
``direction``     ``forward``, ``backward``, ``both`` (of attention alone), or ``step``
``value``         the published number, above 0
``unit``          ``ms``, ``s``, ``iter/s``, ``tokens/s`` or ``TFLOP/s`` (of a GPU), ``MFU`` and ``efficiency``
                  (from 0 to 1), ``ratio``
``over``          for a ratio: the method (or the fastest of a list) whose time is divided by ``method``'s
``kernel``        a measured kernel; by default the analytic cost model
``executor``      ``ring-flash-attention``: what that library does between its kernels is simulated;
                  by default only copies of messages are
``seeds``         how many batches are drawn from a distribution that is named without a seed (default 1)
``scale``         a factor on every document's length; batches keep their tokens
``longest``       documents longer than this are cut
``model``         for a step: the model whose layers surround attention; ``sync`` is ``fsdp``, ``allreduce`` or ``none``
``recompute``     for a step: whether the forward runs once more in the backward
``rules``         how the plan is executed, as in ``{"ahead": 0}``
``stated``        whether the source states the setting; if not, ``assumed`` says what was assumed
``assumed``       what the source leaves open, or what replaces data that is not available
``reason``        why the simulated figure is off, if known
``again``         the number of an earlier line with the same published value, which this line simulates in another
                  way; only the earlier line counts
================  ====================================================================================================

The first ten fields are required. A file with mistakes is refused as a whole, with line, field and remedy for each
mistake.
"""

from __future__ import annotations

import difflib
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from flexcp.io.json_files import json_line
from flexcp.models.find import find_model
from flexcp.shape import Shape
from lib.published_fields import PARSERS, WORDS, Batches, distribution, short
from published_merges import METHODS, is_step_by_step
from published_parameters import place

ATTENTION_ONLY = ("TFLOP/s", "MFU", "efficiency")


@dataclass(frozen=True)
class Figure:
    """One published figure with its setting."""

    source: str
    system: str
    cluster: str
    heads: tuple[int, int, int]
    lengths: str | Batches
    mask: str
    method: tuple[str, ...]
    direction: Literal["forward", "backward", "both", "step"]
    value: float
    unit: str
    over: tuple[str, ...] = ()
    kernel: str | None = None
    executor: str | None = None
    seeds: int = 1
    scale: float = 1.0
    longest: int | None = None
    model: str | None = None
    sync: Literal["fsdp", "allreduce", "none"] = "fsdp"
    recompute: bool = False
    rules: tuple[tuple[str, int], ...] = ()
    stated: bool = True
    assumed: str = ""
    reason: str = ""
    again: int | None = None

    @property
    def shape(self) -> Shape:
        heads, kv_heads, size = self.heads
        return Shape(heads, kv_heads, size, size)

    @property
    def setting(self) -> tuple[object, ...]:
        """The fields that figures share if they differ only in system and method."""
        where = (self.cluster, self.heads, self.lengths, self.seeds, self.scale, self.longest, self.mask)
        return (*where, self.direction, self.unit, self.model, self.sync, self.recompute)

    @property
    def is_drawn(self) -> bool:
        """Whether its lengths are a distribution without a seed."""
        return isinstance(self.lengths, str) and distribution(self.lengths) is not None


class FiguresError(ValueError):
    """All mistakes of a file, one per line."""


def read_figures(path: Path | str) -> list[tuple[int, Figure]]:
    """Read the figures of a file with their line numbers; raises :class:`FiguresError` with all mistakes."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise FiguresError(f"cannot read figures from {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise FiguresError(f"{path} is not a text file; it should hold one JSON object a line") from None
    found, mistakes = [], []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            found.append((number, parse_figure(json_line(line, "it"))))
        except ValueError as error:
            mistakes += [f"{path}, line {number}: {each}" for each in str(error).splitlines()]
    mistakes += _wrong_again(path, dict(found))
    if mistakes:
        raise FiguresError("\n".join(mistakes))
    if not found:
        raise FiguresError(f"{path} holds no figures; it should hold one JSON object a line")
    return found


def _wrong_again(path: Path | str, figures: dict[int, Figure]) -> list[str]:
    """Return messages for ``again`` fields that name no earlier figure with the same value,
    or one that repeats another.
    """
    found = []
    for number, figure in figures.items():
        first = figures.get(figure.again) if figure.again is not None and figure.again < number else None
        known = first is not None and first.again is None and (first.value, first.unit) == (figure.value, figure.unit)
        if figure.again is not None and not known:
            found.append(
                f"{path}, line {number}: field 'again': line {figure.again} is no earlier figure of {figure.value:g} "
                f"{figure.unit}; name the line that has this published value first, or drop it"
            )
    return found


def parse_figure(values: Any) -> Figure:
    """Parse the figure of one line; a ValueError has a line for each wrong field."""
    if not isinstance(values, dict):
        raise ValueError(f'a figure is a JSON object with fields, as in {{"source": ...}}; got {short(values)}')
    names = [f.name for f in fields(Figure)]
    mistakes = [_unknown(name, names) for name in values if name not in names]
    needed = [f.name for f in fields(Figure) if f.default is MISSING]
    mistakes += [f"field {name!r} is missing; {WORDS[name]}" for name in needed if name not in values]
    parsed: dict[str, Any] = {}
    for name in names:
        if name in values:
            try:
                parsed[name] = PARSERS[name](values[name])
            except ValueError as error:
                mistakes.append(f"field {name!r}: {error}")
    if mistakes:
        raise ValueError("\n".join(mistakes))
    figure = Figure(**parsed)
    _check_together(figure)
    return figure


def _check_together(figure: Figure) -> None:
    """Raise ValueError with a line for each combination of fields that do not fit together."""
    checks: list[tuple[bool, str]] = [
        (
            figure.direction == "step" and figure.model is None,
            "field 'model' is missing: a step needs one, as in llama3-8b",
        ),
        (
            figure.direction != "step" and figure.recompute,
            "field 'recompute' is of a step; drop it, or say direction step",
        ),
        (
            figure.direction == "step" and figure.unit in ATTENTION_ONLY,
            f"field 'unit': {figure.unit} is of attention alone; give a step in s, ms, iter/s, tokens/s or ratio",
        ),
        (
            figure.direction == "both" and figure.unit == "TFLOP/s",
            "field 'unit': TFLOP/s are of one direction; give forward or backward, or both in ms or iter/s",
        ),
        (
            figure.executor is not None and any(not is_step_by_step(m) for m in (*figure.method, *figure.over)),
            f"field 'executor': {figure.executor} is simulated with {' or '.join(METHODS)} and a degree, as in "
            "zigzag:8; drop it",
        ),
        (figure.unit == "ratio" and not figure.over, "field 'over' is missing: a ratio needs the method it is over"),
        (figure.unit != "ratio" and bool(figure.over), "field 'over' is of a ratio; drop it, or say unit ratio"),
        (
            figure.unit in ("MFU", "efficiency") and figure.value > 1,
            f"field 'value': {figure.unit} is a share from 0 to 1; got {figure.value:g}; 93 % is 0.93",
        ),
        (
            not figure.stated and not figure.assumed,
            "field 'assumed' is missing: say what was taken for what is not stated",
        ),
        (
            figure.seeds > 1 and not figure.is_drawn,
            "field 'seeds': these lengths are not drawn; "
            "drop it, or name a distribution without its seed, as in web:65536",
        ),
        (
            figure.scale != 1 and not figure.is_drawn,
            "field 'scale': only a distribution without its seed is scaled, "
            "as in longalign:131072; scale the lengths yourself",
        ),
    ]
    mistakes = [words for wrong, words in checks if wrong]
    try:
        place(figure.cluster, figure.kernel)
    except ValueError as error:
        mistakes.append(f"field 'kernel': {error}")
    if figure.model is not None and find_model(figure.model).shape != figure.shape:
        own = find_model(figure.model).shape
        mistakes.append(
            f"field 'heads': {figure.model} has {own.heads} / {own.kv_heads} heads of {own.head_dim}; got "
            f"{list(figure.heads)}"
        )
    if mistakes:
        raise ValueError("\n".join(mistakes))


def _unknown(name: str, names: list[str]) -> str:
    close = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"field {name!r} is not known: {hint}fields are {', '.join(names)}"

"""The fields of a published figure: what each may hold, and the messages for wrong values
(:mod:`lib.published_figures` describes the format).
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from flexcp.batch import make_batch
from flexcp.data.lengths import DISTRIBUTIONS, parse_count, parse_lengths
from flexcp.masks import Mask, causal
from flexcp.masks.text import parse_mask
from flexcp.models.find import find_model
from flexcp.planners.strategies import find_strategy
from flexcp.shape import Shape
from flexcp.simulator.passes import Rules
from published_parameters import place

Batches = tuple[tuple[int, ...], ...]
DIRECTIONS = ("forward", "backward", "both", "step")
RATES = ("iter/s", "tokens/s", "TFLOP/s", "MFU", "efficiency", "ratio")
"""Units in which more is faster."""
UNITS = ("ms", "s", *RATES)
EXECUTORS = ("ring-flash-attention",)
"""Libraries whose work between kernels has prices (:mod:`published_merges`)."""
SYNCS = ("fsdp", "allreduce", "none")
MOST_SEEDS = 100
MOST_TOKENS = 1 << 28
MOST_RANKS = 4096
MOST_LINES = 1_000_000


def distribution(text: str) -> tuple[str, int] | None:
    """Return the name and the tokens of a distribution that is given without a seed, or None."""
    name, _, tail = text.partition(":")
    if name not in DISTRIBUTIONS or not tail or ":" in tail:
        return None
    try:
        return name, parse_count(tail)
    except ValueError:
        return None


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"it is a text that is not empty; got {short(value)}")
    return value


def _cluster(value: Any) -> str:
    found, _, _ = place(_text(value), None)
    if found.ranks > MOST_RANKS:
        raise ValueError(f"{value} has {found.ranks:,} ranks; at most {MOST_RANKS:,} are simulated")
    return str(value)


def _heads(value: Any) -> tuple[int, int, int]:
    words = "write query heads, KV heads and their size, as in [64, 8, 128]"
    if isinstance(value, str):
        parts = value.split("/")
        value = [int(p) for p in parts] if all(p.strip().isdigit() for p in parts) else None
    if not isinstance(value, list) or len(value) not in (2, 3) or not all(_is_count(n) for n in value):
        raise ValueError(f"it is {short(value)}; {words}")
    heads, kv_heads, size = (*value, 128)[:3]
    Shape(heads, kv_heads, size, size)
    return heads, kv_heads, size


def _lengths(value: Any) -> str | Batches:
    if isinstance(value, str):
        drawn = distribution(":".join(value.split(":")[:2]))
        if drawn is not None and drawn[1] > MOST_TOKENS:  # before it is drawn
            raise ValueError(f"a batch has {drawn[1]:,} tokens; at most {MOST_TOKENS:,} are simulated")
        _check_batch(parse_lengths(value))
        return value
    batches = value if isinstance(value, list) and value and all(isinstance(b, list) for b in value) else [value]
    for batch in batches:
        if not isinstance(batch, list) or not batch or not all(_is_count(n) for n in batch):
            raise ValueError(
                f"it is {short(value)}; write 8x32768, web:65536, a list of token counts, or a list of such lists"
            )
        _check_batch(batch)
    return tuple(tuple(b) for b in batches)


def _check_batch(lengths: list[int]) -> None:
    if sum(lengths) > MOST_TOKENS:
        raise ValueError(f"a batch has {sum(lengths):,} tokens; at most {MOST_TOKENS:,} are simulated")
    make_batch(lengths, causal())


def _mask(value: Any) -> str:
    found = parse_mask(_text(value))
    if not isinstance(found, Mask):
        raise ValueError(f"one mask for all documents is taken, as in causal; {value!r} has one for each")
    return str(value)


def _methods(value: Any) -> tuple[str, ...]:
    listed = value if isinstance(value, list) else [value]
    if not listed:
        raise ValueError("it is empty; name a strategy, as in zigzag:8")
    for each in listed:
        find_strategy(each)
    return tuple(listed)


def _number(value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value) or value <= 0:
        raise ValueError(f"it is a number above 0; got {short(value)}")
    return float(value)


def _count(most: int) -> Callable[[Any], int]:
    def parse(value: Any) -> int:
        if not _is_count(value) or value > most:
            raise ValueError(f"it is a whole number from 1 to {most:,}; got {short(value)}")
        return int(value)

    return parse


def _one_of(choices: tuple[str, ...]) -> Callable[[Any], str]:
    def parse(value: Any) -> str:
        if value not in choices:
            close = difflib.get_close_matches(str(value), choices, n=1, cutoff=0.4)
            hint = f"did you mean {close[0]!r}? " if close else ""
            raise ValueError(f"{short(value)} is not known: {hint}known are {', '.join(choices)}")
        return str(value)

    return parse


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"it is true or false; got {short(value)}")
    return value


def _model(value: Any) -> str:
    find_model(_text(value))
    return str(value)


LEAST = {"ranks_per_nic": 1, "rounds_per_call": 0, "ahead": 0}
"""Rules that are numbers, with the least value of each; the others are true or false."""


def _rules(value: Any) -> tuple[tuple[str, int], ...]:
    known = [f.name for f in fields(Rules)]
    if not isinstance(value, dict):
        raise ValueError(f'it is an object, as in {{"ahead": 0}}; got {short(value)}')
    for name, setting in value.items():
        if name not in known:
            raise ValueError(f"{name!r} is no rule; rules are {', '.join(known)}")
        if name not in LEAST and type(setting) is not bool:
            raise ValueError(f"{name} is true or false; got {short(setting)}")
        if name in LEAST and (type(setting) is not int or setting < LEAST[name]):
            raise ValueError(f"{name} is a whole number of at least {LEAST[name]}; got {short(setting)}")
    return tuple(sorted(value.items()))


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


PARSERS: dict[str, Callable[[Any], Any]] = {
    "source": _text,
    "system": _text,
    "cluster": _cluster,
    "heads": _heads,
    "lengths": _lengths,
    "mask": _mask,
    "method": _methods,
    "direction": _one_of(DIRECTIONS),
    "value": _number,
    "unit": _one_of(UNITS),
    "over": _methods,
    "kernel": _text,
    "executor": _one_of(EXECUTORS),
    "seeds": _count(MOST_SEEDS),
    "scale": _number,
    "longest": _count(MOST_TOKENS),
    "model": _model,
    "sync": _one_of(SYNCS),
    "recompute": _flag,
    "rules": _rules,
    "stated": _flag,
    "assumed": _text,
    "reason": _text,
    "again": _count(MOST_LINES),
}
WORDS = {
    "source": "say where the figure is published",
    "system": "say whose time it is",
    "cluster": "name a preset with its size, as in h100:4x8",
    "heads": "write query heads, KV heads and their size, as in [64, 8, 128]",
    "lengths": "write 8x32768, web:65536, or a list of token counts",
    "mask": "write causal, full, window:4096 or another mask",
    "method": "name a strategy, as in zigzag:8",
    "direction": f"write one of {', '.join(DIRECTIONS)}",
    "value": "give the published number",
    "unit": f"write one of {', '.join(UNITS)}",
}

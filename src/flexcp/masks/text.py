"""Text: masks as a command line and a file say them."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from pathlib import Path

from flexcp.io.json_files import read_json
from flexcp.masks.conversions import from_slices
from flexcp.masks.mask import Mask, token_count
from flexcp.masks.named import causal, causal_blockwise, full, lambda_, prefix, shared_question, window

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
    form = '{"documents": [{"length": n, "slices": [[q0, q1, k0, k1, lo, hi], ...]}, ...]}'
    content = read_json(path, "mask file", f"it must hold {form}")
    try:
        documents = content["documents"]
        pairs = [
            (token_count(d["length"]), [[None if x is None else token_count(x) for x in row] for row in d["slices"]])
            for d in documents
        ]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"mask file {path} must hold {form}: {error!r}") from None
    try:
        return [from_slices(n, slices) for n, slices in pairs]
    except ValueError as error:
        raise ValueError(f"mask file {path}: {error}") from None

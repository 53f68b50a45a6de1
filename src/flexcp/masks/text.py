"""Text: read masks from the text forms of a command line (``window:4096``) and from JSON files of slices."""

from __future__ import annotations

import difflib
from pathlib import Path

from flexcp.io.json_files import read_json
from flexcp.masks.conversions import from_slices
from flexcp.masks.mask import Mask, token_count
from flexcp.masks.named import NAMED

_FORMS = {name: kind.text for name, kind in NAMED.items() if kind.text}
MASK_FORMS = ", ".join([*(form.example for form in _FORMS.values()), "@mask.json"])
"""An example of every text form, for error messages."""
MASK_SIGNATURES = ", ".join([*(form.signature for form in _FORMS.values()), "@mask.json"])
"""Every text form with letters for the numbers, for help texts."""


def parse_mask(text: str) -> Mask | list[Mask]:
    """Make a mask from its text form (see ``MASK_FORMS``); ``@file.json`` gives a list with one mask per document.

    Raise ValueError if the text is no known form.
    """
    if text.startswith("@"):
        return _from_json(Path(text[1:]))
    name, _, tail = text.partition(":")
    form = _FORMS.get(name)
    if form is None:
        close = difflib.get_close_matches(name, _FORMS, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ValueError(f"unknown mask {text!r}: {hint}known forms are {MASK_FORMS}")
    given = tail.split(",") if tail else []
    if not form.required <= len(given) <= len(form.numbers):
        raise ValueError(
            f"mask {text!r} takes {len(form.numbers)} number(s) after the colon; known forms are {MASK_FORMS}"
        )
    try:
        numbers = [kind(x) for kind, x in zip(form.numbers, given, strict=False)]
    except ValueError:
        raise ValueError(f"mask {text!r}: {tail!r} is not a list of numbers; known forms are {MASK_FORMS}") from None
    return (form.make or NAMED[name].make)(*numbers)


def _from_json(path: Path) -> list[Mask]:
    """Read a JSON file with the length and the slices of each document; return one mask per document.

    Raise ValueError if the file has another form.
    """
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

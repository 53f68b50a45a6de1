"""JSON files: read JSON from users, with one-line errors that name the file.

JSON allows values that no reader here can use: nesting deeper than Python's stack, numbers like 1e400 that become
infinite, NaN, and integers of thousands of digits. :func:`read_json` refuses them when it reads a file;
:func:`json_line` always refuses the first and the others if asked.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

LARGEST = 2**63 - 1
"""The largest magnitude of an integer in a file."""


def read_json(path: Path | str, what: str, hint: str) -> Any:
    """Return the value in a JSON file, or raise ValueError if it cannot be read or used.

    The error names the file and says why it is no ``what`` (such as "cost model"). Unless the file could not be opened,
    it ends with ``hint``, which says what to do.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")  # some editors begin a file with a byte order mark
    except OSError as error:
        raise ValueError(f"cannot read a {what} from {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path} is no {what}: it is not a text file; {hint}") from None
    try:
        return json.loads(text, parse_int=_integer, parse_float=_number, parse_constant=_constant)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no {what}: {complaint(error)}; {hint}") from None


def json_line(line: str, where: str, checked: bool = False) -> Any:
    """Return the value of a JSON text, such as one line of a file, or raise a ValueError that begins with ``where``.

    ``where`` says where the text is from. Numbers that no reader can use (NaN, infinities, integers beyond 64 bits) are
    refused only if they are ``checked``, because most files have fields that are not used.
    """
    try:
        if checked:
            return json.loads(line, parse_int=_integer, parse_float=_number, parse_constant=_constant)
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: {complaint(error)}") from None


def complaint(error: ValueError | RecursionError) -> str:
    """Describe in a few words why a text is no usable JSON."""
    if isinstance(error, RecursionError):
        return "it is nested too deep"
    if isinstance(error, json.JSONDecodeError):
        line = f"line {error.lineno}, " if "\n" in error.doc else ""
        return f"not JSON, or cut off ({error.msg} in {line}column {error.colno})"
    return str(error)


def _integer(digits: str) -> int:
    """Return an integer of a JSON text, or raise ValueError if it does not fit 64 bits."""
    if len(digits) > 20 or abs(int(digits)) > LARGEST:
        raise ValueError(f"the number {_short(digits)} is too large")
    return int(digits)


def _number(digits: str) -> float:
    """Return a floating-point number of a JSON text, or raise ValueError if it is infinite."""
    found = float(digits)
    if not math.isfinite(found):
        raise ValueError(f"the number {_short(digits)} is too large")
    return found


def _constant(name: str) -> float:
    """Raise ValueError for NaN and infinities in a JSON text."""
    raise ValueError(f"{name} is no number")


def _short(digits: str) -> str:
    """Return the digits of a number for an error message, cut off if there are many."""
    return digits if len(digits) <= 24 else f"{digits[:20]}..."

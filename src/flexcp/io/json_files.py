"""JSON files: what a user hands over as JSON, read with one line of complaint that names the file.

JSON allows what no reader here can use: nesting deeper than Python's stack, numbers like 1e400 that become infinite,
NaN, integers of thousands of digits. Each is refused where it is read, not where it would be computed with.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

LARGEST = 2**63 - 1


def read_json(path: Path | str, what: str, hint: str) -> Any:
    """The value in a JSON file; ValueError names the file, says why it is no ``what``,
    and gives the way out, ``hint``.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"cannot read a {what} from {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path} is no {what}: it is not a text file; {hint}") from None
    try:
        return json.loads(text, parse_int=_integer, parse_float=_number, parse_constant=_constant)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no {what}: {complaint(error)}; {hint}") from None


def json_line(line: str, where: str) -> Any:
    """The value in one line of a file of many, or in a text of someone else's; ValueError says where.

    Numbers are not looked at: most fields are not ours.
    """
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is no JSON: {complaint(error)}") from None


def complaint(error: ValueError | RecursionError) -> str:
    """What is wrong with a text, short."""
    if isinstance(error, RecursionError):
        return "it is nested too deep"
    if isinstance(error, json.JSONDecodeError):
        return f"not JSON, or cut off ({error.msg} in line {error.lineno}, column {error.colno})"
    return str(error)


def _integer(digits: str) -> int:
    if len(digits) > 20 or abs(int(digits)) > LARGEST:
        raise ValueError(f"the number {_short(digits)} is too large")
    return int(digits)


def _number(digits: str) -> float:
    found = float(digits)
    if not math.isfinite(found):
        raise ValueError(f"the number {_short(digits)} is too large")
    return found


def _constant(name: str) -> float:
    raise ValueError(f"{name} is no number")


def _short(digits: str) -> str:
    return digits if len(digits) <= 24 else f"{digits[:20]}..."

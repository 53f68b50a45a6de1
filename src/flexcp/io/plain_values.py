"""Plain values: check the types of values from JSON that is not trusted; all errors are ValueErrors.

``what`` names a value in errors.
"""

from __future__ import annotations

from typing import Any

from flexcp.io.terminal_text import visible

MAX_NUMBER = 1 << 62
"""Integers must be below this in magnitude."""


def small_integer(text: str) -> int:
    """Return an integer of a JSON text, or raise ValueError if it is not below ``MAX_NUMBER`` in magnitude."""
    if len(text) > 20 or not -MAX_NUMBER < (value := int(text)) < MAX_NUMBER:
        raise ValueError(f"the number {text[:24]} is too large")
    return value


def refuse_constant(text: str) -> float:
    """Raise ValueError for NaN and infinities, which the JSON of a plan never contains."""
    raise ValueError(f"{text} is not a number")


def integer(value: Any, what: str) -> int:
    """Return ``value``, or raise a ValueError that names it ``what`` if it is no integer."""
    if type(value) is not int:
        raise ValueError(f"{what} must be a whole number; got {_short(value)}")
    return value


def text(value: Any, what: str) -> str:
    """Return ``value``, or raise a ValueError that names it ``what`` if it is no text."""
    if not isinstance(value, str):
        raise ValueError(f"{what} must be a text; got {_short(value)}")
    return value


def flag(value: Any, what: str) -> bool:
    """Return ``value``, or raise a ValueError that names it ``what`` if it is neither true nor false."""
    if not isinstance(value, bool):
        raise ValueError(f"{what} must be true or false; got {_short(value)}")
    return value


def items(value: Any, what: str) -> list[Any]:
    """Return ``value``, or raise a ValueError that names it ``what`` if it is no list."""
    if not isinstance(value, list):
        raise ValueError(f"{what} must be a list; got {_short(value)}")
    return value


def mapping(value: Any, what: str) -> dict[str, Any]:
    """Return ``value``, or raise a ValueError that names it ``what`` if it is no JSON object."""
    if not isinstance(value, dict):
        raise ValueError(f"{what} must be an object; got {_short(value)}")
    return value


def shown(value: Any, most: int = 80) -> str:
    """Return the ``repr`` of a value from a user or a file for an error message, cut off after ``most`` characters."""
    try:
        words = repr(value)
    except (ValueError, RecursionError):  # for a number of thousands of digits, or deeply nested lists
        return f"a {type(value).__name__} too large to show"
    return words if len(words) <= most else f"{words[:most]}..."


def shown_names(record: dict[str, Any]) -> str:
    """Return the names of an object's first fields for an error message, each cut off if it is long."""
    return ", ".join(visible(name[:40]) for name in list(record)[:8]) or "no field"


def _short(value: Any) -> str:
    """Return the type and the beginning of a value, enough to recognize it in an error message."""
    return f"{type(value).__name__} {str(value)[:40] if isinstance(value, str | int | float) else ''}".strip()

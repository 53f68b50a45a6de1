"""Plain values: what JSON of an unknown hand holds, each refused unless it is of the kind that was asked for."""

from __future__ import annotations

from typing import Any

MAX_NUMBER = 1 << 62


def small_integer(text: str) -> int:
    """A whole number of a JSON text, short of what 64 bits hold."""
    if len(text) > 20 or not -MAX_NUMBER < (value := int(text)) < MAX_NUMBER:
        raise ValueError(f"the number {text[:24]} is too large")
    return value


def refuse_constant(text: str) -> float:
    """NaN and infinities, which JSON of a plan never has."""
    raise ValueError(f"{text} is not a number")


def integer(value: Any, what: str) -> int:
    """A whole number."""
    if type(value) is not int:
        raise ValueError(f"{what} must be a whole number; got {_short(value)}")
    return value


def text(value: Any, what: str) -> str:
    """A text."""
    if not isinstance(value, str):
        raise ValueError(f"{what} must be a text; got {_short(value)}")
    return value


def flag(value: Any, what: str) -> bool:
    """True or false."""
    if not isinstance(value, bool):
        raise ValueError(f"{what} must be true or false; got {_short(value)}")
    return value


def items(value: Any, what: str) -> list[Any]:
    """A list."""
    if not isinstance(value, list):
        raise ValueError(f"{what} must be a list; got {_short(value)}")
    return value


def mapping(value: Any, what: str) -> dict[str, Any]:
    """A JSON object."""
    if not isinstance(value, dict):
        raise ValueError(f"{what} must be an object; got {_short(value)}")
    return value


def shown(value: Any, most: int = 80) -> str:
    """A value as Python writes it, cut off where it is long: for messages about what somebody else wrote."""
    try:
        words = repr(value)
    except (ValueError, RecursionError):  # a number of thousands of digits, lists inside lists
        return f"a {type(value).__name__} too large to show"
    return words if len(words) <= most else f"{words[:most]}..."


def _short(value: Any) -> str:
    """Enough of a value to recognise it, however large it is."""
    return f"{type(value).__name__} {str(value)[:40] if isinstance(value, str | int | float) else ''}".strip()

"""Setting checks: refuse values of a wrong kind where settings are made.

A flag, count or time of a wrong kind would otherwise have a meaning that was not intended (``shuffle="no"`` would
shuffle), or fail in the middle of a run. Each function raises ValueError with the setting's name, what it is for and
what was given. NumPy's integers and booleans are taken like Python's.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from flexcp.io.plain_values import shown

MOST_SECONDS = 10_000_000
"""The most seconds of a time limit, a third of a year; neither torch's stores nor Python's waits take infinity."""


def check_whole(name: str, value: object, what: str, least: int | None = None) -> None:
    """Raise ValueError unless the setting ``name`` is a whole number, of at least ``least`` if that is given.

    ``what`` describes the setting, for the message.
    """
    if not isinstance(value, int | np.integer) or isinstance(value, bool) or (least is not None and value < least):
        raise ValueError(f"{name} is {what}; got {shown(value)}")


def check_flag(name: str, value: object, *others: object) -> None:
    """Raise ValueError unless the setting ``name`` is True, False or one of ``others``."""
    if not isinstance(value, bool | np.bool_) and not any(value is other for other in others):
        *first, last = map(str, (True, False, *others))
        raise ValueError(f"{name} is {', '.join(first)} or {last}; got {shown(value)}")


def is_seconds(value: object) -> bool:
    """Return whether a value is a number of seconds that a wait can take."""
    kinds = int | float | np.integer | np.floating
    return isinstance(value, kinds) and not isinstance(value, bool) and bool(0 < value <= MOST_SECONDS)


def check_seconds(name: str, value: object, instead: str = "") -> None:
    """Raise ValueError unless the setting ``name`` is a number of seconds that a wait can take.

    ``instead`` is an end for the message, such as what to pass for no limit.
    """
    if not is_seconds(value):
        given = shown(value)
        raise ValueError(f"{name} is a number of seconds above 0 and at most {MOST_SECONDS:,}; got {given}{instead}")


def check_mapping(name: str, value: object, example: str) -> None:
    """Raise ValueError unless the setting ``name`` is a mapping or None; ``example`` is one, for the message."""
    if value is not None and not isinstance(value, Mapping):
        raise ValueError(f"{name} is a mapping such as {example}; got {shown(value)}")

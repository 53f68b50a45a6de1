"""Setting checks: refuse values of a wrong kind when a Loader and its settings are made.

A flag, count or name of a wrong kind would otherwise have a meaning that was not intended (``shuffle="no"`` would
shuffle), or fail in the middle of an epoch. Each function raises ValueError with the argument's name, what it is for
and what was given. NumPy's integers and booleans are taken like Python's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from flexcp.executor.arguments import MOST_SECONDS, named_kind


def check_whole(name: str, value: object, what: str, least: int | None = None) -> None:
    """Raise ValueError unless the argument ``name`` is a whole number, of at least ``least`` if that is given.

    ``what`` describes the argument, for the message.
    """
    if not isinstance(value, int | np.integer) or isinstance(value, bool) or (least is not None and value < least):
        raise ValueError(f"{name} is {what}; got {named_kind(value)}")


def check_tokens(name: str, value: object) -> None:
    """Raise ValueError unless the argument ``name`` is a whole number; it may be 0 or negative."""
    check_whole(name, value, "a whole number of tokens")


def check_flag(name: str, value: object, *others: object) -> None:
    """Raise ValueError unless the argument ``name`` is True, False or one of ``others``."""
    if not isinstance(value, bool | np.bool_) and not any(value is other for other in others):
        either = "".join(f", or {other}" for other in others)
        raise ValueError(f"{name} is True or False{either}; got {named_kind(value)}")


def check_field(name: str, value: object) -> None:
    """Raise ValueError unless the argument ``name`` is the name of a field of samples, or None."""
    if value is not None and not isinstance(value, str):
        raise ValueError(f"{name} is the name of a field of the samples, or None; got {named_kind(value)}")


def check_fields(name: str, value: object) -> None:
    """Raise ValueError unless the argument ``name`` is a collection of names of fields."""
    if isinstance(value, str):
        raise ValueError(f"{name} is a list of names of fields; got {value!r}: write {name}=[{value!r}]")
    if not isinstance(value, Sequence | set | frozenset) or not all(isinstance(x, str) for x in value):
        given = f"{value!r}" if isinstance(value, list | tuple) else named_kind(value)
        raise ValueError(f"{name} is a list of names of fields of the samples; got {given}")


def check_token_id(name: str, value: object, what: str) -> None:
    """Raise ValueError unless the argument ``name`` is a whole number of 64 bits; for None, say that any id will do.

    Tokenizers without a padding token have the id None for it.
    """
    if value is None:
        raise ValueError(f"{name} is {what}; got None: pass a number, such as the id of the end-of-text token")
    check_whole(name, value, what)
    if isinstance(value, int) and value.bit_length() > 63:
        raise ValueError(f"{name} is {what} of 64 bits; got {value}")


def check_seconds(name: str, value: object) -> None:
    """Raise ValueError unless the argument ``name`` is a number of seconds that a wait can take."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= MOST_SECONDS:
        raise ValueError(f"{name} is a number of seconds above 0 and at most {MOST_SECONDS:,}; got {named_kind(value)}")


def check_mapping(name: str, value: object, example: str) -> None:
    """Raise ValueError unless the argument ``name`` is a mapping or None; ``example`` is one for the message."""
    if value is not None and not isinstance(value, Mapping):
        raise ValueError(f"{name} is a mapping such as {example}; got {named_kind(value)}")

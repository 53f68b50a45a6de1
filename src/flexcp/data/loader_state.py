"""Loader state: check a state before a loader uses it, because a checkpoint may be damaged or of another object."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flexcp.io.plain_values import shown

FORMAT = "flexcp-loader-1"
PLACES = ("epoch", "place", "step")
"""The fields of a state that say where the loader is, each a count."""
LARGEST = 1 << 62


def check_state(state: Mapping[str, Any]) -> None:
    """Raise ValueError if ``state`` is no loader state of this version, lacks a field, or is not at a possible place.

    The state of the dataset in it (``source``) is not checked.
    """
    if state.get("format") != FORMAT:
        raise ValueError(
            f"this is no state of a flexcp Loader of this version: its format is {shown(state.get('format'))}"
        )
    missing = [name for name in (*PLACES, "shuffle", "seed", "samples", "source") if name not in state]
    if missing:
        raise ValueError(
            f"this state of a Loader is damaged: it has no {missing[0]!r}; load the one that state_dict() gave"
        )
    for name in PLACES:
        if type(state[name]) is not int or not 0 <= state[name] < LARGEST:
            raise ValueError(
                f"this state of a Loader is damaged: its {name} is {shown(state[name])}; load the one that "
                "state_dict() gave"
            )

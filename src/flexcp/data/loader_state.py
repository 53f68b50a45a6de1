"""Loader state: what a state must hold, whoever saved it. A checkpoint may be cut off, edited, or of something else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flexcp.io.plain_values import shown

FORMAT = "flexcp-loader-1"
PLACES = ("epoch", "place", "step")
"""Where a loader is, in counts."""
LARGEST = 1 << 62


def check_state(state: Mapping[str, Any]) -> None:
    """ValueError for what is no state of this version, or one that lacks something."""
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

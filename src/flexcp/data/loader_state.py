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


def check_stream_state(state: Any) -> None:
    """Raise ValueError if ``state`` is not the state of a stream with ``state_dict`` (see ``reading/read_source.py``).

    The stream's own state in it, and the samples, are not checked.
    """
    wanted: dict[str, type] = {"begun": bool}
    if isinstance(state, Mapping) and state.get("begun") is True:
        wanted |= {"pending": list, "rest": list, "next": int, "ended": bool}
    missing = [name for name in ("stream", *wanted) if not isinstance(state, Mapping) or name not in state]
    wrong = [name for name, kind in wanted.items() if name not in missing and type(state[name]) is not kind]
    if missing or wrong:
        what = f"has no {missing[0]!r}" if missing else f"has {shown(state[wrong[0]])} as {wrong[0]!r}"
        raise ValueError(
            f"this state of a Loader is damaged: its 'source' {what}; load the one that state_dict() gave on rank 0"
        )
    if not state["begun"]:
        return
    pending, after = state["pending"], state["next"]
    places = [entry[0] for entry in pending if isinstance(entry, tuple | list) and len(entry) == 2]
    if places != list(range(after - len(pending), after)):
        raise ValueError(
            f"this state of a Loader is damaged: the 'pending' samples of its 'source' are not the {len(pending)} "
            f"before sample {after}, one after the other; load the one that state_dict() gave on rank 0"
        )

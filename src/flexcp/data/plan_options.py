"""Plan options: what a user gives the Loader for the planner's calls, checked by name when the Loader is made.

Plans are made later and in other processes, where a wrong name would be an error of the planner's call at the first step.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping
from typing import Any

from flexcp.data.planning_pool import PlannerLike

OF_THE_LOADER = ("lengths", "mask", "masks")
"""Arguments of a planner's call that the loader gives itself."""


def check_options(planner: PlannerLike, options: Mapping[str, Any]) -> None:
    """Raise for names that no call of the planner takes; a planner that does not say what it takes is not asked."""
    try:
        parameters = inspect.signature(planner).parameters
    except (TypeError, ValueError):
        return
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return
    known = [name for name in parameters if name not in OF_THE_LOADER]
    for name in options:
        if name in known:
            continue
        close = difflib.get_close_matches(name, known, n=1)
        way = f"; did you mean {close[0]!r}?" if close else ""
        if name in OF_THE_LOADER or name in inspect.signature(type(planner)).parameters:
            way = f"; give {name}= to the {'Loader' if name in OF_THE_LOADER else type(planner).__name__} itself"
        raise ValueError(f"plan_options={{{name!r}: ...}} names no option of a plan: they are {', '.join(known)}{way}")

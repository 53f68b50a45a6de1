"""Plan options: check the names in the Loader's ``plan_options`` when it is made.

Plans are made later and in other processes, where a wrong name would only be an error of the first planner call.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping
from typing import Any

from flexcp.data.planning.plan_orders import PlannerLike

OF_THE_LOADER = ("lengths", "mask", "masks")
"""The arguments of a planner's call that the loader passes itself."""


def check_options(planner: PlannerLike, options: Mapping[str, Any]) -> None:
    """Raise ValueError if an option is no argument of the planner's call, or one that the loader passes itself.

    A planner without a known signature, or with ``**`` arguments, is not checked.
    """
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


def check_micro_batches(planner: PlannerLike, options: Mapping[str, Any]) -> None:
    """Raise ValueError if the planner has no method ``micro_batches``, or that does not take one of the options.

    Also raise ValueError if the planner has no cap (``max_tokens_per_rank`` or ``max_memory_per_rank``).
    """
    cut = getattr(planner, "micro_batches", None)
    if cut is None:
        raise ValueError(
            f"micro_batches=True needs a planner with a method micro_batches, such as flexcp.Planner; got {planner!r}"
        )
    caps = ("max_tokens_per_rank", "max_memory_per_rank")
    if all(getattr(planner, name, None) is None for name in caps):
        raise ValueError(
            f"micro_batches=True needs a cap: make the Planner with {' or '.join(f'{c}=...' for c in caps)}"
        )
    known = [name for name in inspect.signature(cut).parameters if name not in OF_THE_LOADER]
    for name in options:
        if name not in known:
            raise ValueError(
                f"plan_options={{{name!r}: ...}} does not go with micro_batches=True, which takes {', '.join(known)}; "
                "drop one of them"
            )

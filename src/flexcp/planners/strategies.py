"""Strategies: named planners. A strategy is a function from a :class:`Request` to a :class:`~flexcp.plan.placement.Placement`."""

from __future__ import annotations

import difflib
from collections.abc import Callable

from flexcp.plan.placement import Placement
from flexcp.planners import published
from flexcp.planners.auto import auto
from flexcp.planners.blocks.blocks import blocks
from flexcp.planners.groups.groups import groups
from flexcp.planners.request import Request
from flexcp.planners.static import static


def _hypergraph(request: Request) -> Placement:
    """Loaded when asked for: it is the largest strategy and the one least often used."""
    from flexcp.planners.hypergraph.hypergraph import hypergraph

    return hypergraph(request)


STRATEGIES: dict[str, Callable[[Request], Placement]] = {
    "auto": auto,
    "dp": static.dp,
    "ring": static.ring,
    "zigzag": static.zigzag,
    "allgather": static.allgather,
    "ulysses": static.ulysses,
    "usp": static.usp,
    "blocks": blocks,
    "groups": groups,
    "hypergraph": _hypergraph,
    "minheap": published.minheap,
    "pow2": published.pow2,
    "hdp": published.hdp,
    "wlb": published.wlb,
}


def find_strategy(text: str) -> tuple[Callable[[Request], Placement], str]:
    """The planner of ``name`` or ``name:argument``, and the argument."""
    if not isinstance(text, str):
        raise ValueError(f"a strategy is given by its name, one of {', '.join(STRATEGIES)}; got {text!r}")
    name, _, argument = text.partition(":")
    if name not in STRATEGIES:
        close = difflib.get_close_matches(name, STRATEGIES, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ValueError(f"unknown strategy {text!r}: {hint}known strategies are {', '.join(STRATEGIES)}")
    return STRATEGIES[name], argument

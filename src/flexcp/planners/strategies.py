"""Strategies: named planners.

A strategy is a function from a :class:`~flexcp.planners.request.Request` to a
:class:`~flexcp.plan.placement.Placement`.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable

from flexcp.plan.placement import Placement
from flexcp.planners.auto.auto import auto
from flexcp.planners.blocks.blocks import blocks
from flexcp.planners.groups.groups import groups
from flexcp.planners.published.dhp import dhp
from flexcp.planners.published.fcp import fcp
from flexcp.planners.published.hdp import hdp
from flexcp.planners.published.minheap import RELAY, minheap
from flexcp.planners.published.pow2 import pow2
from flexcp.planners.published.wlb import wlb
from flexcp.planners.request import Request
from flexcp.planners.static import static
from flexcp.planners.static.dealing import BY_LOAD


def _hypergraph(request: Request) -> Placement:
    """Place a batch with ``hypergraph``, whose module is imported only here because it is large and rarely used."""
    from flexcp.planners.hypergraph.hypergraph import hypergraph

    return hypergraph(request)


def _dcp(request: Request) -> Placement:
    """Place a batch with ``dcp``, whose module is imported only here because it is large and rarely used."""
    from flexcp.planners.published.dcp import dcp

    return dcp(request)


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
    "dhp": dhp,
    "fcp": fcp,
    "dcp": _dcp,
    "minheap": minheap,
    "pow2": pow2,
    "hdp": hdp,
    "wlb": wlb,
}

SLOW = ("hypergraph", "dcp")
"""Strategies that take seconds and need an optional package."""


def split_names(text: str) -> list[str]:
    """Return the strategy names in a list separated by commas: ``"auto,usp:8,2"`` gives ``["auto", "usp:8,2"]``.

    After a name with a colon, a part that begins with a digit or is ``relay`` belongs to the arguments of that name.
    """
    found: list[str] = []
    for part in (part.strip() for part in text.split(",")):
        if found and ":" in found[-1] and (part[:1].isdigit() or part == RELAY):
            found[-1] += f",{part}"
        elif part:
            found.append(part)
    return found


def find_strategy(text: str) -> tuple[Callable[[Request], Placement], str]:
    """Return the planner of a strategy written as ``name`` or ``name:argument``, and the argument or "".

    The name of a static method may end in ``@load`` (``ring:4@load``), which means that documents are distributed to
    groups by load and becomes part of the argument. Raise ValueError if ``text`` is no text, if the name is unknown, if
    ``@`` follows another strategy, or if it is not followed by ``load``.
    """
    if not isinstance(text, str):
        raise ValueError(f"a strategy is given by its name, one of {', '.join(STRATEGIES)}; got {text!r}")
    method, at, dealing = text.partition("@")
    name, _, argument = method.partition(":")
    if name not in STRATEGIES:
        close = difflib.get_close_matches(name, STRATEGIES, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ValueError(f"unknown strategy {text!r}: {hint}known strategies are {', '.join(STRATEGIES)}")
    if at and name not in static.STATIC:
        raise ValueError(
            f"{text!r}: only static methods ({', '.join(static.STATIC)}) are told how to deal documents "
            f"to groups; use {method!r}"
        )
    if at and at + dealing != BY_LOAD:
        raise ValueError(f"{text!r}: documents are dealt by tokens, or with {method + BY_LOAD!r} by load")
    return STRATEGIES[name], argument + at + dealing

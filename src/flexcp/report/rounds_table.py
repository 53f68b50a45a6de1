"""The rounds of a plan as text and as numbers, and how their time compares with that of the busiest port.

A round is a set of transfers in which every rank sends to at most one peer and receives from at most one.
"""

from __future__ import annotations

from typing import Any

from flexcp.io.sizes import size
from flexcp.plan.plan import Plan

SHOWN = 12
"""The most lines of the text for each direction."""
LEVELS = ("inside nodes", "across nodes")


def rounds_columns(plan: Plan, backward: bool) -> dict[str, list[Any]]:
    """Return the rounds of the first mask as columns with one entry per exchange.

    An exchange is all messages of a stage on one level. The columns are the stage, the level (0: inside nodes, 1:
    across nodes), the number of rounds, and ``efficiency``, the time of the rounds divided by that of the busiest port:
    1 is best.
    """
    exchanges = plan.rounds(0, backward).exchanges
    return {
        "stage": exchanges.stage.tolist(),
        "across": exchanges.across.tolist(),
        "rounds": exchanges.rounds.tolist(),
        "efficiency": [round(float(x), 4) for x in exchanges.efficiency],
    }


def rounds_table(plan: Plan) -> str:
    """Return the rounds of the first mask as text, with a line for each stage and level.

    Only the ``SHOWN`` with the busiest ports are shown for each direction.
    """
    lines = ["stage   level          direction   rounds   busiest port   rounds / port"]
    for backward, direction in enumerate(("forward", "backward")):
        exchanges = plan.rounds(0, bool(backward)).exchanges
        shown = sorted(exchanges.port.argsort(kind="stable")[::-1][:SHOWN].tolist())
        for i in shown:
            lines.append(
                f"{exchanges.stage[i]:>5}   {LEVELS[exchanges.across[i]]:<12}   {direction:<9} "
                f"{exchanges.rounds[i]:>8} {size(exchanges.port[i]):>14} {exchanges.efficiency[i]:>15.3f}"
            )
        if len(shown) < len(exchanges):
            lines.append(f"  ... {len(exchanges) - len(shown)} smaller ones of the {direction} ...")
    if len(lines) == 1:
        return "rounds: none, because nothing moves"
    return "\n".join(lines)

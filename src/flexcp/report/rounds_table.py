"""The rounds of a plan as text and as numbers: how many each stage and level has,
and how their time compares with that of the busiest port.
"""

from __future__ import annotations

from typing import Any

from flexcp.io.sizes import size
from flexcp.plan.plan import Plan

SHOWN = 12
LEVELS = ("inside nodes", "across nodes")


def rounds_columns(plan: Plan, backward: bool) -> dict[str, list[Any]]:
    """Return the rounds of the first mask as columns with one entry per exchange.

    The columns are stage, level (1: across nodes), number of rounds, and the rounds' time over the busiest port's.
    """
    exchanges = plan.rounds(0, backward).exchanges
    return {
        "stage": exchanges.stage.tolist(),
        "across": exchanges.across.tolist(),
        "rounds": exchanges.rounds.tolist(),
        "efficiency": [round(float(x), 4) for x in exchanges.efficiency],
    }


def rounds_table(plan: Plan) -> str:
    """Return the rounds of the first mask as text, a line for each stage and level;
    of many only the largest are shown.
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

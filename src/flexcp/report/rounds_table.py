"""Rounds of a plan as text and as plain numbers: for each stage and level how many,
and what they lose against the busiest port.
"""

from __future__ import annotations

from typing import Any

from flexcp.io.sizes import size
from flexcp.plan.plan import Plan

SHOWN = 12
LEVELS = ("inside nodes", "across nodes")


def rounds_columns(plan: Plan, backward: bool) -> dict[str, list[Any]]:
    """Stage, level (1: across nodes), rounds and their time against the busiest port's, of the first mask;
    one entry per exchange.
    """
    exchanges = plan.rounds(0, backward).exchanges
    return {
        "stage": exchanges.stage.tolist(),
        "across": exchanges.across.tolist(),
        "rounds": exchanges.rounds.tolist(),
        "efficiency": [round(float(x), 4) for x in exchanges.efficiency],
    }


def rounds_table(plan: Plan) -> str:
    """A line for each stage and level of the first mask, the largest ones where there are many."""
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

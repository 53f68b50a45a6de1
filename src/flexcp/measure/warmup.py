"""Warm-up: small plans that compile every compiled loop for every kind of argument, so that later plans need not.

The argument types of a loop depend on the plan: one node or several; a free or a fixed layout, or scattered tokens;
equal tokens, tolerances, several masks, groups; rounds and simulated events in addition to a plan. The test beside this
file plans larger batches and asserts that nothing is left to compile.
"""

from __future__ import annotations

from flexcp.clusters import cluster
from flexcp.masks import causal, causal_blockwise, window
from flexcp.plan.rounds import plan_rounds
from flexcp.planner import Planner
from flexcp.simulator.training import simulate

LENGTHS = [3000, 700, 40, 1]


def warm() -> None:
    """Make small plans that compile every loop, and discard them."""
    for nodes in (1, 2):
        where = cluster("h100", nodes, 2)
        planner = Planner(4, 2, 32, cluster=where, strategy="blocks", compute_tolerance=0.05, token_tolerance=0.05)
        plan = planner(LENGTHS)
        for program in plan.programs[0]:
            plan_rounds(program, plan.shape, where)
        planner = Planner(4, 2, 32, cluster=where, strategy="blocks")
        planner(LENGTHS, causal_blockwise(64, 2))
        planner(LENGTHS, masks={"near": (window(100, 0), 3), "all": (causal(), 1)})
        planner(LENGTHS, tokens="equal")
        planner(LENGTHS, layout="zigzag")
        planner(LENGTHS, layout=[list(range(r, sum(LENGTHS), where.ranks)) for r in range(where.ranks)])
        for strategy in ("blocks", "groups", "zigzag", "ulysses"):
            simulate(Planner(4, 2, 32, cluster=where, strategy=strategy)(LENGTHS))

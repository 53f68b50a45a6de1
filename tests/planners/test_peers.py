"""Proves the cap on the peers that a rank exchanges with: peers are counted over all masks and both directions,
``auto`` keeps the cap, and other strategies refuse with the count and a way out.
"""

from __future__ import annotations

from typing import Any

import pytest

import flexcp
from flexcp.plan.plan import Plan
from flexcp.planners.request import Refused

LENGTHS = [4000, 500, 300, 20, 2000]
WHERE = flexcp.cluster("h100", 2, 4)


def plan_for(strategy: str, max_peers: int | None = None, **call: Any) -> Plan:
    planner = flexcp.Planner(8, 8, 64, cluster=WHERE, strategy=strategy, max_peers=max_peers)
    return planner(LENGTHS, **call)


def peer_counts(plan: Plan) -> list[int]:
    return [len(plan.peers(rank)) for rank in range(plan.ranks)]


def test_peers_of_known_traffic() -> None:
    assert plan_for("dp").peers(3) == []
    assert plan_for("ring").peers(0) == [1, 7]
    assert plan_for("zigzag:4").peers(5) == [4, 6]
    assert plan_for("allgather").peers(2) == [0, 1, 3, 4, 5, 6, 7]


def test_a_peer_under_any_mask_counts() -> None:
    near, both = flexcp.window(0, 0), {"near": (flexcp.window(0, 0), 3), "all": (flexcp.causal(), 1)}
    alone, together = plan_for("blocks", mask=near), plan_for("blocks", masks=both)
    assert max(peer_counts(together)) > max(peer_counts(alone)) == 0


@pytest.mark.parametrize("cap", [0, 1, 2])
def test_auto_keeps_the_cap(cap: int) -> None:
    assert max(peer_counts(plan_for("auto"))) > 2  # without the cap
    assert max(peer_counts(plan_for("auto", cap))) <= cap


def test_others_refuse_with_the_count_and_the_way_out() -> None:
    assert max(peer_counts(plan_for("allgather", 7))) == 7
    with pytest.raises(
        Refused, match=r"rank 0 exchanges with 7 other ranks, over max_peers=6; raise the cap, or use a strategy"
    ):
        plan_for("allgather", 6)


@pytest.mark.parametrize("wrong", [-1, 1.5, True])
def test_a_cap_that_is_no_count_is_refused(wrong: Any) -> None:
    with pytest.raises(
        ValueError, match="max_peers is the most ranks that a rank exchanges with, an integer of at least 0"
    ):
        plan_for("ring", wrong)

"""Proves for every strategy, over random batches, masks and machines, that its plan keeps every invariant, and that
each rank works and moves what a brute-force count says.

Machines have up to three nodes of 1 to 7 ranks, equally fast or not. A strategy may refuse with ``Refused``, but raise
nothing else. By default a strategy is tried 24 times, or 12 times if it
searches for plans; ``make properties`` tries thousands. Every strategy plans a plain batch without refusing.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from brute import Needed, owners, static_bytes, work_of_ranks
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from flexcp.clusters import Cluster, cluster
from flexcp.masks import (
    Mask,
    causal,
    causal_blockwise,
    from_slices,
    full,
    lambda_,
    modality,
    prefix,
    shared_question,
    window,
)
from flexcp.plan.plan import Plan
from flexcp.planner import Planner
from flexcp.planners.auto.auto import DEFAULT_EFFORT
from flexcp.planners.request import Refused
from flexcp.planners.strategies import STRATEGIES

NAMED = [
    causal(),
    full(),
    window(6, 0),
    window(3, 5),
    lambda_(2, 7),
    shared_question(3, 0.25),
    causal_blockwise(2, 1),
    prefix(9),
]
HEADS = [(4, 2), (6, 3), (4, 4), (4, 1), (10, 5)]
PUBLISHED = {"dhp", "fcp", "dcp", "minheap", "pow2", "hdp", "wlb"}
OWN_RULE = {"dp", "ring", "zigzag", "allgather", "ulysses", "usp", "groups", *PUBLISHED}
"""Strategies that take no tolerances."""
PARTITIONED = ("hypergraph", "dcp")
"""Strategies that need Mt-KaHyPar."""
SEARCHING = ["auto", "hypergraph", "dcp"]
HIGH_EFFORT = DEFAULT_EFFORT + 1
"""The effort from which ``auto`` also tries ``hypergraph``, lowered for these tests.

``hypergraph`` runs as many rounds as the effort, and with the real value they would take most of the tests' time.
"""
OFTEN = settings().max_examples if settings().max_examples > 100 else 24
"""How often a strategy is tried: as the hypothesis profile says, if it asks for more than hypothesis's
default of 100.
"""
SPANNING = {"auto", "ring", "zigzag", "allgather", "ulysses", "usp", "blocks", "hypergraph", "fcp"}
"""Strategies that accept a layout, which leaves tokens where they are."""


@st.composite
def machines(draw: st.DrawFn) -> Cluster:
    nodes, each = draw(
        st.sampled_from([(1, 1), (1, 2), (1, 3), (1, 5), (1, 7), (2, 2), (2, 3), (2, 5), (3, 1), (3, 3)])
    )
    speed = st.sampled_from([0.5, 0.93, 1.0, 1.0, 1.2])
    speeds = draw(st.one_of(st.none(), st.lists(speed, min_size=nodes * each, max_size=nodes * each)))
    return cluster(draw(st.sampled_from(["h100", "a100", "cpu"])), nodes, each, speeds)


@st.composite
def rules(draw: st.DrawFn, lengths: list[int]) -> Mask | list[Mask]:
    """Draw one named mask for all documents, or one for each, including image spans, explicit slices and
    empty masks.
    """
    if draw(st.booleans()):
        return draw(st.sampled_from(NAMED))
    return [
        draw(
            st.sampled_from(
                [
                    *NAMED,
                    modality([(n // 4, n // 2), (n // 2, n)]),
                    from_slices(n, [(n // 2, n, 0, (n + 1) // 2, None, None)]),
                    from_slices(n, []),
                ]
            )
        )
        for n in lengths
    ]


@st.composite
def arguments(draw: st.DrawFn, name: str, machine: Cluster) -> str:
    """Draw a strategy's text, with an argument where the strategy takes one."""
    degrees = [d for d in range(1, machine.ranks + 1) if machine.ranks % d == 0]
    degree = draw(st.sampled_from(degrees))
    texts = {
        **{static: ["", str(degree)] for static in ("ring", "zigzag", "allgather", "ulysses")},
        "usp": ["", f"{degree},{machine.ranks // degree}", f"1,{degree}"],
        "minheap": ["1", "5", "16", ""],
        "dhp": ["", "40"],
        "fcp": ["8", "16", ""],
        "dcp": ["8", "16", ""],
        "pow2": ["", "40"],
        "hdp": ["", "40"],
        "hypergraph": ["8", "16", ""],
        "groups": ["", "team=1", "slack=2+long=poured", "slack=25+split=all", "slack=0+split=shared", "split=keys"],
    }
    argument = draw(st.sampled_from(texts.get(name, [""])))
    return f"{name}:{argument}" if argument else name


@st.composite
def cases(draw: st.DrawFn, name: str) -> tuple[Planner, dict[str, Any]]:
    """Draw a planner, and the arguments to call it with."""
    machine, (heads, kv_heads) = draw(machines()), draw(st.sampled_from(HEADS))
    lengths = draw(st.lists(st.one_of(st.integers(1, 6), st.integers(1, 48)), min_size=1, max_size=6))
    tokens, ranks = sum(lengths), machine.ranks
    options: dict[str, Any] = {"strategy": draw(arguments(name, machine))}
    call: dict[str, Any] = {"lengths": lengths}
    if draw(st.integers(0, 3)) == 0:
        call["masks"] = {layer: (draw(rules(lengths)), draw(st.integers(1, 9))) for layer in ("some", "others")}
    else:
        call["mask"] = draw(rules(lengths))
    wishes = ["free", "free", "equal", "cap", *(["contiguous", "zigzag", "scattered"] if name in SPANNING else [])]
    wish = draw(st.sampled_from(wishes))
    if wish == "equal":
        call |= {"tokens": "equal", "pad_to": draw(st.sampled_from([None, 1, 4]))}
    elif wish == "cap":
        options["max_tokens_per_rank"] = -(-tokens // ranks) + draw(st.integers(0, 20))
    elif wish == "scattered":
        call["layout"] = [list(range(r, tokens, ranks)) for r in range(ranks)]
    elif wish != "free":
        call["layout"] = wish
    tolerance = st.sampled_from([None, 0.0, 0.05, 0.5])
    if name not in OWN_RULE:
        options["compute_tolerance"] = draw(tolerance)
        options["token_tolerance"] = draw(tolerance) if wish in ("free", "cap") else None
    if name in ("auto", "blocks", "hypergraph"):
        options["effort"] = draw(st.sampled_from([None, 0, 2, HIGH_EFFORT] if name == "auto" else [None, 0, 3]))
    sizes = draw(st.sampled_from([(8, 8), (8, 16)]))
    dtype = draw(st.sampled_from(["bfloat16", "float32", "float64"]))
    return Planner(heads, kv_heads, *sizes, dtype, machine, **options), call


def planned(planner: Planner, call: dict[str, Any]) -> Plan | None:
    """Return the plan, or None where the strategy refuses."""
    try:
        with patch("flexcp.planners.auto.candidates.HIGH_EFFORT", HIGH_EFFORT):
            plan = planner(**call)
    except Refused as refusal:
        event(f"refused: {str(refusal)[:40]}")
        return None
    event("planned")
    return plan


def check_everything(plan: Plan, planner: Planner, call: dict[str, Any]) -> None:
    plan.check()
    owner = owners(plan)
    counts = np.bincount(owner, minlength=plan.ranks)
    assert plan.placement.tokens.tolist() == counts.tolist()
    for number in range(len(plan.batch.masks)):
        assert plan.work(number).tolist() == work_of_ranks(plan, number).tolist()
        for backward in (False, True):
            check_bytes(plan, backward, number)
    if call.get("tokens") == "equal":
        assert len(set(counts.tolist())) == 1
        assert counts[0] % (call["pad_to"] or 1) == 0
    else:
        assert plan.placement.pads == 0
    if planner.max_tokens_per_rank is not None:
        assert counts.max() <= planner.max_tokens_per_rank
    if "layout" in call:
        assert [np.flatnonzero(owner == r).tolist() for r in range(plan.ranks)] == _layout(call, plan)
    if planner.token_tolerance is not None:
        tokens = plan.batch.tokens
        assert counts.max() <= max(-(-tokens // plan.ranks), tokens / plan.ranks * (1 + planner.token_tolerance)) + 1


def check_bytes(plan: Plan, backward: bool, number: int) -> None:
    """Compare bytes for each pair of ranks.

    On several nodes keys may be relayed, so there what each rank receives and returns and what crosses between nodes
    are compared.
    """
    moved = plan.bytes(backward, mask=number)
    if plan.placement.traffic.kind != "needed":
        np.testing.assert_array_equal(moved, static_bytes(plan, backward))
        return
    needed = Needed(plan, backward, number)
    direct = needed.there + needed.back
    if plan.cluster.nodes == 1:
        np.testing.assert_array_equal(moved, direct)
    transfers = plan.programs[number][backward].transfers
    size, output = transfers.bytes(plan.shape), transfers.is_output
    received, returned = np.zeros((2, plan.ranks), np.int64)
    np.add.at(received, transfers.target[~output], size[~output])
    np.add.at(returned, transfers.source[output], size[output])
    np.testing.assert_array_equal(received, needed.there.sum(axis=0))
    np.testing.assert_array_equal(returned, needed.back.sum(axis=1))
    assert moved.sum() == direct.sum()
    node = np.arange(plan.ranks) // plan.cluster.ranks_per_node
    across = node[:, None] != node
    assert moved[across].sum() == plan.inter_node_bytes(backward, mask=number)
    assert needed.least <= moved[across].sum() <= direct[across].sum()


def _layout(call: dict[str, Any], plan: Plan) -> list[list[int]]:
    """Return each rank's tokens under a layout, in stream order."""
    stream, layout = np.arange(plan.batch.tokens), call["layout"]
    if layout == "contiguous":
        return [part.tolist() for part in np.array_split(stream, plan.ranks)]
    if layout == "zigzag":
        parts = np.array_split(stream, 2 * plan.ranks)
        return [np.concatenate([parts[i], parts[-1 - i]]).tolist() for i in range(plan.ranks)]
    return [sorted(mine) for mine in layout]


@pytest.mark.parametrize("name", [name for name in STRATEGIES if name not in SEARCHING])
@settings(max_examples=OFTEN, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_every_rank_works_and_moves_what_a_count_by_hand_says(name: str, data: st.DataObject) -> None:
    try_one(name, data)


@pytest.mark.parametrize("name", SEARCHING)
@settings(max_examples=OFTEN // 2, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_so_it_is_where_plans_are_searched_for(name: str, data: st.DataObject) -> None:
    """These are tried half as often: a plan takes ten times as long, and is built from the other strategies' parts."""
    try_one(name, data)


@pytest.mark.parametrize("name", STRATEGIES)
def test_no_strategy_refuses_a_plain_batch(name: str) -> None:
    """Without this a strategy that always refuses would pass the tests of random batches."""
    if name in PARTITIONED:
        pytest.importorskip("mtkahypar")
    call = {"lengths": [40, 9, 17], "mask": causal()}
    planner = Planner(4, 2, 8, cluster=cluster("h100", 1, 2), strategy=name)
    check_everything(planner(**call), planner, call)


def try_one(name: str, data: st.DataObject) -> None:
    if name in PARTITIONED:
        pytest.importorskip("mtkahypar")
    planner, call = data.draw(cases(name))
    plan = planned(planner, call)
    if plan is not None:
        check_everything(plan, planner, call)

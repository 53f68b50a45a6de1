"""Requests, plans and shuffled partitions that the tests of ``hypergraph`` share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from flexcp.batch import make_batch
from flexcp.clusters import cluster
from flexcp.cost import CostModel
from flexcp.masks import causal, causal_blockwise, lambda_, window
from flexcp.plan.placement import Placement
from flexcp.plan.plan import Plan
from flexcp.plan.user_layouts import user_layout
from flexcp.planners.blocks.blocks import pack_rows
from flexcp.planners.hypergraph.hypergraph import DEFAULT_TOLERANCE, _candidate, _limits
from flexcp.planners.hypergraph.search import Search
from flexcp.planners.request import Request
from flexcp.schedule.transfers import make_plan
from flexcp.shape import Shape


def request_for(lengths: list[int], mask: Any = None, nodes: int = 1, ranks: int = 4, **others: Any) -> Request:
    """Return a request, with a small attention layer unless a shape is given."""
    batch = make_batch(lengths, **(mask if isinstance(mask, dict) else {"mask": mask or causal()}))
    layout = others.pop("layout", "free")
    machine = cluster("h100", nodes, ranks, others.pop("speeds", None))
    return Request(
        batch,
        others.pop("shape", Shape(8, 2, 16, 16)),
        machine,
        CostModel(),
        layout=user_layout(layout, batch.tokens, machine.ranks),
        **others,
    )


def planned(request: Request, placement: Placement) -> Plan:
    return make_plan(placement, request.shape, request.cluster, request.cost, "hypergraph")


def start_of(request: Request) -> Placement:
    """Return the placement of ``blocks`` under the tolerances that ``hypergraph`` assumes."""
    tolerances = {
        name: DEFAULT_TOLERANCE if getattr(request, name) is None else getattr(request, name)
        for name in ("compute_tolerance", "token_tolerance")
    }
    return pack_rows(replace(request, argument="", effort=None, **tolerances))


def forward_bytes(plan: Plan) -> int:
    """Return the forward bytes of all layers."""
    return sum(mask.layers * int(plan.bytes(mask=i).sum()) for i, mask in enumerate(plan.batch.masks))


def shuffled(request: Request, seed: int) -> Search:
    """Return a search over the request's hypergraph in which some blocks and tiles are on random ranks."""
    first = _candidate(request, start_of(request), 40)
    partition, random = first.partition, np.random.default_rng(seed)
    for column in (partition.owner, partition.worker):
        away = random.random(len(column)) < 0.3
        column[away] = random.integers(0, request.ranks, int(away.sum()))
    partition.count()
    limits = _limits(replace(request, compute_tolerance=0.1, token_tolerance=0.1), first)
    return Search(partition, limits)


CASES = [
    (request_for([600, 170, 40], causal(), nodes=2, ranks=3), 1),
    (request_for([600, 170, 40], lambda_(10, 70), nodes=2, ranks=3), 2),
    (request_for([500, 60], causal_blockwise(32, 2), ranks=5), 3),
    (request_for([300, 260], {"masks": {"a": (causal(), 2), "b": (window(50), 3)}}, ranks=4), 4),
]

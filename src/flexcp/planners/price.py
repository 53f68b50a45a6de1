"""Price: the time of a step in closed form, by which planners compare placements that are not scheduled yet.

It is the sum of what the layers are predicted to take, their least copies (:mod:`flexcp.simulator.least_copies`), and
the parts of the request's step outside its layers (:mod:`flexcp.simulator.step_parts`). On one node this is the time of
the slowest rank (:mod:`flexcp.schedule.predict`). It is optimistic: gradient sync may be hidden, and ranks wait only
for what the prediction includes.

On several nodes, contention between compute and transfers decides. There the layers take the time of their stages under
contention, over all ranks together (:mod:`flexcp.schedule.stages`), and the other two parts are means over ranks,
because the layers already include the effect of unequal tokens. The price is at least the compute of the busiest rank.
It is close to the result of the event simulator and may be a few per cent above it.
"""

from __future__ import annotations

from flexcp.plan.placement import Placement
from flexcp.planners.request import Request
from flexcp.schedule.analysis import MaskAnalysis, analyse
from flexcp.schedule.predict import predict
from flexcp.simulator.least_copies import least_copies_ns
from flexcp.simulator.step_parts import beyond_layers_ns


def price_ns(request: Request, placement: Placement, analysis: list[MaskAnalysis] | None = None) -> int:
    """Return the nanoseconds of the request's step; ``analysis`` is that of the placement, if the caller has it."""
    known = (request.shape, request.cluster, request.cost)
    if analysis is None and placement.traffic.kind == "needed":
        analysis = analyse(placement, *known, request.keep_kv, request.most_ahead)
    found = predict(placement, *known, request.keep_kv, analysis)
    others = least_copies_ns(found, placement, request.shape)
    if request.training is not None:
        others = others + beyond_layers_ns(placement.tokens, request.batch.layers, *known, request.training)
    contended = _contended_ns(request, analysis)
    if contended:
        busiest = int((found.attention_ns + found.linear_ns + others).max())
        return max(contended + int(others.mean()), busiest)
    return int((found.rank_ns + others).max())


def _contended_ns(request: Request, analysis: list[MaskAnalysis] | None) -> int:
    """Return the time of the layers under contention, or 0 if it was not computed."""
    if analysis is None or request.cluster.nodes == 1:
        return 0
    both = [(one.forward.stages.contended_ns, one.backward.stages.contended_ns) for one in analysis]
    if not all(all(pair) for pair in both):
        return 0
    return sum(mask.layers * sum(pair) for mask, pair in zip(request.batch.masks, both, strict=True))

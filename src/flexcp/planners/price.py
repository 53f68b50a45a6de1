"""Price: the step of a placement in closed form, by which planners compare placements that nobody has scheduled yet.

It is what the layers are predicted to take, their least copies (:mod:`flexcp.simulator.least_copies`), and what the
request's step has beyond its layers (:mod:`flexcp.simulator.step_parts`). On one node these are of the rank that takes
longest (:mod:`flexcp.schedule.predict`), and prices are optimistic: gradient sync may be hidden, and ranks wait for
nothing but what the prediction knows of.

Over several nodes what compute and transfers cost each other decides. There layers take what their stages do under
contention, all ranks together (:mod:`flexcp.schedule.stages`), and the other two are means over ranks: who has more
tokens is counted in the layers. It is no less than what the busiest rank computes. Such a price is close to what events
find, and may be a few per cent above it.
"""

from __future__ import annotations

from flexcp.plan.placement import Placement
from flexcp.planners.request import Request
from flexcp.schedule.analysis import MaskAnalysis, analyse
from flexcp.schedule.predict import predict
from flexcp.simulator.least_copies import least_copies_ns
from flexcp.simulator.step_parts import beyond_layers_ns


def price_ns(request: Request, placement: Placement, analysis: list[MaskAnalysis] | None = None) -> int:
    """Nanoseconds of the request's step; ``analysis`` is the placement's, where it was made before."""
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
    """What the layers take under contention; 0 where that was not looked at."""
    if analysis is None or request.cluster.nodes == 1:
        return 0
    both = [(one.forward.stages.contended_ns, one.backward.stages.contended_ns) for one in analysis]
    if not all(all(pair) for pair in both):
        return 0
    return sum(mask.layers * sum(pair) for mask, pair in zip(request.batch.masks, both, strict=True))

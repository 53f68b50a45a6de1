"""Price: the predicted time of a step, by which planners compare placements that are not scheduled yet.

It is a closed form, the sum of three times: what the layers are predicted to take, the least that ranks spend on copies
in memory (:mod:`flexcp.simulator.least_copies`), and, if the request describes a step, its parts outside the layers
(:mod:`flexcp.simulator.step_parts`). On one node, and for the traffic of static methods, it is the time of the slowest
rank (:mod:`flexcp.schedule.predict`). This is optimistic: gradient sync may be hidden, and ranks wait only for what the
prediction includes.

On several nodes, the slowdown of compute and transfers that overlap decides which placement is faster. There the layers
take the time of their stages under this contention (:mod:`flexcp.schedule.stages`), one number for all ranks. The other
two parts are then means over ranks, because the time of the layers already includes the effect of unequal tokens. The
price is at least the compute of the busiest rank. It is close to the result of the event simulator and may be a few per
cent above it.
"""

from __future__ import annotations

from flexcp.plan.placement import Placement
from flexcp.planners.request import Request
from flexcp.schedule.analysis import MaskAnalysis, analyse
from flexcp.schedule.predict import predict
from flexcp.simulator.least_copies import least_copies_ns
from flexcp.simulator.step_parts import beyond_layers_ns


def price_ns(request: Request, placement: Placement, analysis: list[MaskAnalysis] | None = None) -> int:
    """Return the predicted nanoseconds of a step of the request with this placement (see the module docstring).

    ``analysis`` is what :func:`flexcp.schedule.analysis.analyse` returned for the placement, if the caller has it.
    """
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
    """Return the nanoseconds of all layers under contention, or 0 on one node or if they were not computed."""
    if analysis is None or request.cluster.nodes == 1:
        return 0
    both = [(one.forward.stages.contended_ns, one.backward.stages.contended_ns) for one in analysis]
    if not all(all(pair) for pair in both):
        return 0
    return sum(mask.layers * sum(pair) for mask, pair in zip(request.batch.masks, both, strict=True))

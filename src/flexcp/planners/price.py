"""Price: the step of a placement in closed form, by which planners compare placements that nobody has scheduled yet.

It is what the layers are predicted to take (:mod:`flexcp.schedule.predict`), their least copies
(:mod:`flexcp.simulator.least_copies`), and what the request's step has beyond its layers
(:mod:`flexcp.simulator.step_parts`), of the rank that takes longest. Prices are optimistic: gradient sync may be
hidden, and ranks wait for nothing but what the prediction knows of.
"""

from __future__ import annotations

from flexcp.plan.placement import Placement
from flexcp.planners.request import Request
from flexcp.schedule.analysis import MaskAnalysis
from flexcp.schedule.predict import predict
from flexcp.simulator.least_copies import least_copies_ns
from flexcp.simulator.step_parts import beyond_layers_ns


def price_ns(request: Request, placement: Placement, analysis: list[MaskAnalysis] | None = None) -> int:
    """Nanoseconds of the request's step, at least; ``analysis`` is the placement's, where it was made before."""
    known = (request.shape, request.cluster, request.cost)
    found = predict(placement, *known, request.keep_kv, analysis)
    ns = found.rank_ns + least_copies_ns(found, placement, request.shape)
    if request.training is not None:
        ns = ns + beyond_layers_ns(placement.tokens, request.batch.layers, *known, request.training)
    return int(ns.max())

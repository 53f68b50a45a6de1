"""Price: the step of a placement in closed form, by which planners compare placements that nobody has scheduled yet.

It is what the layers are predicted to take, their least copies (:mod:`flexcp.simulator.least_copies`), and what the
request's step has beyond its layers (:mod:`flexcp.simulator.step_parts`), of the rank that takes longest. Layers are
predicted rank by rank (:mod:`flexcp.schedule.predict`), or, where it is known in which stages what is needed travels,
by those under contention, over all ranks together (:mod:`flexcp.schedule.stages`). Prices are optimistic: gradient sync
may be hidden, and ranks wait for nothing but what the prediction knows of. Only how exchanges of a stage follow each
other is counted more slowly than events find it, by a few per cent where much crosses nodes.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from flexcp.plan.placement import Placement
from flexcp.planners.request import Request
from flexcp.schedule.analysis import MaskAnalysis
from flexcp.schedule.predict import Prediction, predict
from flexcp.simulator.least_copies import least_copies_ns
from flexcp.simulator.step_parts import beyond_layers_ns

Ints = NDArray[np.int64]


def price_ns(request: Request, placement: Placement, analysis: list[MaskAnalysis] | None = None) -> int:
    """Nanoseconds of the request's step, at least; ``analysis`` is the placement's, where it was made before."""
    known = (request.shape, request.cluster, request.cost)
    found = predict(placement, *known, request.keep_kv, analysis)
    ns = least_copies_ns(found, placement, request.shape)
    ns = ns + (found.rank_ns if analysis is None else _contended_ns(request, found, analysis))
    if request.training is not None:
        ns = ns + beyond_layers_ns(placement.tokens, request.batch.layers, *known, request.training)
    return int(ns.max())


def _contended_ns(request: Request, found: Prediction, analysis: list[MaskAnalysis]) -> Ints:
    """What the layers take under contention, the same for all ranks; rank by rank where that was not looked at."""
    both = [(one.forward.stages.contended_ns, one.backward.stages.contended_ns) for one in analysis]
    if not all(all(pair) for pair in both):
        return found.rank_ns
    total = sum(mask.layers * sum(pair) for mask, pair in zip(request.batch.masks, both, strict=True))
    return np.full_like(found.rank_ns, total)

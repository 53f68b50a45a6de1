"""The timeline of one layer of a plan, forward and then backward: attention of the first mask, and the rest.

Attention is simulated event by event. The rest of the layer takes the cost model's time for a rank's tokens, one third
of it in the forward. Each rank goes on as soon as it can, so the layer takes as long as its slowest rank, and the
timeline shows what the other ranks wait for.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from flexcp.plan.plan import Plan
from flexcp.simulator.passes import Event, Rules, pass_model, run_pass

Ints = NDArray[np.int64]
SAYS = (
    "One layer, forward and then backward, simulated: each rank's compute and waits, and below them what it receives "
    "and sends. Times are those of the cost model."
)


class LayerTimeline(NamedTuple):
    """Bars of all ranks, and a sentence that explains them."""

    bars: list[Event]
    says: str


def layer_timeline(plan: Plan) -> LayerTimeline:
    """Simulate one layer of the plan, forward and backward, and return its timeline."""
    return LayerTimeline(list(_bars(plan)), SAYS)


def _bars(plan: Plan) -> Iterator[Event]:
    linear = plan.cost.linear_ns(plan.placement.tokens, plan.shape, plan.cluster)
    now: Ints = np.zeros(plan.ranks, np.int64)
    for backward in (False, True):
        if backward:
            yield from _others(now, now + 2 * linear // 3, "rest of the layer backward")
            now = now + 2 * linear // 3
        attention = run_pass(pass_model(plan, 0, backward, plan.cost, Rules()), now)
        yield from attention.events()
        now = attention.done
        if not backward:
            yield from _others(now, now + linear // 3, "rest of the layer forward")
            now = now + linear // 3


def _others(begin: Ints, end: Ints, name: str) -> Iterator[Event]:
    for rank, (a, b) in enumerate(zip(begin.tolist(), end.tolist(), strict=True)):
        yield Event(rank, "other", name, a, b, 0)

"""Where the simulated time of a plan goes, for the pictures and figures of a report.

A page that shows a plan beside other results passes their times in, so that both agree. The time that planners compare
placements by (a closed form, not simulated) is shown beside it under its own name.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flexcp.plan.plan import Plan
from flexcp.schedule.predict import lower_bound
from flexcp.simulator.step_parts import Training, layers_alone
from flexcp.simulator.training import ATTENTION, LINEAR, SYNC, Simulation, StepTime, simulated_step

Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class PlanTime:
    """Simulated nanoseconds of a plan: in total, and for each rank by what it does.

    A rank computes attention (``attention_ns``), waits (``exposed_ns``), or does everything else (``linear_ns``: the
    rest of each layer, gradient sync). ``what`` names the thing that takes this time; ``says`` is a sentence to print
    above the numbers, if any. ``head_flops`` are a token's FLOPs in the projection to the vocabulary, if the total
    includes them.
    """

    total_ns: int
    attention_ns: Ints
    exposed_ns: Ints
    linear_ns: Ints
    what: str = "step"
    says: str = ""
    head_flops: int = 0

    @classmethod
    def of_plan(cls, plan: Plan, training: Training | None = None) -> PlanTime:
        """Simulate a step of the plan; without ``training`` it consists of the layers alone."""
        if training is None:
            return cls.of_step(simulated_step(plan, layers_alone(plan.cost, plan.shape)), 0, "time of all layers")
        return cls.of_step(simulated_step(plan, training), training.model.head_flops_per_token)

    @classmethod
    def of_step(cls, step: StepTime, head_flops: int, what: str = "step", says: str = "") -> PlanTime:
        """Take the times of a simulated step.

        Gradient sync that nothing hides counts with the rest of each layer. A rank that is done waits for the slowest.
        """
        attention, linear = step.ranks[ATTENTION], step.ranks[LINEAR] + step.ranks[SYNC]
        waits = np.maximum(step.total_ns - attention - linear, 0)
        return cls(step.total_ns, attention, waits, linear, what, says, head_flops)

    @classmethod
    def of_simulation(cls, found: Simulation, training: Training | None) -> PlanTime:
        """Take the times of a simulation: of the training step if there is one, else of attention alone."""
        if found.step is not None and training is not None:
            return cls.of_step(found.step, training.model.head_flops_per_token)
        attention = np.zeros(found.plan.ranks, np.int64)
        for mask, pair in zip(found.plan.batch.masks, found.passes, strict=True):
            attention = attention + mask.layers * (pair[0].compute_ns + pair[1].compute_ns)
        waits = np.maximum(found.attention_ns - attention, 0)
        return cls(found.attention_ns, attention, waits, 0 * attention, "attention")

    def perfect_ns(self, plan: Plan) -> int:
        """Return the nanoseconds with all compute divided perfectly over the ranks and no waiting."""
        if self.what == "attention":
            return int(self.attention_ns.sum()) // plan.ranks
        return lower_bound(plan.batch, plan.shape, plan.cluster, plan.cost, self.head_flops)

    @property
    def rank_ns(self) -> Ints:
        """Nanoseconds of each rank, waiting included."""
        return self.attention_ns + self.exposed_ns + self.linear_ns

    @property
    def slowest(self) -> int:
        """The rank that computes longest among the ranks that finish last."""
        last = self.rank_ns == self.rank_ns.max()
        return int(np.where(last, self.attention_ns + self.linear_ns, -1).argmax())

    def __str__(self) -> str:
        at = self.slowest
        parts = (("attention", self.attention_ns), ("waiting", self.exposed_ns), ("the rest", self.linear_ns))
        inside = " + ".join(f"{name} {int(ns[at]) / 1e6:.3f}" for name, ns in parts)
        return f"{self.total_ns / 1e6:.3f} ms on rank {at} ({inside})"

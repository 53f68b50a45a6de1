"""Where the time of a plan goes, for the pictures and figures of a report, as a simulation found it.

A page that shows simulated times beside each other shows the same ones in the panel of a plan; so the panel is given
them. The closed form's time, which planners compare placements by, is named beside them and nowhere in their place.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flexcp.plan.plan import Plan
from flexcp.schedule.predict import lower_bound
from flexcp.simulator.step_parts import Training, layers_alone
from flexcp.simulator.training import Simulation, StepTime, simulated_step

Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class PlanTime:
    """Nanoseconds of all ranks together, and of each rank in attention, waiting,
    and in everything else (other layers, gradient sync).

    ``what`` they are of, in words; ``says`` is a sentence to stand above them, or nothing.
    ``head_flops`` are those of a token in the vocabulary's projection, where that is in the total.
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
        """The simulated step of a plan; where no training says what else a step has, that of its layers alone."""
        if training is None:
            return cls.of_step(simulated_step(plan, layers_alone(plan.cost, plan.shape)), 0, "time of all layers")
        return cls.of_step(simulated_step(plan, training), training.model.head_flops_per_token)

    @classmethod
    def of_step(cls, step: StepTime, head_flops: int, what: str = "step", says: str = "") -> PlanTime:
        """A simulated step's; exposed gradient sync counts to the other layers,
        and who is done waits for the slowest.
        """
        attention, linear = step.ranks[0], step.ranks[2] + step.ranks[3]
        waits = np.maximum(step.total_ns - attention - linear, 0)
        return cls(step.total_ns, attention, waits, linear, what, says, head_flops)

    @classmethod
    def of_simulation(cls, found: Simulation, training: Training | None) -> PlanTime:
        """A simulation's: of the step of a training where there is one, else of attention alone."""
        if found.step is not None and training is not None:
            return cls.of_step(found.step, training.model.head_flops_per_token)
        attention = np.zeros(found.plan.ranks, np.int64)
        for mask, pair in zip(found.plan.batch.masks, found.passes, strict=True):
            attention = attention + mask.layers * (pair[0].compute_ns + pair[1].compute_ns)
        waits = np.maximum(found.attention_ns - attention, 0)
        return cls(found.attention_ns, attention, waits, 0 * attention, "attention")

    def perfect_ns(self, plan: Plan) -> int:
        """What the same would take with all compute divided perfectly over the ranks, and no waiting."""
        if self.what == "attention":
            return int(self.attention_ns.sum()) // plan.ranks
        return lower_bound(plan.batch, plan.shape, plan.cluster, plan.cost, self.head_flops)

    @property
    def rank_ns(self) -> Ints:
        """Time of each rank."""
        return self.attention_ns + self.exposed_ns + self.linear_ns

    @property
    def slowest(self) -> int:
        """The rank that computes longest, of those that take longest."""
        last = self.rank_ns == self.rank_ns.max()
        return int(np.where(last, self.attention_ns + self.linear_ns, -1).argmax())

    def __str__(self) -> str:
        at = self.slowest
        parts = (("attention", self.attention_ns), ("waiting", self.exposed_ns), ("the rest", self.linear_ns))
        inside = " + ".join(f"{name} {int(ns[at]) / 1e6:.3f}" for name, ns in parts)
        return f"{self.total_ns / 1e6:.3f} ms on rank {at} ({inside})"

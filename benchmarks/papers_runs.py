"""Runs of the page of the three papers: every batch is planned once with each strategy
and simulated once with each set of rules.

Figures share batches (an efficiency, a ladder of rules and a planning time use the same plan), so the page is made with
one :class:`Runs`, which keeps its results. :meth:`Runs.over_static` compares a strategy with static methods of any
degree: with the best of each batch, which no training run can have, and with the best for all batches of the setting,
which a user would configure. Both deal documents to their groups by tokens or by load, whichever is faster.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import NamedTuple

from flexcp.compare.compare import STATIC, STATIC_BY_LOAD, attention_only, common_degree, planned
from flexcp.masks import Mask
from flexcp.plan.plan import Plan
from flexcp.planners.request import Refused, Request
from flexcp.simulator.training import Simulation, simulate
from simulated import Experiment, mean

FEW = 7
"""How often planning that takes less than a second is timed; the least counts."""

Time = Callable[[Simulation], int]
Maker = Callable[[Request], Plan]


class Planned(NamedTuple):
    """A plan and the CPU seconds of planning."""

    plan: Plan
    seconds: float


class Timed(NamedTuple):
    """CPU seconds of planning, and of how many runs they are the least."""

    seconds: float
    runs: int


class OverStatic(NamedTuple):
    """Mean speed-ups of a strategy over the best static method of each batch, and over the one fixed for all."""

    of_each_batch: float
    of_one_fixed: float


class Runs:
    """The plans and simulations of one page; ``makers`` make the plans of names that are no strategies."""

    def __init__(self, makers: Mapping[str, Maker] | None = None) -> None:
        self._makers = dict(makers or {})
        self._plans: dict[Hashable, Planned | None] = {}
        self._simulations: dict[Hashable, Simulation | None] = {}
        self._searched: dict[Hashable, list[str]] = {}

    def plan(self, where: Experiment, lengths: Sequence[int], name: str, mask: Mask | None = None) -> Planned | None:
        """Return the strategy's plan of a batch, or None if it refuses."""
        key = (where.cluster, where.shape, where.cost, where.training, tuple(lengths), mask, name)
        if key not in self._plans:
            try:
                self._plans[key] = self._made(where, lengths, name, mask)
            except Refused:
                self._plans[key] = None
        return self._plans[key]

    def _made(self, where: Experiment, lengths: Sequence[int], name: str, mask: Mask | None) -> Planned:
        """Plan a batch. The rounds of `fcp` are part of its planning; plans of other strategies make them if needed."""
        begin = time.process_time()
        request = asked(where, lengths, mask)
        plan = self._makers[name](request) if name in self._makers else planned(request, name, search=False)[1]
        if name.partition(":")[0] == "fcp":
            for backward in (False, True):
                plan.rounds(backward=backward)
        return Planned(plan, time.process_time() - begin)

    def timed(self, where: Experiment, lengths: Sequence[int], name: str, mask: Mask | None = None) -> Timed:
        """Return the CPU seconds of planning a batch by :func:`least_of_few`; the strategy must not refuse."""
        found = self.plan(where, lengths, name, mask)
        if found is None:
            raise ValueError(f"{name} refuses a batch of {len(lengths)} documents on {where.cluster}")
        return least_of_few(found.seconds, lambda: self._made(where, lengths, name, mask).seconds)

    def chosen(self, where: Experiment, batches: Sequence[Sequence[int]], mask: Mask | None = None) -> tuple[str, ...]:
        """Return the strategies that ``auto`` chose, one for each batch."""
        return tuple(self.run(where, lengths, "auto", mask).plan.strategy for lengths in batches)

    def tried(
        self, where: Experiment, lengths: Sequence[int], name: str, mask: Mask | None = None
    ) -> Simulation | None:
        """Return the strategy's simulation, or None if it refuses."""
        key = (where, tuple(lengths), mask, name)
        if key not in self._simulations:
            found = self.plan(where, lengths, name, mask)
            self._simulations[key] = found and simulate(found.plan, rules=where.rules, training=where.training)
        return self._simulations[key]

    def run(self, where: Experiment, lengths: Sequence[int], name: str, mask: Mask | None = None) -> Simulation:
        """Return the simulation of a strategy that must not refuse."""
        found = self.tried(where, lengths, name, mask)
        if found is None:
            raise ValueError(f"{name} refuses a batch of {len(lengths)} documents on {where.cluster}")
        return found

    def total(
        self, where: Experiment, batches: Sequence[Sequence[int]], name: str, time: Time, mask: Mask | None = None
    ) -> int | None:
        """Return the time over all batches, or None if the strategy refuses one."""
        found = [self.tried(where, lengths, name, mask) for lengths in batches]
        return None if None in found else sum(time(one) for one in found if one is not None)

    def least(
        self,
        where: Experiment,
        batches: Sequence[Sequence[int]],
        names: Sequence[str],
        time: Time,
        mask: Mask | None = None,
    ) -> tuple[str, int]:
        """Return the strategy of ``names`` with the least time over all batches together, and that time."""
        totals = {name: self.total(where, batches, name, time, mask) for name in names}
        ran = {name: total for name, total in totals.items() if total is not None}
        best = min(ran, key=ran.__getitem__)
        return best, ran[best]

    def searched(self, where: Experiment, batches: Sequence[Sequence[int]], mask: Mask | None = None) -> list[str]:
        """Return every static method that can run, with the one degree that is best for all batches."""
        key = (where, tuple(map(tuple, batches)), mask)
        if key not in self._searched:
            requests = [asked(where, lengths, mask) for lengths in batches]
            found = (common_degree(requests, method) for method in (*STATIC, *STATIC_BY_LOAD))
            self._searched[key] = [degree for degree in found if degree is not None]
        return self._searched[key]

    def over_static(
        self,
        where: Experiment,
        batches: Sequence[Sequence[int]],
        name: str,
        time: Time,
        mask: Mask | None = None,
        also: Sequence[str] = (),
    ) -> OverStatic:
        """Return the strategy's speed-ups over static methods, documents dealt by tokens and by load.

        Each method has the degree that the closed form finds best; the methods of ``also`` are included, so that no
        baseline of a row is stronger.
        """
        fixed = list(dict.fromkeys([*self.searched(where, batches, mask), *also]))
        configured = self.least(where, batches, fixed, time, mask)[0]
        each, one = [], []
        for lengths in batches:
            mine = time(self.run(where, lengths, name, mask))
            of_batch = self.searched(where, [lengths], mask)
            each.append(self.least(where, [lengths], [*fixed, *of_batch], time, mask)[1] / mine)
            one.append(time(self.run(where, lengths, configured, mask)) / mine)
        return OverStatic(mean(each), mean(one))


def least_of_few(first: float, again: Callable[[], float], runs: int = FEW) -> Timed:
    """Return the least of ``runs`` timings if the first took under a second, else the first alone."""
    if first >= 1:
        return Timed(first, 1)
    return Timed(min(first, *(again() for _ in range(runs - 1))), runs)


def timing(*found: Timed) -> str:
    """Return how planning times were measured, in words."""
    runs = {one.runs for one in found}
    if len(runs) > 1:
        return f"measured, one core, least of {max(runs)} runs below a second, one run above"
    return "measured, one core, " + ("one run each" if runs == {1} else f"least of {min(runs)} runs")


def asked(where: Experiment, lengths: Sequence[int], mask: Mask | None = None) -> Request:
    """Return the request for planners: of attention alone, if the experiment describes no training step."""
    request = where.request(lengths, mask)
    return attention_only(request) if where.training is None else request


def step_ns(simulation: Simulation) -> int:
    """Return the nanoseconds of the whole step, or of attention if only that is simulated."""
    return simulation.attention_ns if simulation.step is None else simulation.step.total_ns


def attention_ns(simulation: Simulation) -> int:
    """Return the nanoseconds of attention, both directions."""
    return simulation.attention_ns


def forward_ns(simulation: Simulation) -> int:
    """Return the nanoseconds of attention forward."""
    return simulation.pass_ns(False)


def backward_ns(simulation: Simulation) -> int:
    """Return the nanoseconds of attention backward."""
    return simulation.pass_ns(True)

"""Runs of the page of the three papers: every batch is planned once with each strategy
and simulated once under each set of rules.

Figures share batches (an efficiency, a ladder of rules and a planning time are of the same plan), so a page is made
with one :class:`Runs`, which keeps what it made. :func:`over_static` sets a strategy beside static methods of any
degree: the best of each batch, which no training run has, and the one that serves all batches of the setting best,
which it would configure. Both deal documents to their groups by tokens or by load, whichever is faster.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

from flexcp.compare.compare import STATIC, STATIC_BY_LOAD, attention_only, common_degree, planned
from flexcp.masks import Mask
from flexcp.plan.plan import Plan
from flexcp.planners.request import Refused, Request
from flexcp.simulator.training import Simulation, simulate
from simulated import Experiment, mean

Time = Callable[[Simulation], int]


class Planned(NamedTuple):
    """A plan and the CPU seconds it took."""

    plan: Plan
    seconds: float


class OverStatic(NamedTuple):
    """Times of the best static method of each batch, and of the one fixed for all, over a strategy's; means."""

    of_each_batch: float
    of_one_fixed: float


class Runs:
    """Plans and simulations of one making of the page."""

    def __init__(self) -> None:
        self._plans: dict[Hashable, Planned | None] = {}
        self._simulations: dict[Hashable, Simulation | None] = {}
        self._searched: dict[Hashable, list[str]] = {}

    def plan(self, where: Experiment, lengths: Sequence[int], name: str, mask: Mask | None = None) -> Planned | None:
        """The strategy's plan of a batch; None where it refuses."""
        key = (where.cluster, where.shape, where.cost, where.training, tuple(lengths), mask, name)
        if key not in self._plans:
            begin = time.process_time()
            try:
                plan = planned(asked(where, lengths, mask), name, search=False)[1]
                self._plans[key] = Planned(plan, time.process_time() - begin)
            except Refused:
                self._plans[key] = None
        return self._plans[key]

    def tried(
        self, where: Experiment, lengths: Sequence[int], name: str, mask: Mask | None = None
    ) -> Simulation | None:
        """The strategy on simulated time; None where it refuses."""
        key = (where, tuple(lengths), mask, name)
        if key not in self._simulations:
            found = self.plan(where, lengths, name, mask)
            self._simulations[key] = found and simulate(found.plan, rules=where.rules, training=where.training)
        return self._simulations[key]

    def run(self, where: Experiment, lengths: Sequence[int], name: str, mask: Mask | None = None) -> Simulation:
        """The same of a strategy that must not refuse."""
        found = self.tried(where, lengths, name, mask)
        if found is None:
            raise ValueError(f"{name} refuses a batch of {len(lengths)} documents on {where.cluster}")
        return found

    def total(
        self, where: Experiment, batches: Sequence[Sequence[int]], name: str, time: Time, mask: Mask | None = None
    ) -> int | None:
        """Time over all batches; None where the strategy refuses one."""
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
        """The one strategy of ``names`` with the least time over all batches together, and that time."""
        totals = {name: self.total(where, batches, name, time, mask) for name in names}
        ran = {name: total for name, total in totals.items() if total is not None}
        best = min(ran, key=ran.__getitem__)
        return best, ran[best]

    def searched(self, where: Experiment, batches: Sequence[Sequence[int]], mask: Mask | None = None) -> list[str]:
        """Every static method that runs, in the one degree that serves all batches best."""
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
        """The strategy's speed over static methods, documents dealt by tokens and by load: of each the degree that the
        closed form finds best, and those of ``also``, so that no baseline of a row is stronger.
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


def asked(where: Experiment, lengths: Sequence[int], mask: Mask | None = None) -> Request:
    """What planners are asked: with equal tokens where only attention is timed."""
    request = where.request(lengths, mask)
    return attention_only(request) if where.training is None else request


def step_ns(simulation: Simulation) -> int:
    """Of the whole step, or of attention where no more is simulated."""
    return simulation.attention_ns if simulation.step is None else simulation.step.total_ns


def attention_ns(simulation: Simulation) -> int:
    """Of attention, both directions."""
    return simulation.attention_ns


def forward_ns(simulation: Simulation) -> int:
    """Of attention forward."""
    return simulation.pass_ns(False)


def backward_ns(simulation: Simulation) -> int:
    """Of attention backward."""
    return simulation.pass_ns(True)

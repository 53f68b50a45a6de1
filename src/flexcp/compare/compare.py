"""Compare: strategies side by side on one batch, or over several, each planned and simulated.

A static strategy named without a degree stands for its best degree, found by the closed form
(:func:`flexcp.schedule.predict.predict`); only that one is simulated. What a strategy refuses is a row with its reason.
Times are of the whole step that a request describes (:class:`~flexcp.simulator.step_parts.Training`), by which ``auto``
chooses too; of a request that describes none they are of attention alone, with equal tokens on all ranks, so that no
strategy wins by leaving a rank without any. Other ``rules`` and measured kernel times are questions about the same
plans: ``auto`` chooses as in training, by the cost model.

Speed-ups have a *baseline* with a name. On one batch it is the best static method *of the batch*, one for documents
dealt by tokens and one for documents dealt by load (``zigzag@load``): an oracle, because a training run keeps one
method for all its batches. Who compares a few strategies names the other static methods as ``baselines``, so that a
speed-up is never over a chosen few. Over several batches the baseline is the one method *fixed for the run*
(:mod:`flexcp.compare.static_choice`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from flexcp.arrays.totals import imbalance
from flexcp.cost import CostModel, Model
from flexcp.plan.placement import Placement
from flexcp.plan.plan import Plan
from flexcp.plan.statistics import bytes_a_layer
from flexcp.planners.auto.auto import auto_plan, step_ns
from flexcp.planners.request import Refused, Request
from flexcp.planners.static.bounds import static_methods
from flexcp.planners.static.dealing import BY_LOAD, deals_by_load
from flexcp.planners.static.static import STATIC as STATIC
from flexcp.planners.strategies import SLOW, STRATEGIES, find_strategy
from flexcp.schedule.predict import Prediction, predict
from flexcp.schedule.transfers import make_plan
from flexcp.simulator.passes import Rules
from flexcp.simulator.training import Ints, Simulation, simulate

STATIC_BY_LOAD = tuple(name + BY_LOAD for name in STATIC)
NAMES = tuple(name for name in STRATEGIES if name not in SLOW)
"""What is compared unless told."""
NEAR_PERCENT = 15
"""Degrees of a static method whose times in closed form differ by no more than this, about its error,
are told apart by simulation.
"""
MOST_SIMULATED = 3
Compute = Callable[[Plan, int, bool], Ints]
ATTENTION_ONLY = Model("attention only", hidden=1, layers=1, feed_forward=1)
"""A token costs nothing besides attention."""


@dataclass(frozen=True, eq=False)
class Row:
    """One strategy: its name with its degree, planned and simulated; or why it refused."""

    name: str
    planning_ms: float = 0.0
    simulation: Simulation | None = None
    prediction: Prediction | None = None
    refused: str | None = None

    @property
    def is_static(self) -> bool:
        return method_of(self.name) in STATIC

    @property
    def by_load(self) -> bool:
        """Whether it is a static method that deals documents by load."""
        return deals_by_load(self.name)

    @property
    def ns(self) -> int:
        """Simulated nanoseconds: of the step, or of attention alone."""
        assert self.simulation is not None
        step = self.simulation.step
        return self.simulation.attention_ns if step is None else step.total_ns

    @property
    def moved_bytes(self) -> int:
        """Bytes of one layer, forward and backward, the mean of all layers."""
        assert self.simulation is not None
        return bytes_a_layer(self.simulation.plan)

    @property
    def work_imbalance(self) -> float:
        """Largest over mean of attention's pairs over all layers."""
        assert self.simulation is not None
        return imbalance(self.simulation.plan.work_of_layers())


@dataclass(frozen=True, eq=False)
class Comparison:
    """All rows, and what was asked; ``baselines`` are further static methods,
    which only the choice of the best looks at.
    """

    request: Request
    rows: tuple[Row, ...]
    baselines: tuple[Row, ...] = ()

    @property
    def ran(self) -> list[Row]:
        """Rows with a time, the fastest first."""
        return _by_time(self.rows)

    @property
    def best_static(self) -> Row | None:
        """The fastest static method of the batch that deals documents by tokens."""
        return next((row for row in _by_time(self.rows + self.baselines) if row.is_static and not row.by_load), None)

    @property
    def best_static_by_load(self) -> Row | None:
        """The fastest static method of the batch that deals documents by load."""
        return next((row for row in _by_time(self.rows + self.baselines) if row.by_load), None)

    @property
    def added(self) -> list[Row]:
        """The best static methods that are in no row: what speed-ups are over although nobody asked for it."""
        return [
            row for row in (self.best_static, self.best_static_by_load) if row is not None and row in self.baselines
        ]

    @property
    def shown(self) -> list[Row]:
        """What a table shows: rows with a time and the baselines of their speed-ups, the fastest first."""
        return _by_time((*self.rows, *self.added))

    def speed_up(self, row: Row, by_load: bool = False) -> float | None:
        """The time of the best static method of the batch, dealt by tokens or by load, over this one's."""
        best = self.best_static_by_load if by_load else self.best_static
        return None if best is None else best.ns / row.ns

    @property
    def predict_error(self) -> float:
        """The largest relative difference of the closed form to the simulated time, over what is shown."""
        return max((abs(_predicted_ns(row) / row.ns - 1) for row in self.shown), default=0.0)


def compare(
    request: Request,
    names: Sequence[str] = NAMES,
    rules: Rules = Rules(),  # noqa: B008 - immutable
    on_row: Callable[[str], None] | None = None,
    compute: Compute | None = None,
    search: bool = True,
    baselines: Sequence[str] = (),
) -> Comparison:
    """Plan and simulate every strategy of ``names``; ``on_row`` is told which is next.

    ``compute(plan, mask, backward)`` gives kernel times ``[rank, slot]`` in the cost model's place. Without ``search``
    a static strategy without a degree is the one over all ranks, as in a plan, instead of the best degree.
    ``baselines`` are static strategies that speed-ups are over where they are the fastest, in rows or not.
    """
    request = _asked(request)

    def row(name: str) -> Row:
        if on_row is not None:
            on_row(name)
        return _row(request, name, rules, compute, search)

    rows = tuple(row(name) for name in names)
    found = {one.name for one in rows}
    others = (row(name) for name in baselines if name not in names)
    return Comparison(request, rows, tuple(one for one in others if one.name not in found))


def compare_batches(
    requests: Sequence[Request],
    names: Sequence[str],
    rules: Rules = Rules(),  # noqa: B008 - immutable
    tell: Callable[[str], None] = lambda _: None,
) -> dict[str, list[Row]]:
    """Rows of every strategy that takes all requests, one for each request;
    a static one with the one degree that serves all best.
    """
    tell(f"choosing degrees for {len(requests)} passes")
    asked = [_asked(request) for request in requests]
    rows: dict[str, list[Row]] = {n: [] for given in names if (n := common_degree(asked, given)) is not None}
    for number, request in enumerate(requests, 1):
        where = f"pass {number} of {len(requests)}"
        found = compare(
            request,
            list(rows),
            rules,
            lambda name, where=where: tell(f"{name}: planning and simulating {where}"),  # type: ignore[misc]
            search=False,
        )
        rows = {row.name: [*rows[row.name], row] for row in found.rows if row.simulation is not None}
    return rows


def method_of(name: str) -> str:
    """A strategy's name without its degree and without how it deals documents."""
    return name.partition("@")[0].partition(":")[0]


def common_degree(requests: Sequence[Request], name: str) -> str | None:
    """Of a static strategy named without a degree, the one degree that serves all requests in the least time;
    None if none does.

    Degrees are priced in closed form, and those near the least are simulated. The name is for :func:`compare` without
    ``search``. Any other name is its own answer.
    """
    if not _is_searched(name):
        return name
    totals: dict[str, int] | None = None
    for request in requests:
        found = {method: ns for ns, method, _ in _degrees(request, name)}
        totals = found if totals is None else {m: totals[m] + ns for m, ns in found.items() if m in totals}
    if not totals:
        return None
    near = _near([(ns, method) for method, ns in totals.items()])
    if len(near) == 1:
        return near[0]
    return min(near, key=lambda method: sum(_step_ns(request, _place(request, method), method) for request in requests))


def attention_only(request: Request) -> Request:
    """The same batch where nothing but attention costs time, with equal tokens."""
    free = request.layout is None
    return replace(request, cost=without_linear(request.cost), equal_tokens=free, training=None)


def _asked(request: Request) -> Request:
    return attention_only(request) if request.training is None else request


def without_linear(cost: CostModel) -> CostModel:
    """A cost model in which a token costs nothing besides attention."""
    return replace(cost, model=ATTENTION_ONLY)


def planned(request: Request, name: str, search: bool = True) -> tuple[str, Plan]:
    """A strategy's plan, and its name with the degree that was taken; raises :class:`Refused` where it refuses."""
    if name == "auto":  # which schedules what it simulates
        return name, auto_plan(request)
    name, placement = _placed(request, name) if search else (name, _place(request, name))
    return name, _scheduled(request, placement, name)


def _scheduled(request: Request, placement: Placement, name: str) -> Plan:
    return make_plan(placement, request.shape, request.cluster, request.cost, name)


def _step_ns(request: Request, placement: Placement, name: str) -> int:
    return step_ns(_scheduled(request, placement, name), request.training)


def _row(request: Request, name: str, rules: Rules, compute: Compute | None, search: bool) -> Row:
    try:
        begin = time.perf_counter()
        name, plan = planned(request, name, search)
        planning = (time.perf_counter() - begin) * 1000
    except Refused as refusal:
        return Row(name, refused=str(refusal))
    measured = None if compute is None else partial(compute, plan)
    found = simulate(plan, rules=rules, training=request.training, measured=measured)
    return Row(name, planning, found, predict(plan.placement, request.shape, request.cluster, request.cost))


def _by_time(rows: Iterable[Row]) -> list[Row]:
    return sorted((row for row in rows if row.simulation is not None), key=lambda row: row.ns)


def _placed(request: Request, name: str) -> tuple[str, Placement]:
    if not _is_searched(name):
        return name, _place(request, name)
    refusals: list[str] = []
    placements = list(_degrees(request, name, refusals))
    if not placements:
        # Degrees that cannot suit were not tried; the one over all ranks says why, where it does not run.
        try:
            return name, _place(request, name)
        except Refused as refusal:
            raise Refused(f"no degree of {name} suits this request; {(*refusals, refusal)[0]}") from None
    placed = {name: placement for _, name, placement in placements}
    near = _near([(ns, name) for ns, name, _ in placements])
    best = near[0] if len(near) == 1 else min(near, key=lambda name: _step_ns(request, placed[name], name))
    return best, placed[best]


def _near(priced: list[tuple[int, str]]) -> list[str]:
    """The degrees worth simulating: those whose price in closed form is near the least, a few of them,
    the cheapest first.
    """
    ordered = sorted(priced, key=lambda found: found[0])
    most = ordered[0][0] * (100 + NEAR_PERCENT) // 100
    return [name for ns, name in ordered[:MOST_SIMULATED] if ns <= most]


def _is_searched(name: str) -> bool:
    """Whether a name stands for several degrees."""
    return name.removesuffix(BY_LOAD) in STATIC and method_of(name) != "dp"


def _place(request: Request, name: str) -> Placement:
    place, argument = find_strategy(name)
    return place(replace(request, argument=argument))


def _degrees(request: Request, name: str, refusals: list[str] | None = None) -> Iterator[tuple[int, str, Placement]]:
    """The degrees that can run: predicted time, name, placement. Why others refuse goes into ``refusals``,
    where given.
    """
    dealing = BY_LOAD if deals_by_load(name) else ""
    for method in static_methods(request):
        if method.strategy == method_of(name):
            try:
                placement = method.place(replace(request, argument=method.argument + dealing))
            except Refused as refusal:
                if refusals is not None:
                    refusals.append(f"{method.name + dealing}: {refusal}")
                continue
            ns = predict(placement, request.shape, request.cluster, request.cost).total_ns
            yield ns, method.name + dealing, placement


def _predicted_ns(row: Row) -> int:
    assert row.prediction is not None and row.simulation is not None
    if row.simulation.step is None:
        return int((row.prediction.attention_ns + row.prediction.exposed_ns).max())
    return row.prediction.total_ns

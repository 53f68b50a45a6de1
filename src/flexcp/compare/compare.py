"""Comparison of strategies on one batch or over several: each strategy is planned and simulated.

A static strategy named without a degree stands for its best degree. Degrees are compared by the closed form
(:func:`flexcp.schedule.predict.predict`), and only the best, or the few that are nearly as good, are simulated. A
strategy that refuses the request becomes a row with the reason.

If a request describes a training step (:class:`~flexcp.simulator.step_parts.Training`), times are of the whole step,
which is also what ``auto`` minimizes. If it describes none, times are of attention alone, and all ranks keep equal
numbers of tokens, so that no strategy wins by leaving a rank without tokens. Other ``rules`` and measured kernel times
change only the simulation: ``auto`` still chooses by the cost model, as in training.

Every speed-up names its *baseline*. On one batch the baselines are the best static method *of the batch* with documents
dealt by tokens, and the best with documents dealt by load (``zigzag@load``). These are oracles, because a training run
keeps one method for all its batches. A comparison of a few strategies should pass the other static methods as
``baselines``, so that speed-ups are still relative to the best of all. Over several batches the baseline is the one
method *fixed for the run* (:mod:`flexcp.compare.static_choice`).
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
from flexcp.planners.static.dealing import BY_LOAD, deals_by_load, method_of
from flexcp.planners.static.static import STATIC as STATIC
from flexcp.planners.strategies import SLOW, STRATEGIES, find_strategy
from flexcp.planners.token_runs import check_queries_stay
from flexcp.schedule.predict import Prediction, predict
from flexcp.schedule.transfers import make_plan
from flexcp.simulator.passes import Rules
from flexcp.simulator.training import Ints, Simulation, simulate

STATIC_BY_LOAD = tuple(name + BY_LOAD for name in STATIC)
NAMES = tuple(name for name in STRATEGIES if name not in SLOW)
"""The strategies that are compared by default."""
NEAR_PERCENT = 15
"""Percent by which the closed form may err.

Degrees of a static method whose predicted times are so close to the least are simulated.
"""
MOST_SIMULATED = 3
"""The most degrees of a static method that are simulated."""
Compute = Callable[[Plan, int, bool], Ints]
"""``compute(plan, mask, backward)`` returns the nanoseconds ``[rank, slot]`` of kernels."""
ATTENTION_ONLY = Model("attention only", hidden=1, layers=1, feed_forward=1)
"""A model in which a token costs no time besides attention."""


@dataclass(frozen=True, eq=False)
class Row:
    """One strategy with its simulated plan, or with the reason why it refused the request.

    ``name`` includes the degree: over how many ranks a static strategy divides a document. ``planning_ms`` is the time
    of planning in milliseconds.
    """

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
        """Whether this is a static method that deals documents to groups by load instead of tokens."""
        return deals_by_load(self.name)

    @property
    def ns(self) -> int:
        """Simulated nanoseconds of the step, or of attention alone if the request describes no training step."""
        assert self.simulation is not None
        step = self.simulation.step
        return self.simulation.attention_ns if step is None else step.total_ns

    @property
    def moved_bytes(self) -> int:
        """Bytes that all ranks move in one layer, forward and backward together: the mean over all layers."""
        assert self.simulation is not None
        return bytes_a_layer(self.simulation.plan)

    @property
    def work_imbalance(self) -> float:
        """Attention work ((query, key) pairs in all layers) of the busiest rank over the mean of all ranks."""
        assert self.simulation is not None
        return imbalance(self.simulation.plan.work_of_layers())


@dataclass(frozen=True, eq=False)
class Comparison:
    """The rows of a comparison with their request.

    ``baselines`` are rows of further static methods, which serve only as baselines of speed-ups.
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
        """The fastest static method of the batch that deals documents by tokens; None if none has a time."""
        return next((row for row in _by_time(self.rows + self.baselines) if row.is_static and not row.by_load), None)

    @property
    def best_static_by_load(self) -> Row | None:
        """The fastest static method of the batch that deals documents by load; None if none has a time."""
        return next((row for row in _by_time(self.rows + self.baselines) if row.by_load), None)

    @property
    def added(self) -> list[Row]:
        """Baselines of the speed-ups that are not among ``rows`` and are therefore shown in addition."""
        return [
            row for row in (self.best_static, self.best_static_by_load) if row is not None and row in self.baselines
        ]

    @property
    def shown(self) -> list[Row]:
        """Rows of a printed table: all with a time and the baselines of their speed-ups, the fastest first."""
        return _by_time((*self.rows, *self.added))

    def speed_up(self, row: Row, by_load: bool = False) -> float | None:
        """Return the time of the best static method over the time of ``row``; None if there is no such method.

        The static method deals documents by tokens, or with ``by_load`` by load.
        """
        best = self.best_static_by_load if by_load else self.best_static
        return None if best is None else best.ns / row.ns

    @property
    def predict_error(self) -> float:
        """The largest relative difference between closed form and simulation among the shown rows, as a fraction."""
        return max((abs(_predicted_ns(row) / row.ns - 1) for row in self.shown), default=0.0)


def compare(
    request: Request,
    names: Sequence[str] = NAMES,
    rules: Rules = Rules(),
    on_row: Callable[[str], None] | None = None,
    compute: Compute | None = None,
    search: bool = True,
    baselines: Sequence[str] = (),
) -> Comparison:
    """Plan and simulate every strategy of ``names``; ``on_row`` is called with each name before its turn.

    ``compute(plan, mask, backward)`` returns kernel times ``[rank, slot]`` in nanoseconds that replace the cost
    model's. Without ``search``, a static strategy named without a degree is divided over all ranks instead of taking
    its best degree. ``baselines`` are further static strategies that speed-ups may be relative to, even if they are not
    in ``names``.
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
    rules: Rules = Rules(),
    tell: Callable[[str], None] = lambda _: None,
    accepts: Callable[[str], bool] = lambda _: True,
) -> dict[str, list[Row]]:
    """Return, for every strategy that accepts all requests, one row per request.

    Keys are the names of strategies. A static strategy named without a degree has the one degree that is best for all
    requests together; its name then includes it. ``tell`` receives progress messages. A strategy or degree for which
    ``accepts(name)`` is false is left out.
    """
    tell(f"choosing degrees for {len(requests)} passes")
    asked = [_asked(request) for request in requests]
    rows: dict[str, list[Row]] = {n: [] for given in names if (n := common_degree(asked, given, accepts)) is not None}
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


def common_degree(
    requests: Sequence[Request], name: str, accepts: Callable[[str], bool] = lambda _: True
) -> str | None:
    """Return the name of a static strategy with the one degree that takes the least time over all requests.

    Degrees are compared by the closed form, and those near the least time are simulated. The result is None if no
    degree accepts all requests. A name that already has a degree, or that is no static strategy, is returned as it is.
    Names for which ``accepts(name)`` is false are never returned. The returned name is meant for :func:`compare` with
    ``search=False``.
    """
    if not _is_searched(name):
        return name if accepts(name) else None
    totals: dict[str, int] | None = None
    for request in requests:
        found = {method: ns for ns, method, _ in _degrees(request, name)}
        totals = found if totals is None else {m: totals[m] + ns for m, ns in found.items() if m in totals}
    near = _near([(ns, method) for method, ns in (totals or {}).items()], accepts)
    if len(near) <= 1:
        return near[0] if near else None
    return min(near, key=lambda method: sum(_step_ns(request, _place(request, method), method) for request in requests))


def attention_only(request: Request) -> Request:
    """Return the request of attention alone: nothing else takes time."""
    return replace(request, cost=without_linear(request.cost), training=None)


def _asked(request: Request) -> Request:
    """Return the request as it is compared: of attention alone, if it describes no training step."""
    return attention_only(request) if request.training is None else request


def without_linear(cost: CostModel) -> CostModel:
    """Return the cost model with a token costing nothing besides attention."""
    return replace(cost, model=ATTENTION_ONLY)


def planned(request: Request, name: str, search: bool = True) -> tuple[str, Plan]:
    """Plan a strategy; return (its name with its degree, the plan), or raise :class:`Refused` if the strategy refuses.

    With ``search``, a static strategy named without a degree gets its best one; otherwise it is divided over all ranks.
    """
    if name == "auto":  # auto_plan has scheduled the plan already, to simulate it
        return name, auto_plan(request)
    name, placement = _placed(request, name) if search else (name, _place(request, name))
    return name, _scheduled(request, placement, name)


def refusal(request: Request, name: str) -> str | None:
    """Return why a strategy cannot place the tokens of a request, or None if it can; nothing is scheduled.

    A static strategy named without a degree is divided over all ranks.
    """
    try:
        _place(request, name)
    except Refused as refused:
        return str(refused)
    return None


def _scheduled(request: Request, placement: Placement, name: str) -> Plan:
    return make_plan(placement, request.shape, request.cluster, request.cost, name)


def _step_ns(request: Request, placement: Placement, name: str) -> int:
    return step_ns(_scheduled(request, placement, name), request.training)


def _row(request: Request, name: str, rules: Rules, compute: Compute | None, search: bool) -> Row:
    """Plan and simulate the strategy ``name`` and return its row; the arguments are those of :func:`compare`."""
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
    """Return the rows that have a time, the fastest first."""
    return sorted((row for row in rows if row.simulation is not None), key=lambda row: row.ns)


def _placed(request: Request, name: str) -> tuple[str, Placement]:
    """Return (name with its degree, placement) of a strategy, of the best degree if the name has none.

    Raise :class:`Refused` if no degree suits the request.
    """
    if not _is_searched(name):
        return name, _place(request, name)
    refusals: list[str] = []
    placements = list(_degrees(request, name, refusals))
    if not placements:
        # ``_degrees`` skips degrees that cannot run. The degree over all ranks is tried here for its reason.
        try:
            return name, _place(request, name)
        except Refused as refusal:
            raise Refused(f"no degree of {name} suits this request; {(*refusals, refusal)[0]}") from None
    placed = {name: placement for _, name, placement in placements}
    near = _near([(ns, name) for ns, name, _ in placements])
    best = near[0] if len(near) == 1 else min(near, key=lambda name: _step_ns(request, placed[name], name))
    return best, placed[best]


def _near(priced: list[tuple[int, str]], accepts: Callable[[str], bool] = lambda _: True) -> list[str]:
    """Return the names of the cheapest degrees from (nanoseconds by the closed form, name), at most MOST_SIMULATED.

    The time of all of them is within ``NEAR_PERCENT`` of the least. Those for which ``accepts(name)`` is false do not
    count; the cheapest are asked first, and no more than needed.
    """
    near, most = list[str](), 0
    for ns, name in sorted(priced, key=lambda found: found[0]):
        if len(near) == MOST_SIMULATED or (near and ns > most):
            break
        if accepts(name):
            most = most if near else ns * (100 + NEAR_PERCENT) // 100
            near.append(name)
    return near


def _is_searched(name: str) -> bool:
    """Return whether a name stands for several degrees: a static strategy without a degree, except ``dp``."""
    return name.removesuffix(BY_LOAD) in STATIC and method_of(name) != "dp"


def _place(request: Request, name: str) -> Placement:
    place, argument = find_strategy(name)
    placement = place(replace(request, argument=argument))
    check_queries_stay(request, placement)
    return placement


def _degrees(request: Request, name: str, refusals: list[str] | None = None) -> Iterator[tuple[int, str, Placement]]:
    """Yield (predicted nanoseconds, name, placement) for every degree of a static strategy that can run.

    The reasons of degrees that refuse the request are appended to ``refusals``.
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
    """Return the nanoseconds of the closed form for what :attr:`Row.ns` simulates."""
    assert row.prediction is not None and row.simulation is not None
    if row.simulation.step is None:
        return int((row.prediction.attention_ns + row.prediction.exposed_ns).max())
    return row.prediction.total_ns

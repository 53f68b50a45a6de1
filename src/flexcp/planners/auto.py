"""auto: the best of a portfolio, scored by the predicted time of the whole step.

Candidates are the static methods (every kind, in a few degrees) and the dynamic planners. Each is placed and scored by
:func:`flexcp.schedule.predict.predict`; only the winner is ever scheduled (with a cap on memory or peers, every one). Two rules:

- **No regression.** A static method is what a user has today, and a cost model errs. So the best static one is left only for a placement
  whose predicted gain exceeds the model's stated error. Either way the answer is predicted at least as fast as every static one. (One
  exception to the error, none to the promise: a static placement of more than ``LARGE`` regions is itself too slow to make, so below
  ``HIGH_EFFORT`` it is not tried once something else beats its bound.)
- **No clock.** ``effort`` is how many candidates may be placed: 2 is ``blocks`` and the most promising static one, the default adds
  ``groups``, unless ``blocks`` is as good as perfect, and whatever static ones can still matter, ``HIGH_EFFORT`` adds ``hypergraph`` where
  Mt-KaHyPar is installed.

Placing a static method over many ranks is most of the work, and most of them cannot win. So each has a *bound* first, arithmetic on sums:
its compute divided evenly inside its groups, for the average group and for the group of the heaviest document, and its own traffic hidden
behind that compute as well as can be. Static ones are placed in ascending order of bounds until no bound can change the answer any more.

With a fixed layout only methods that span all ranks can run: ``blocks`` and the static ones without a degree. Where the user gave
tolerances or a cap on memory or peers, a candidate that breaks one is no candidate.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, replace

from flexcp.plan.placement import Placement
from flexcp.planners.blocks.blocks import blocks
from flexcp.planners.groups.groups import groups
from flexcp.planners.request import Refused, Request, refuse_over_memory, refuse_over_peers
from flexcp.planners.static.bounds import Place, StaticBounds, StaticMethod, static_methods
from flexcp.planners.token_runs import check_tolerances
from flexcp.schedule.predict import lower_bound, milliseconds, predict
from flexcp.schedule.transfers import make_plan

DEFAULT_EFFORT = 16
LEAST_EFFORT = 2
HIGH_EFFORT = 64
TOLERANT = ("blocks", "hypergraph")
"""Planners that keep tolerances."""
CLOSE_TO_PERFECT = 32
"""Below high effort no other planner is asked once one is within 1/32 of perfectly divided compute, unless that decides about static."""
FEW = 16
"""Static methods of which only close bounds are made."""
LARGE = 128_000
"""Regions of a static placement beyond which it is not made below high effort, if a dynamic one already beats its bound."""


def auto(request: Request) -> Placement:
    """The placement with the least predicted step time, static unless leaving static pays."""
    if request.argument:
        raise ValueError(f"auto takes no degree; got 'auto:{request.argument}'")
    effort = DEFAULT_EFFORT if request.effort is None else request.effort
    if effort < 0:
        raise ValueError(f"effort must be 0 or more, a count of candidates; got {effort}")
    search = _Search(request, max(effort, LEAST_EFFORT))
    perfect = lower_bound(request.batch, request.shape, request.cluster, request.cost)
    spared = []
    for name, place in _dynamic_planners(request, effort):
        if effort >= HIGH_EFFORT or not search.is_close_to(perfect):
            search.try_dynamic(name, place)
        elif search.left > 1:
            spared.append((name, place))
            search.left -= 1  # kept for it
    methods = static_methods(request)
    bounds = StaticBounds(request)
    left = methods
    if len(methods) > FEW:  # of many, loose bounds rule some out first
        left = [m for b, m in zip(bounds.loose(methods), methods, strict=True) if not search.leaves_out(b, m)]
    for bound, method in sorted(zip(bounds.close(left), left, strict=True), key=lambda found: found[0]):
        if not search.leaves_out(bound, method):
            search.try_static(method)
    for name, place in spared:
        search.left += 1
        if search.could_leave_static(perfect):
            search.try_dynamic(name, place)
    return search.answer()


def _dynamic_planners(request: Request, effort: int) -> list[tuple[str, Place]]:
    found: list[tuple[str, Place]] = [("blocks", blocks)]
    if request.layout is None and effort > LEAST_EFFORT:
        found.append(("groups", groups))
    if request.layout is None and effort >= HIGH_EFFORT and importlib.util.find_spec("mtkahypar"):
        from flexcp.planners.hypergraph.hypergraph import hypergraph

        found.append(("hypergraph", hypergraph))
    return found


# --- the search --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Scored:
    """A candidate that was placed."""

    name: str
    placement: Placement
    ns: int


class _Search:
    """What was tried so far, and what may still be."""

    def __init__(self, request: Request, effort: int) -> None:
        self.request = request
        # Most strategies balance by their own rule: they are asked without tolerances, and judged by them.
        self.without_tolerances = replace(request, compute_tolerance=None, token_tolerance=None)
        self.left = effort
        self.high = effort >= HIGH_EFFORT
        self.dynamic: _Scored | None = None
        self.static: _Scored | None = None
        self.untried: tuple[int, str] | None = None
        self.refusals: list[str] = []

    def try_dynamic(self, name: str, place: Place) -> None:
        request = self.request if name in TOLERANT else self.without_tolerances
        self.dynamic = _faster(self.dynamic, self._scored(name, place, request))

    def is_close_to(self, bound: int) -> bool:
        """Whether the best dynamic placement so far leaves nearly nothing to gain."""
        return self.dynamic is not None and self.dynamic.ns * CLOSE_TO_PERFECT < bound * (CLOSE_TO_PERFECT + 1)

    def could_leave_static(self, bound: int) -> bool:
        """Whether a static one would be the answer, and a dynamic one as fast as the bound would not let it."""
        fixed, error = self.static, 1000 + self.request.cost.error_permille
        return fixed is not None and not self._pays_to_leave(fixed.ns) and fixed.ns * 1000 > bound * error

    def try_static(self, method: StaticMethod) -> None:
        found = self._scored(method.name, method.place, replace(self.without_tolerances, argument=method.argument))
        self.static = _faster(self.static, found)

    def leaves_out(self, bound: int, method: StaticMethod) -> bool:
        """Whether a static method that takes at least ``bound`` needs no try."""
        if self._can_matter(bound, method):
            return False
        self.untried = min((bound, method.name), self.untried or (bound, method.name))
        return True

    def _can_matter(self, bound: int, method: StaticMethod) -> bool:
        if self.left == 0 or (self.static is not None and bound >= self.static.ns):
            return False
        if self.dynamic is None:
            return True
        if self._pays_to_leave(bound):
            return False
        small = self.high or method.regions(self.request) <= LARGE
        return small or bound < self.dynamic.ns

    def answer(self) -> Placement:
        """The winner, with the reason in its note."""
        fixed, free = self.static, self.dynamic
        winner = fixed or free
        if winner is None:
            raise Refused(f"no strategy can place this batch: {self.refusals[0]}")
        error = f"the cost model's error of {self.request.cost.error_permille / 10:g} %"
        why = "the only one that can run here"
        if fixed is not None and free is not None:
            if self._pays_to_leave(fixed.ns):
                winner = free
                why = (
                    f"the best static one, {fixed.name}, takes {milliseconds(fixed.ns)} ms, a difference beyond {error}"
                )
            elif self.untried is not None and free.ns <= self.untried[0] < fixed.ns:
                # A static one that was too large to be made may beat those that were, but not this.
                winner = free
                bound, name = self.untried
                least = f"{name} at least {milliseconds(bound)} ms, and is more than this effort places"
                why = f"{fixed.name} takes {milliseconds(fixed.ns)} ms, {least}"
            else:
                why = f"{free.name} with {milliseconds(free.ns)} ms is not better by more than {error}"
        elif free is not None and self.untried is not None:
            bound, name = self.untried
            why = f"no static one takes less than {milliseconds(bound)} ms ({name})"
            if not self._pays_to_leave(bound):
                why += f"; that is within {error}, but more than this effort places"
        own = f" ({winner.placement.note})" if winner.placement.note else ""
        return replace(winner.placement, note=f"{winner.name}{own}: {milliseconds(winner.ns)} ms predicted; {why}")

    def _pays_to_leave(self, static_ns: int) -> bool:
        assert self.dynamic is not None
        return static_ns * 1000 > self.dynamic.ns * (1000 + self.request.cost.error_permille)

    def _scored(self, name: str, place: Place, request: Request) -> _Scored | None:
        if self.left == 0:
            return None
        self.left -= 1
        known = (request.shape, request.cluster, request.cost)
        try:
            placement = place(request)
            check_tolerances(self.request, placement)
            if (
                request.max_memory_per_rank is not None or request.max_peers is not None
            ):  # only known of a candidate's plan
                plan = make_plan(placement, *known, name, request.keep_kv, request.most_ahead)
                refuse_over_memory(request, plan)
                refuse_over_peers(request, plan)
        except Refused as refusal:
            self.refusals.append(f"{name}: {refusal}")
            return None
        return _Scored(name, placement, predict(placement, *known, request.keep_kv).total_ns)


def _faster(best: _Scored | None, other: _Scored | None) -> _Scored | None:
    """The faster of two; the first of equals."""
    if best is None or other is None:
        return best or other
    return other if other.ns < best.ns else best

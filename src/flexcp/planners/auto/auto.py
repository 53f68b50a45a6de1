"""auto: take the fastest of many placements, by the event simulator.

A candidate can have three prices. Each takes more time to compute than the one before and is closer to the truth: a
lower bound from sums alone (:mod:`flexcp.planners.auto.candidates`), the prediction of the *closed form* for its
placement (:mod:`flexcp.planners.price`), and the time of its plan in the event simulator (:mod:`flexcp.simulator`). The
search is best-first: the candidate whose best known price is lowest is placed or simulated next, until no remaining
candidate can be faster than the fastest simulated one, which is taken. A candidate may have several placements, such as
``groups`` for its settings; each of them is priced and simulated separately.

- **The event simulator decides.** The closed form only proposes: at most ``MOST_SIMULATED`` candidates are scheduled
  and simulated. The best static candidates by tokens and by load are simulated beyond that number, if their price is
  lower than the fastest simulated time.
- **What is simulated** is the step that the request describes (:class:`~flexcp.simulator.step_parts.Training`), the
  same that ``compare`` reports: all layers forward and backward, vocabulary, gradient sync, and the collectives of
  tensor parallelism. If the request describes no step, only the layers are simulated; if the layers consist of
  attention only, each of its passes is simulated separately. Times are integers in nanoseconds, computed from integers,
  so all machines choose the same plan. Of equally fast candidates, the first in the list is taken; static ones come
  first.
- **Stages.** The closed form chooses how each pass is cut into stages (:mod:`flexcp.schedule.thin_ends`,
  :mod:`flexcp.schedule.inside_first`, :mod:`flexcp.schedule.inputs_first`). For the fastest plan, the next best way is
  simulated as well, separately for the forward and the backward, unless these have more than ``MANY_TRANSFERS``
  transfers.
- **Near ties.** On several nodes, if layers consist of attention alone, dynamic plans that are nearly as fast as the
  fastest one are simulated again with attention that takes 30 % less and 30 % more time. The one that is farthest
  behind the others the least is taken, so that wrong prices cost little. In other layers they cost little anyway.
- **Relays.** If keys are relayed inside nodes in the fastest plan, the plan without relays is simulated as well.
- **Candidates passed over.** A candidate is passed over if its price is not below the fastest simulated time. The
  prices are optimistic. This includes the closed form with the least copies, after subtracting what it may overestimate
  on several nodes. The closed form is skipped for static methods with so many regions that simulating them is faster.
- **Variants.** Each other setting of ``blocks`` is a variant, of ``blocks`` itself or of another setting. It is tried
  only if the price of what it varies, less what it may gain, is below the fastest simulated time.
- **Many documents.** All steps take time in proportion to the number of documents. With more than ``MANY_DOCUMENTS``,
  most documents are short and easily distributed, and a candidate is tried only if its price promises a gain of more
  than 1 / ``WORTH_TRYING``.
- **Effort.** No clock is used. ``effort`` is how many candidates may be placed: 2 means ``blocks`` and the most
  promising static candidate; the default adds ``groups`` and the static candidates that can still win; ``HIGH_EFFORT``
  adds ``hypergraph`` if Mt-KaHyPar is installed. Above the least effort planners of other systems are tried as well on
  few ranks, besides the numbers that are limited. Below ``HIGH_EFFORT``, static methods with more than ``LARGE``
  transfers are passed over, because scheduling one would take longer than all others together. If the request gives no
  effort, more candidates are placed and simulated as long as their plans have fewer than ``FEW_TRANSFERS`` transfers
  together: prices are least certain in small batches, whose plans take little time to simulate.

If the user gave tolerances or limits on memory or peers, candidates that break one are dropped. As long as all
candidates break one, more are tried than the effort says.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from flexcp.plan.placement import Placement
from flexcp.plan.plan import Plan
from flexcp.planners.auto.candidates import HIGH_EFFORT, LEAST_EFFORT, Candidate, find_candidates
from flexcp.planners.price import price_ns
from flexcp.planners.request import Refused, Request, refuse_over_memory, refuse_over_peers
from flexcp.planners.token_runs import check_queries_stay, check_tolerances
from flexcp.schedule.analysis import MaskAnalysis, analyse, in_other_stages
from flexcp.schedule.predict import milliseconds
from flexcp.schedule.transfers import make_plan, with_analysis
from flexcp.simulator.step_parts import Training, layers_alone
from flexcp.simulator.training import Models, pass_models, simulate, simulated_step

DEFAULT_EFFORT = 16
"""How many candidates may be placed if the request does not say."""
MOST_SIMULATED = 12
"""How many candidates are simulated at most, apart from the best static ones."""
MANY_REGIONS = 150_000
"""With more regions than this, a static method is not priced in closed form before it is simulated.

The closed form counts all regions and takes longer than the event simulator, which counts rings by position.
"""
FEW_TRANSFERS = 2000
"""Without an effort in the request, numbers of candidates are not limited before so many transfers are simulated."""
NEAR_PERMILLE = 1030
"""Dynamic plans with at most this time, per mille of the fastest one's, are compared under wrong prices as well."""
WRONG_PERCENT = (70, 130)
"""The times of attention kernels under which they are compared, in per cent of those of the cost model."""
VARIANT_PERMILLE = 950
"""The least time that other settings of a candidate are expected to take, per mille of the candidate's price."""
TOLD_PERMILLE = 900
"""The note gives the bound of candidates that were passed over only if it is at least this, per mille of the time of
the plan taken: a lower bound says nothing about how close they come.
"""
LARGE = 400_000
"""Below ``HIGH_EFFORT``, static methods with more transfers in the backward are only scheduled if nothing else is."""
MANY_TRANSFERS = 50_000
"""The stages of a pass with more transfers are not tried in another way: simulating it again would take too long."""
MANY_DOCUMENTS = 65_536
"""With more documents than this, no candidate is tried for a small gain."""
WORTH_TRYING = 128
"""With more than ``MANY_DOCUMENTS``, a candidate is tried if it may save more than one part in this many."""
LONGEST_NS = 1 << 38
"""If a layer takes longer than this (over four minutes), plans keep the time of the closed form.

Longer times do not fit the event simulator's clock.
"""


def auto(request: Request) -> Placement:
    """Return the placement with the least simulated step time; raise Refused if no strategy can place the batch."""
    return auto_plan(request).placement


def auto_plan(request: Request) -> Plan:
    """Return the plan with the least simulated step time; the note of its placement says why it was taken.

    Raise Refused if no strategy can place the batch within the request's limits.
    """
    if request.argument:
        raise ValueError(f"auto takes no degree; got 'auto:{request.argument}'")
    effort = DEFAULT_EFFORT if request.effort is None else request.effort
    if effort < 0:
        raise ValueError(f"effort must be 0 or more, a count of candidates; got {effort}")
    search = _Search(request, max(effort, LEAST_EFFORT))
    search.run(find_candidates(request, search.effort))
    if search.best is None:
        raise Refused(f"no strategy can place this batch: {search.refusals[0]}")
    search.choose_among_near_ones()
    search.try_without_relays()
    search.try_other_stages()
    plan = search.best.plan
    return replace(plan, requested="auto", placement=replace(plan.placement, note=search.words()))


@dataclass(frozen=True, eq=False)
class _Placed:
    """A placement of a candidate, not simulated yet.

    ``ns`` is its price in closed form, or the candidate's lower bound if it has too many regions. ``analysis`` and
    ``plan`` are set if they have been computed already, so that later steps need not do it again.
    """

    candidate: Candidate
    placement: Placement
    ns: int
    analysis: list[MaskAnalysis] | None
    plan: Plan | None = None


@dataclass(frozen=True, eq=False)
class _Simulated:
    """A candidate's plan and its simulated nanoseconds; ``order`` is the candidate's place in the list of all."""

    candidate: Candidate
    plan: Plan
    ns: int
    order: int
    analysis: list[MaskAnalysis] | None
    models: Models
    """The models of the plan's passes; none if it takes too long to be simulated."""
    other_stages: tuple[str, ...] = ()
    """The passes that are cut into stages in another way than in the strategy's own plan."""
    straight: bool = False
    """Whether keys go to every reader directly, although the strategy's own plan relays them inside nodes."""

    @property
    def name(self) -> str:
        """The name of the candidate."""
        return self.candidate.name


class _Search:
    """The search: what was tried so far, and what may still be tried.

    ``effort`` is how many candidates may be placed, ``placed`` how many were (without those beyond the effort), and
    ``accepted`` how many placements kept all limits. ``passed_over`` is the lowest price that was not simulated, by how
    candidates deal documents (:attr:`~flexcp.planners.auto.candidates.Candidate.dealing`). ``refusals`` say why
    candidates were dropped. ``transfers`` counts those of all simulated plans.
    """

    def __init__(self, request: Request, effort: int) -> None:
        self.request = request
        self.effort = effort
        self.placed = 0
        self.accepted = 0
        self.simulated: list[_Simulated] = []
        self.best: _Simulated | None = None
        self.passed_over: dict[str, int] = {}
        self.refusals: list[str] = []
        self.transfers = 0

    def run(self, candidates: Sequence[Candidate]) -> None:
        """Place or simulate the candidate with the lowest known price, again and again, until no other can win."""
        numbered = list(enumerate(candidates))
        queue: list[tuple[int, int, int, Candidate | _Placed]] = [
            (c.least_ns, i, 0, c) for i, c in numbered if not c.variant_of
        ]
        heapq.heapify(queue)
        while queue:
            price, order, number, item = heapq.heappop(queue)
            if not self._can_matter(price):
                for left in sorted([(price, order, number, item), *queue], key=lambda each: each[:3]):
                    self._pass_over(left[0], left[3])
                return
            if isinstance(item, _Placed):
                if self._may_simulate(item.candidate):
                    self._simulate(item, order)
                else:
                    self._pass_over(price, item)
            elif self._may_place(item) and self._may_simulate(item):
                if item.closer_ns is not None:
                    closer = max(item.least_ns, item.optimistic(item.closer_ns()))
                    heapq.heappush(queue, (closer, order, 0, replace(item, least_ns=closer, closer_ns=None)))
                    continue
                self.placed += not item.beyond_effort
                variants = [(i, c) for i, c in numbered if c.variant_of == item.name]
                for found in self._place(item):
                    self.accepted += 1
                    heapq.heappush(queue, (item.optimistic(found.ns), order, self.accepted, found))
                    for entry in [(max(c.least_ns, variant_ns(found.ns)), i, 0, c) for i, c in variants]:
                        heapq.heappush(queue, entry)
            else:
                self._pass_over(price, item)

    def _can_matter(self, price: int) -> bool:
        """Return whether a candidate with this price may be faster than the best one so far, by enough to be tried."""
        if self.best is None:
            return True
        if self.request.batch.documents > MANY_DOCUMENTS:
            return price * WORTH_TRYING < self.best.ns * (WORTH_TRYING - 1)
        return price < self.best.ns

    def _is_small(self) -> bool:
        """Return whether so little was simulated that numbers of candidates need no limit."""
        return self.request.effort is None and self.transfers < FEW_TRANSFERS

    def _may_place(self, candidate: Candidate) -> bool:
        """Return whether a candidate may be placed."""
        return candidate.beyond_effort or self.placed < self.effort or not self.accepted or self._is_small()

    def _may_simulate(self, candidate: Candidate) -> bool:
        """Return whether a candidate may be simulated.

        Large ones may not below ``HIGH_EFFORT``, once there is a result. Others may while fewer than ``MOST_SIMULATED``
        were, and so may small ones, those beyond the effort, and the first static candidate of each way to distribute
        documents (by tokens, by load).
        """
        if candidate.transfers > LARGE and self.effort < HIGH_EFFORT and self.best is not None:
            return False
        first_of_its_dealing = candidate.is_static and all(
            s.candidate.dealing != candidate.dealing for s in self.simulated
        )
        counted = sum(not s.candidate.beyond_effort for s in self.simulated)
        return counted < MOST_SIMULATED or candidate.beyond_effort or first_of_its_dealing or self._is_small()

    def _place(self, candidate: Candidate) -> Iterator[_Placed]:
        """Yield the placements of a candidate that keep all limits, with their prices; note why others are refused."""
        try:
            for placement in candidate.placed():
                found = self._priced(candidate, placement)
                if found is not None:
                    yield found
        except Refused as refusal:
            self.refusals.append(f"{candidate.name}: {refusal}")

    def _priced(self, candidate: Candidate, placement: Placement) -> _Placed | None:
        """Return a placement with its price, or None if it breaks a limit."""
        request = self.request
        known = (request.shape, request.cluster, request.cost)
        try:
            check_tolerances(request, placement)
            check_queries_stay(request, placement)
            needed = placement.traffic.kind == "needed"
            analysis = analyse(placement, *known, request.keep_kv, request.most_ahead) if needed else None
            placed = _Placed(candidate, placement, candidate.least_ns, analysis)
            if candidate.regions <= MANY_REGIONS:
                placed = replace(placed, ns=price_ns(request, placement, analysis))
            if request.max_memory_per_rank is None and request.max_peers is None:
                return placed
            plan = self._planned(placed)  # these limits can only be checked on a plan
            refuse_over_memory(request, plan)
            refuse_over_peers(request, plan)
            return replace(placed, plan=plan)
        except Refused as refusal:
            self.refusals.append(f"{candidate.name}: {refusal}")
            return None

    def _planned(self, placed: _Placed) -> Plan:
        """Return the plan of a placement."""
        request = self.request
        known = (request.shape, request.cluster, request.cost, placed.candidate.name)
        return make_plan(placed.placement, *known, request.keep_kv, request.most_ahead, placed.analysis)

    def _simulate(self, placed: _Placed, order: int) -> None:
        """Simulate a placement and update the best one; ``order`` decides between equally fast ones."""
        plan = placed.plan or self._planned(placed)
        ns = placed.ns
        models: Models = []
        if not self._is_too_long(placed.ns):
            models = pass_models(plan)
            ns = step_ns(plan, self.request.training, models)
        self.simulated.append(_Simulated(placed.candidate, plan, ns, order, placed.analysis, models))
        self.transfers += sum(len(one.transfers) for pair in plan.programs for one in pair)
        self.best = min(self.simulated, key=lambda found: (found.ns, found.order))

    def choose_among_near_ones(self) -> None:
        """Choose between dynamic plans that are nearly equally fast by their times if kernels are slower or faster.

        The plan is taken that is farthest behind the fastest of them the least. Static plans are left alone: one that
        is faster by events is taken, none is preferred to a faster dynamic one, and no plan that is slower than one is
        near.
        """
        best, request = self.best, self.request
        assert best is not None
        most = min([best.ns * NEAR_PERMILLE // 1000, *(s.ns for s in self.simulated if s.candidate.is_static)])
        near = [s for s in self.simulated if not s.candidate.is_static and s.ns <= most]
        many = any(len(one.transfers) > MANY_TRANSFERS for s in near for pair in s.plan.programs for one in pair)
        if request.cluster.nodes == 1 or not request.cost.attention_alone(request.shape):
            return
        if best not in near or len(near) == 1 or many or self._is_too_long(best.ns):
            return
        costs = [request.cost.with_kernels(percent) for percent in WRONG_PERCENT]
        times = [[step_ns(replace(s.plan, cost=cost), request.training) for cost in costs] for s in near]
        least = [min(each) for each in zip(*times, strict=True)]
        behind = [max(ns * 1000 // fastest for ns, fastest in zip(mine, least, strict=True)) for mine in times]
        self.best = min(zip(behind, near, strict=True), key=lambda each: (each[0], each[1].ns, each[1].order))[1]

    def try_without_relays(self) -> None:
        """Let keys that cross nodes go to every reader directly in the fastest plan, if that is faster.

        This is not tried under a limit on memory or peers, because each rank then receives from more ranks.
        """
        best, request = self.best, self.request
        assert best is not None
        limited = request.max_memory_per_rank is not None or request.max_peers is not None
        if best.analysis is None or limited or self._is_too_long(best.ns):
            return
        if not any(len(mask.needs.keys.relays) for mask in best.analysis):
            return
        placement = replace(best.plan.placement, traffic=replace(best.plan.placement.traffic, relay=False))
        known = (request.shape, request.cluster, request.cost)
        straight = analyse(placement, *known, request.keep_kv, request.most_ahead)
        plan = self._planned(_Placed(best.candidate, placement, best.ns, straight))
        models = pass_models(plan)
        ns = step_ns(plan, request.training, models)
        if ns < best.ns:
            self.best = replace(best, plan=plan, ns=ns, analysis=straight, models=models, straight=True)
            self.simulated[self.simulated.index(best)] = self.best

    def try_other_stages(self) -> None:
        """Cut the passes of the fastest plan into stages in the next best way, where that is faster in the simulator.

        The forward is tried first, then the backward.
        """
        for backward in (False, True):
            best = self.best
            assert best is not None
            many = any(len(pair[backward].transfers) > MANY_TRANSFERS for pair in best.plan.programs)
            if best.analysis is None or many or self._is_too_long(best.ns):
                continue
            others = in_other_stages(best.analysis, backward)
            if others is None:
                continue
            plan = with_analysis(best.plan, others, backward, self.request.most_ahead)
            models = pass_models(plan, like=best.plan, known=best.models)
            ns = step_ns(plan, self.request.training, models)
            if ns < best.ns:
                ways = (*best.other_stages, "backward" if backward else "forward")
                self.best = replace(best, plan=plan, ns=ns, analysis=others, models=models, other_stages=ways)
                self.simulated[self.simulated.index(best)] = self.best

    def _is_too_long(self, ns: int) -> bool:
        """Return whether layers are too long for the event simulator's clock, if a whole step takes ``ns``."""
        return ns // self.request.batch.layers > LONGEST_NS

    def _pass_over(self, price: int, item: Candidate | _Placed) -> None:
        """Note the price of a candidate that is not simulated, if it is the first that deals documents in its way.

        Candidates come in the order of their prices, so the lowest price of each way is noted.
        """
        candidate = item if isinstance(item, Candidate) else item.candidate
        self.passed_over.setdefault(candidate.dealing, price)

    def words(self) -> str:
        """Return the note for users: what was taken, compared with what, and by how much it is faster."""
        assert self.best is not None
        best, own = self.best, self._own_words(self.best)
        others = sorted((s for s in self.simulated if s is not best), key=lambda s: s.ns)
        said = []
        for dealing in ("", "tokens", "load"):
            found = next((s for s in others if s.candidate.dealing == dealing), None)
            alike = best.candidate.dealing == dealing
            # With a single group no documents are distributed; such a method counts as one by tokens.
            kind = {"": "dynamic one", "tokens": "static one by tokens"}.get(
                dealing, "static one of several groups by load"
            )
            if found is not None:
                name = f"{found.name} in other settings" if found.name == best.name else found.name
                times = f"{found.ns / best.ns:.3f} times as fast as {name}"
                safer = ", but safer if kernels are slower or faster" if found.ns < best.ns else ""
                # Only simulated candidates are compared; one that was not simulated may be faster.
                next_one, of_those = ("next", "") if alike else ("fastest", " that was simulated")
                time = f"{times} ({milliseconds(found.ns)} ms)"
                said.append((found.ns, f"{time}, the {next_one} {kind}{of_those}{safer}"))
            elif dealing in self.passed_over and not alike:  # none was simulated, so only a bound is known
                price = self.passed_over[dealing]
                if price * 1000 >= best.ns * TOLD_PERMILLE:
                    said.append((price, f"no {kind} takes less than {milliseconds(price)} ms"))
        alone = "no other one was simulated" if self.passed_over else "the only one that can run here"
        why = "; ".join(text for _, text in sorted(said)) or alone
        time = f"{milliseconds(best.ns)} ms a step simulated"
        return f"{best.name}{f' ({own})' if own else ''}: {time}; {why} ({self._step_words()})"

    @staticmethod
    def _own_words(best: _Simulated) -> str:
        """Return the planner's note about its placement, and how the plan differs from the strategy's own plan."""
        stages = " and ".join(best.other_stages)
        other = f"{stages} in other stages than --strategy {best.name} has" if stages else ""
        straight = f"without the relays of --strategy {best.name}" if best.straight else ""
        return "; ".join(filter(None, (best.plan.placement.note, straight, other)))

    def _step_words(self) -> str:
        """Return what the times include, so that readers can compare them with other times of the same plan."""
        layers, training = self.request.batch.layers, self.request.training
        of = f"times of {layers} layer{'s' if layers > 1 else ''}"
        if training is None:
            return f"{of}, without vocabulary, gradient sync and all-reduces of tensor parallelism"
        sync = "no gradient sync" if training.sync == "none" else f"gradient sync ({training.sync})"
        tp = f" and all-reduces of tp {training.tp}" if training.tp > 1 else ""
        return f"{of} with vocabulary, {sync}{tp}"


def variant_ns(price: int) -> int:
    """Return the least time in nanoseconds that other settings of a candidate with this price are expected to take."""
    return price * VARIANT_PERMILLE // 1000


def step_ns(plan: Plan, training: Training | None = None, models: Models | None = None) -> int:
    """Return the simulated nanoseconds of a step, or of its layers only if ``training`` is None.

    If the layers consist of attention only, each pass of attention is simulated separately, with all ranks starting
    together. ``models`` are those of the plan's passes, if they are known.
    """
    if training is None and plan.cost.attention_alone(plan.shape):
        return simulate(plan, models=models).attention_ns
    return simulated_step(plan, training or layers_alone(plan.cost, plan.shape), models=models).total_ns

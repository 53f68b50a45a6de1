"""auto: the fastest of many placements, by the event simulator.

Three prices of a candidate, each dearer to find and closer to the truth: what it takes *at least* (sums alone,
:mod:`flexcp.planners.auto.candidates`), what the *closed form* predicts of its placement
(:mod:`flexcp.planners.price`), and what its plan takes *by events* (:mod:`flexcp.simulator`). The search is best first:
of all candidates the one whose closest known price is least is looked at next, placed or simulated, until nothing that
is left can be faster than the fastest simulated one. That one is taken. A candidate may have several placements, as
``groups`` has for each of its settings: each is priced and simulated by itself.

- **Events decide.** The closed form proposes: ``MOST_SIMULATED`` candidates at most are scheduled and simulated, always
  among them the best static one by tokens and the best by load, if they are predicted to be anywhere near the fastest.
- **What is simulated** is the step that the request describes (:class:`~flexcp.simulator.step_parts.Training`), which
  is what ``compare`` reports: all layers forward and backward, vocabulary, gradient sync, collectives of tensor
  parallelism. Of a request that describes none it is the layers alone; where nothing but attention costs time, its
  passes one by one. Times are integers of nanoseconds from integers, so all machines choose the same; of equal ones the
  first of the list wins, a static one.
- **Stages.** In what stages a pass is cut best (:mod:`flexcp.schedule.thin_ends`,
  :mod:`flexcp.schedule.inside_first`) the closed form says; of the fastest plan events say it again, for the forward
  and the backward apart.
- **What is left out.** A candidate is passed over when its price is not under the fastest simulated time: prices are
  optimistic, the closed form with the least copies too, less what it may be too slow by over several nodes. It is left
  out for a static method of so many regions that events are found sooner.
- **Variants.** Other settings of ``blocks`` are looked at only if its price, less what they may gain, is under the
  fastest simulated time.
- **Many documents.** Everything takes time in proportion to documents. With more than ``MANY_DOCUMENTS``, most of which
  are short and easily dealt, a candidate is looked at only when its price promises a gain of more than 1 /
  ``WORTH_TRYING``.
- **No clock.** ``effort`` is how many candidates may be placed: 2 is ``blocks`` and the most promising static one, the
  default adds ``groups`` and the static ones that can still matter, ``HIGH_EFFORT`` adds ``hypergraph`` where
  Mt-KaHyPar is installed. Below it a static method of more than ``LARGE`` transfers is passed over: its schedule alone
  would take longer than all others.

Where the user gave tolerances or a cap on memory or peers, a candidate that breaks one is no candidate; while all break
one, more are tried than the effort says.
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
from flexcp.planners.token_runs import check_tolerances
from flexcp.schedule.analysis import MaskAnalysis, analyse, in_other_stages
from flexcp.schedule.predict import milliseconds
from flexcp.schedule.transfers import make_plan
from flexcp.simulator.step_parts import Training, layers_alone
from flexcp.simulator.training import simulate, simulated_step

DEFAULT_EFFORT = 16
MOST_SIMULATED = 5
MANY_REGIONS = 150_000
"""Regions of a static method beyond which the closed form, which counts them all, takes longer than the events,
which know rings.
"""
OVERPRICED_PERMILLE = 50
"""By how much the closed form may overestimate the time of a placement that spans nodes."""
VARIANT_PERMILLE = 950
"""What other settings of a candidate are believed to take at least of its price."""
LARGE = 400_000
"""Transfers of a static method's backward beyond which it is not scheduled below high effort."""
MANY_DOCUMENTS = 65_536
"""Documents beyond which no candidate is tried for a small gain."""
WORTH_TRYING = 128
"""The gain that is worth a try there: one part in so many."""
NO_REST = 1
"""Pairs that a token costs outside attention in a layer of attention alone."""
LONGEST_NS = 1 << 38
"""A layer that takes longer, over four minutes, is beyond the event simulator's clock and priced in closed form."""


def auto(request: Request) -> Placement:
    """The placement of the least simulated step time."""
    return auto_plan(request).placement


def auto_plan(request: Request) -> Plan:
    """The plan of the least simulated step time, which is made on the way;
    its placement's note says why it was taken.
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
    search.try_other_stages()
    plan = search.best.plan
    return replace(plan, requested="auto", placement=replace(plan.placement, note=search.words()))


@dataclass(frozen=True, eq=False)
class _Placed:
    """A candidate that was placed: the closed form's time, or its bound's where it has too many regions,
    and what a schedule can use.
    """

    candidate: Candidate
    placement: Placement
    ns: int
    analysis: list[MaskAnalysis] | None
    plan: Plan | None = None


@dataclass(frozen=True, eq=False)
class _Simulated:
    """A candidate that was simulated."""

    candidate: Candidate
    plan: Plan
    ns: int
    order: int
    analysis: list[MaskAnalysis] | None
    other_stages: tuple[str, ...] = ()
    """Passes that are cut into other stages than the strategy by itself has."""

    @property
    def name(self) -> str:
        return self.candidate.name


class _Search:
    """What was tried so far, and what may still be."""

    def __init__(self, request: Request, effort: int) -> None:
        self.request = request
        self.effort = effort
        self.placed = 0
        self.accepted = 0
        self.simulated: list[_Simulated] = []
        self.best: _Simulated | None = None
        self.passed_over: dict[str, int] = {}
        self.refusals: list[str] = []

    def run(self, candidates: Sequence[Candidate]) -> None:
        """Look at the candidate of the least price until no other can matter."""
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
            elif (self.placed < self.effort or not self.accepted) and self._may_simulate(item):
                if item.closer_ns is not None:
                    closer = max(item.least_ns, item.closer_ns())
                    heapq.heappush(queue, (closer, order, 0, replace(item, least_ns=closer, closer_ns=None)))
                    continue
                self.placed += 1
                variants = [(i, c) for i, c in numbered if c.variant_of == item.name]
                for found in self._place(item):
                    self.accepted += 1
                    heapq.heappush(queue, (self._least_ns(found), order, self.accepted, found))
                    for entry in [(max(c.least_ns, variant_ns(found.ns)), i, 0, c) for i, c in variants]:
                        heapq.heappush(queue, entry)
            else:
                self._pass_over(price, item)

    def _can_matter(self, price: int) -> bool:
        if self.best is None:
            return True
        if self.request.batch.documents > MANY_DOCUMENTS:
            return price * WORTH_TRYING < self.best.ns * (WORTH_TRYING - 1)
        return price < self.best.ns

    def _least_ns(self, placed: _Placed) -> int:
        """What events may find at least."""
        unsure = self.request.cluster.nodes > 1 and not placed.candidate.is_static
        return placed.ns - placed.ns * OVERPRICED_PERMILLE // 1000 if unsure else placed.ns

    def _may_simulate(self, candidate: Candidate) -> bool:
        if candidate.transfers > LARGE and self.effort < HIGH_EFFORT and self.best is not None:
            return False
        first_of_its_dealing = candidate.is_static and all(
            s.candidate.dealing != candidate.dealing for s in self.simulated
        )
        return len(self.simulated) < MOST_SIMULATED or first_of_its_dealing

    def _place(self, candidate: Candidate) -> Iterator[_Placed]:
        """What a candidate answers, as far as it keeps the limits."""
        try:
            for placement in candidate.placed():
                found = self._priced(candidate, placement)
                if found is not None:
                    yield found
        except Refused as refusal:
            self.refusals.append(f"{candidate.name}: {refusal}")

    def _priced(self, candidate: Candidate, placement: Placement) -> _Placed | None:
        request = self.request
        known = (request.shape, request.cluster, request.cost)
        try:
            check_tolerances(request, placement)
            needed = placement.traffic.kind == "needed"
            analysis = analyse(placement, *known, request.keep_kv, request.most_ahead) if needed else None
            placed = _Placed(candidate, placement, candidate.least_ns, analysis)
            if candidate.regions <= MANY_REGIONS:
                placed = replace(placed, ns=price_ns(request, placement, analysis))
            if request.max_memory_per_rank is None and request.max_peers is None:
                return placed
            plan = self._planned(placed)  # caps are on plans
            refuse_over_memory(request, plan)
            refuse_over_peers(request, plan)
            return replace(placed, plan=plan)
        except Refused as refusal:
            self.refusals.append(f"{candidate.name}: {refusal}")
            return None

    def _planned(self, placed: _Placed) -> Plan:
        request = self.request
        known = (request.shape, request.cluster, request.cost, placed.candidate.name)
        return make_plan(placed.placement, *known, request.keep_kv, request.most_ahead, placed.analysis)

    def _simulate(self, placed: _Placed, order: int) -> None:
        plan = placed.plan or self._planned(placed)
        ns = placed.ns if self._is_too_long(placed.ns) else step_ns(plan, self.request.training)
        self.simulated.append(_Simulated(placed.candidate, plan, ns, order, placed.analysis))
        self.best = min(self.simulated, key=lambda found: (found.ns, found.order))

    def try_other_stages(self) -> None:
        """The fastest plan with a pass cut into stages the other way, first the forward and then the backward,
        where that is faster.
        """
        for backward in (False, True):
            best = self.best
            assert best is not None
            others = in_other_stages(best.analysis, backward) if best.analysis is not None else None
            if others is None or self._is_too_long(best.ns):
                continue
            plan = self._planned(_Placed(best.candidate, best.plan.placement, best.ns, others))
            ns = step_ns(plan, self.request.training)
            if ns < best.ns:
                ways = (*best.other_stages, "backward" if backward else "forward")
                self.best = replace(best, plan=plan, ns=ns, analysis=others, other_stages=ways)
                self.simulated[self.simulated.index(best)] = self.best

    def _is_too_long(self, ns: int) -> bool:
        return ns // self.request.batch.layers > LONGEST_NS

    def _pass_over(self, price: int, item: Candidate | _Placed) -> None:
        """Keep the least price of what is not simulated, for each way of dealing documents and for all others;
        prices come in order.
        """
        candidate = item if isinstance(item, Candidate) else item.candidate
        self.passed_over.setdefault(candidate.dealing, price)

    def words(self) -> str:
        """What was taken, over what, by how much."""
        assert self.best is not None
        best, own = self.best, self._own_words(self.best)
        others = sorted((s for s in self.simulated if s is not best), key=lambda s: s.ns)
        said = []
        for dealing in ("", "tokens", "load"):
            found = next((s for s in others if s.candidate.dealing == dealing), None)
            alike = best.candidate.dealing == dealing
            # With one group there is nothing to deal: such a method counts as one by tokens.
            kind = {"": "dynamic one", "tokens": "static one by tokens"}.get(
                dealing, "static one of several groups by load"
            )
            if found is not None:
                name = f"{found.name} in other settings" if found.name == best.name else found.name
                times = f"{found.ns / best.ns:.3f} times as fast as {name}"
                # Of those that were simulated: which of the others would be faster still, nobody looked at.
                next_one, of_those = ("next", "") if alike else ("fastest", " that was simulated")
                said.append((found.ns, f"{times} ({milliseconds(found.ns)} ms), the {next_one} {kind}{of_those}"))
            elif dealing in self.passed_over and not alike:  # which of them is the best nobody knows
                price = self.passed_over[dealing]
                said.append((price, f"no {kind} takes less than {milliseconds(price)} ms"))
        why = "; ".join(text for _, text in sorted(said)) or "the only one that can run here"
        time = f"{milliseconds(best.ns)} ms a step simulated"
        return f"{best.name}{f' ({own})' if own else ''}: {time}; {why} ({self._step_words()})"

    @staticmethod
    def _own_words(best: _Simulated) -> str:
        """What the planner said of the placement, and how the plan differs from that of the strategy by itself."""
        stages = " and ".join(best.other_stages)
        other = f"{stages} in other stages than --strategy {best.name} has" if stages else ""
        return "; ".join(filter(None, (best.plan.placement.note, other)))

    def _step_words(self) -> str:
        """What the times are of: whoever reads another time
        of the same plan must be told what the two have in common.
        """
        layers, training = self.request.batch.layers, self.request.training
        of = f"times of {layers} layer{'s' if layers > 1 else ''}"
        if training is None:
            return f"{of}, without vocabulary, gradient sync and all-reduces of tensor parallelism"
        sync = "no gradient sync" if training.sync == "none" else f"gradient sync ({training.sync})"
        tp = f" and all-reduces of tp {training.tp}" if training.tp > 1 else ""
        return f"{of} with vocabulary, {sync}{tp}"


def variant_ns(price: int) -> int:
    """Nanoseconds below which no other settings of a candidate of this price are expected."""
    return price * VARIANT_PERMILLE // 1000


def step_ns(plan: Plan, training: Training | None = None) -> int:
    """Simulated nanoseconds of a step; of its layers alone where no training says what else it has.

    Where the cost model's layers have no rest either, attention alone is asked about: each pass by itself, all ranks
    starting together.
    """
    if training is None and plan.cost.pairs_per_token(plan.shape) <= NO_REST:
        return simulate(plan).attention_ns
    return simulated_step(plan, training or layers_alone(plan.cost, plan.shape)).total_ns

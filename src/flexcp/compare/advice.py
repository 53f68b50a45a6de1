"""Advice for a user's documents: the cost of static context parallelism, the gain from flexcp, and whether to change.

The documents are dealt into passes in the order they come, each pass with 7/8 of the tokens that the ranks hold. A few
passes spread over the data are simulated with :func:`flexcp.compare.compare.compare`, so the times are the ones that
``flexcp compare`` prints for the same documents. Several answers are compared:

- *static*: the fastest static method with one degree fixed for all these passes, documents dealt by tokens; or the
  method the user names as today's. All gains are relative to this answer;
- *static by load*: the same with documents dealt by load (``ulysses:8@load``), for users whose loader already does so;
- *swap*: only attention is replaced; tokens stay where a contiguous split puts them (``layout="contiguous"``);
- *static in that layout*: the fastest static method that keeps the contiguous split too, fixed for the run; this is
  what a swap replaces. A contiguous split makes both move tokens that a better layout would not move, so a gain over
  this answer is not a gain over *static*;
- *free*: flexcp places tokens too, as its loader does, with ``auto``, which takes the fastest of static and dynamic
  plans in every pass.

A document that is longer than all ranks together can keep is refused even if its pass is not simulated. A static method
that refuses any pass of the epoch that is planned (:mod:`flexcp.compare.epoch_refusals`) is never the best one; if the
user runs such a method today, the advice says so and never is to stay with it.

The advised answer is then planned for more passes, to tell how much memory its ranks need over an epoch
(:mod:`flexcp.compare.epoch_memory`).

The advice is to change something only if the gain exceeds the error of the cost model. If the advice is to stay static,
:mod:`flexcp.compare.why_static` gives the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

from flexcp.arrays.totals import imbalance
from flexcp.batch import Batch, make_batch
from flexcp.clusters import Cluster
from flexcp.compare.compare import STATIC, STATIC_BY_LOAD, Row, compare_batches, planned
from flexcp.compare.epoch_memory import EpochMemory, epoch_memory
from flexcp.compare.epoch_refusals import EpochPasses, Refusals
from flexcp.compare.static_choice import first_of_fastest, spread_over
from flexcp.cost import CostModel
from flexcp.data.lengths import batch_tokens, cut_batches, left_out_words
from flexcp.io.decimals import beside
from flexcp.masks import Mask
from flexcp.models.preset import Preset
from flexcp.plan.plan import Plan
from flexcp.plan.user_layouts import user_layout
from flexcp.planners.request import Refused, Request
from flexcp.schedule.predict import lower_bound
from flexcp.simulator.passes import Rules
from flexcp.simulator.step_parts import Sync, Training
from flexcp.simulator.training import ATTENTION, LINEAR, StepTime

MOST_PASSES = 3
"""The most passes that are simulated."""


@dataclass(frozen=True)
class Question:
    """What the user trains, on which cluster, and how many tokens fit.

    With ``mask=None`` layers have the model's own masks. ``cluster`` and ``preset`` describe what context parallelism
    sees after tensor parallelism (``tp``) and others have divided machine and model; ``divided`` tells in words how
    they were divided. ``today`` is the method that the user has now (None: the best static one is assumed). ``sync``
    and ``overlap_permille`` are those of :class:`flexcp.simulator.step_parts.Training`.
    """

    preset: Preset
    cluster: Cluster
    mask: Mask | None
    cost: CostModel
    max_tokens_per_rank: int
    tokens_per_step: int
    today: str | None = None
    tp: int = 1
    divided: str = ""
    rules: Rules = Rules()
    sync: Sync = "fsdp"
    overlap_permille: int = 1000

    @property
    def micro_batches(self) -> int:
        """Number of passes in a step, so that no rank exceeds its cap of tokens."""
        return -(-self.tokens_per_step // self.most_tokens)

    @property
    def most_tokens(self) -> int:
        """Tokens of one pass on all ranks: fewer than the ranks could keep, so that they may keep different counts."""
        return batch_tokens(self.max_tokens_per_rank, self.cluster.ranks)

    @property
    def training(self) -> Training:
        """The training step whose time is simulated."""
        return Training(self.preset, self.sync, self.overlap_permille, self.tp)

    @property
    def masks(self) -> dict[str, tuple[Mask, int]]:
        """Each mask by name, with the number of layers that have it."""
        return self.preset.masks(self.mask)


@dataclass(frozen=True)
class Answer:
    """One way to run the simulated passes: its name, and its plan and simulated step for each pass."""

    name: str
    plans: tuple[Plan, ...]
    steps: tuple[StepTime, ...]

    @property
    def total_ns(self) -> int:
        return sum(step.total_ns for step in self.steps)

    def share(self, part: str) -> float:
        """Return a part of the slowest ranks' time as a share of the whole time (0 to 1).

        ``part`` is ``attention``, ``wait``, ``linear`` or ``sync``.
        """
        return float(sum(getattr(step, f"{part}_ns") for step in self.steps) / max(self.total_ns, 1))

    @property
    def uneven(self) -> float:
        """Compute of the slowest ranks beyond the mean of all ranks, as a share of the whole time (below 0 if less).

        Compute is attention and the rest of each layer.
        """
        beyond = (
            step.attention_ns + step.linear_ns - float(step.ranks[[ATTENTION, LINEAR]].sum(axis=0).mean())
            for step in self.steps
        )
        return sum(beyond) / max(self.total_ns, 1)

    @property
    def compute_imbalance(self) -> float:
        """Attention work of the busiest rank over the mean of all ranks, in all layers of the most uneven pass."""
        return max(imbalance(plan.work_of_layers()) for plan in self.plans)

    @property
    def busiest_words(self) -> str:
        """The words that stand before the number of :attr:`compute_imbalance` in a sentence."""
        return "the busiest does" if len(self.plans) == 1 else "the busiest does, in its most uneven pass,"

    @property
    def most_tokens(self) -> int:
        """Tokens of the fullest rank in any pass."""
        return max(int(plan.placement.tokens.max()) for plan in self.plans)


@dataclass(frozen=True)
class Advice:
    """All answers for a user's documents.

    ``static``, ``swap`` and ``free`` are the ways to run that are compared: a static method, flexcp's attention with
    tokens in contiguous parts (None if it does not fit), and flexcp with its loader. ``by_load`` is a static method
    that deals documents by load and ``in_layout`` one with tokens in contiguous parts; either is None if no method
    fits. ``passes`` is the number of passes that the data makes, of which ``len(static.steps)`` were simulated, and
    ``bound_ns`` the time of these if all compute were divided perfectly. ``longest_in`` counts the passes with a
    document of the greatest length, first among the simulated passes, then among all. ``left_out`` tells in words which
    documents at the end are in no pass; it is empty if every document is in a pass. ``memory`` is what attention needs
    on the worst rank over an epoch with the advised answer. ``cannot`` counts the planned passes that today's method
    refuses; it is None if it refuses none. ``passed_over`` names static methods that were not considered because they
    refuse a planned pass.
    """

    question: Question
    lengths: tuple[int, ...]
    passes: int
    static: Answer
    swap: Answer | None
    free: Answer
    bound_ns: int
    longest_in: tuple[int, int] = (0, 0)
    by_load: Answer | None = None
    in_layout: Answer | None = None
    left_out: str = ""
    memory: EpochMemory | None = None
    cannot: Refusals | None = None
    passed_over: tuple[str, ...] = ()

    @property
    def margin(self) -> float:
        """The cost model's error as a fraction; a smaller gain does not count."""
        return self.question.cost.error_permille / 1000

    def gain(self, answer: Answer) -> float:
        """Return how many times as fast as ``static`` an answer is."""
        return self.static.total_ns / answer.total_ns

    def times(self, ratio: float) -> str:
        """Return a ratio of speeds for a message: two digits after the point, more if it is close to the margin."""
        return beside(1 + self.margin, ratio, 2)

    @property
    def runs_it_today(self) -> bool:
        """Whether the user already runs flexcp's loader with the strategy of *free*."""
        return self.question.today is not None and self.static.name == self.free.name

    @property
    def baseline(self) -> str:
        """The method that gains are relative to, described in words for the user."""
        if self.question.today:
            return f"{self.static.name}, what you use today"
        return f"{self.static.name}, {self.best_static} by tokens"

    @property
    def best_static(self) -> str:
        """Description of the best static method, to be followed by "by tokens" or "by load"."""
        scope = "fixed for the run" if len(self.static.steps) > 1 else "of the batch"
        return f"the best static method {scope}, documents dealt"

    def sure(self, answer: Answer) -> bool:
        """Return whether an answer's gain exceeds the margin."""
        return self.gain(answer) > 1 + self.margin

    @property
    def verdict(self) -> str:
        """What to use: ``free``, ``swap`` or ``static``.

        A change is recommended only if its gain exceeds the margin. If that of a swap does, the loader (``free``) is
        recommended only if it is faster than the swap by more than the margin. If today's method refuses passes, one of
        the two is recommended whatever it gains.
        """
        swap, free = self.swap, self.free
        near = swap is not None and swap.total_ns <= free.total_ns * (1 + self.margin)
        if near and swap is not None and self.sure(swap):
            return "swap"
        if self.sure(free):
            return "free"
        if self.cannot is None:
            return "static"
        return "swap" if near else "free"

    @property
    def chosen(self) -> Answer:
        """The answer that the verdict names."""
        answer = {"free": self.free, "swap": self.swap, "static": self.static}[self.verdict]
        assert answer is not None
        return answer

    @property
    def pays(self) -> str:
        """Sentence that tells whether the swap, the loader, both or neither gain more than the cost model's error.

        If the swap does not fit, the sentence says so, and gives the loader's gain.
        """
        swap, free = self.swap, self.free
        neither = not self.sure(free) and (swap is None or not self.sure(swap))
        if self.runs_it_today and neither:
            other = "does not fit" if swap is None else f"({self.times(self.gain(swap))} times its speed) does not pay"
            return f"The loader with {free.name} is what you run today; the swap {other}."
        loader = f"the loader ({self.times(self.gain(free))} times the speed of {self.static.name})"
        if swap is None:
            pays = "does not pay beyond the model's error" if neither else "pays"
            return f"The swap does not fit; {loader} {pays}."
        swapped = f"the swap ({self.times(self.gain(swap))} times)"
        if neither:
            return f"Neither {loader} nor {swapped} pays beyond the model's error."
        if self.sure(free) and self.sure(swap):
            return f"Both pay: {loader} and {swapped}."
        if self.verdict == "free":
            return f"Of the two {loader} pays, not {swapped}."
        return f"Of the two {swapped} pays; {loader} is within the model's error."


def advise(question: Question, lengths: Sequence[int], tell: Callable[[str], None] = lambda _: None) -> Advice:
    """Simulate some passes of the data with every kind of answer and return the advice.

    ``lengths`` are those of the documents, and ``tell`` receives progress messages. Raise ValueError if a document is
    too long, or if no static method or no strategy fits.
    """
    refuse_too_long(question, lengths)
    passes = deal(lengths, question)
    looked_at = spread_over(passes, MOST_PASSES)
    requests = [request_of(question, make_batch(found, masks=question.masks)) for found in looked_at]
    epoch = EpochPasses([max(found) for found in passes], _requests(question, passes))
    names = (question.today,) if question.today else STATIC
    static, cannot = fastest_of_epoch(question, requests, names, tell, epoch), None
    if static is None and question.today:
        static = fastest(answers_of(question, requests, names, tell))
        cannot = None if static is None else epoch.refusals(static.name)
    passed_over = () if question.today else tuple(epoch.refusing)
    by_load = fastest_of_epoch(question, requests, STATIC_BY_LOAD, tell, epoch)
    free = fastest(answers_of(question, requests, ("auto",), tell))
    if static is None or free is None:
        why = ""
        if static is None and question.today:
            what, out = f"{question.today}, what you use today, does not suit", "name another method with --today, "
            why = _refusal(question.today, requests)
        elif static is None:
            what, out = "no static method can run all planned passes of", ""
            why = "".join(f" ({name}: {reason})" for name, reason in list(epoch.refusing.items())[:1])
        else:
            what, out = "no strategy fits", ""
        raise ValueError(
            f"{what} these documents on {question.cluster} with at most {question.max_tokens_per_rank:,} tokens a "
            f"rank{why}; {out}raise --max-tokens-per-rank, use more ranks, or ask for fewer --tokens-per-step"
        )
    fixed = [replace(r, layout=user_layout("contiguous", r.batch.tokens, r.ranks)) for r in requests]
    swap = fastest(answers_of(question, fixed, ("auto",), tell))
    in_layout = fastest(answers_of(question, fixed, STATIC, tell))
    if swap is not None:
        swap = replace(swap, name='auto, layout="contiguous"')
    if in_layout is not None:
        in_layout = replace(in_layout, name=f'{in_layout.name}, layout="contiguous"')
    head = question.preset.head_flops_per_token
    bound = sum(lower_bound(r.batch, r.shape, r.cluster, r.cost, head) for r in requests)
    seen, in_all = (sum(max(found) == max(lengths) for found in some) for some in (looked_at, passes))
    answers = (static, swap, free, bound, (seen, in_all), by_load, in_layout, left_out_words(lengths, passes, "pass"))
    found = Advice(question, tuple(lengths), len(passes), *answers, cannot=cannot, passed_over=passed_over)
    return replace(found, memory=_memory(found, epoch, tell))


def _requests(question: Question, passes: Sequence[Sequence[int]]) -> Callable[[int], Request]:
    """Return the function from the number of a pass to its request; each request is made once."""
    return cache(lambda number: request_of(question, make_batch(passes[number], masks=question.masks)))


def _memory(advice: Advice, epoch: EpochPasses, tell: Callable[[str], None]) -> EpochMemory:
    """Return what attention needs on the worst rank over all passes with the advised answer."""
    answer = advice.chosen

    def request(number: int) -> Request:
        found = epoch.request_of(number)
        layout = user_layout("contiguous", found.batch.tokens, found.ranks) if answer is advice.swap else None
        return replace(found, layout=layout)

    strategy = answer.name if advice.verdict == "static" else "auto"
    return epoch_memory(answer.name, strategy, epoch.longest, request, tell)


def refuse_too_long(question: Question, lengths: Sequence[int]) -> None:
    """Raise ValueError if the data has a document that all ranks together cannot keep, or that is longer than a step.

    A document may be longer than the default step, which leaves some of the room of the ranks free.
    """
    room = question.max_tokens_per_rank * question.cluster.ranks
    longer = [number for number, length in enumerate(lengths) if length > room]
    if longer:
        first = longer[0]
        more = f" ({len(longer):,} documents in all are too long)" if len(longer) > 1 else ""
        raise ValueError(
            f"document {first} has {lengths[first]:,} tokens{more}: {question.cluster.ranks} ranks of at most "
            f"{question.max_tokens_per_rank:,} tokens keep {room:,} together; raise --max-tokens-per-rank to "
            f"{-(-max(lengths) // question.cluster.ranks):,}, use more ranks, or cut such documents"
        )
    longest, step = max(lengths), question.tokens_per_step
    if step < min(longest, question.most_tokens):
        raise ValueError(
            f"document {list(lengths).index(longest)} has {longest:,} tokens, more than a step of {step:,} holds; "
            f"raise --tokens-per-step to {longest:,} or more, or cut such documents"
        )


def deal(lengths: Sequence[int], question: Question) -> list[list[int]]:
    """Deal documents into passes in the order they come; return the lengths of the documents in each pass."""
    most = min(question.most_tokens, -(-question.tokens_per_step // question.micro_batches))
    return cut_batches(lengths, most)


def fastest(answers: Sequence[Answer]) -> Answer | None:
    """Return the fastest answer, or the first of those that are nearly as fast; None if there is no answer."""
    if not answers:
        return None
    name = first_of_fastest({answer.name: answer.total_ns for answer in answers})
    return next(answer for answer in answers if answer.name == name)


def fastest_of_epoch(
    question: Question,
    requests: Sequence[Request],
    names: Sequence[str],
    tell: Callable[[str], None],
    epoch: EpochPasses,
) -> Answer | None:
    """Return the fastest answer for ``requests`` of the strategies that can run all planned passes of the epoch.

    Only a strategy that is the fastest is asked whether it can. One that cannot gets another degree that can, or drops
    out.
    """
    found = {name: answers_of(question, requests, (name,), tell) for name in names}
    while (best := fastest([answer for some in found.values() for answer in some])) is not None:
        if epoch.can_run(best.name):
            return best
        name = next(name for name, some in found.items() if any(answer is best for answer in some))
        found[name] = answers_of(question, requests, (name,), tell, epoch.can_run)
    return None


def answers_of(
    question: Question,
    requests: Sequence[Request],
    names: Sequence[str],
    tell: Callable[[str], None],
    accepts: Callable[[str], bool] = lambda _: True,
) -> list[Answer]:
    """Return an answer for each strategy of ``names`` that accepts all requests.

    A static strategy has the degree that is best for all of them together. Strategies and degrees for which
    ``accepts(name)`` is false are left out.
    """
    rows = compare_batches(requests, names, question.rules, tell, accepts)
    return [_answer(name, found) for name, found in rows.items()]


def _refusal(name: str, requests: Sequence[Request]) -> str:
    """Return the reason why a strategy refuses one of the requests, in brackets; empty if it accepts all."""
    for request in requests:
        try:
            planned(request, name)
        except Refused as error:
            return f" ({error})"
    return ""


def _answer(name: str, rows: Sequence[Row]) -> Answer:
    plans, steps = [], []
    for row in rows:
        assert row.simulation is not None and row.simulation.step is not None
        plans.append(row.simulation.plan)
        steps.append(row.simulation.step)
    return Answer(name, tuple(plans), tuple(steps))


def request_of(question: Question, batch: Batch) -> Request:
    """Return the planner's request for one pass."""
    training = question.training
    return Request(
        batch,
        training.model.shape,
        question.cluster,
        replace(question.cost, model=training.model.model),
        max_tokens_per_rank=question.max_tokens_per_rank,
        training=training,
    )

"""Advice: what static context parallelism costs on a user's documents, what flexcp would give, and whether to bother.

The documents are dealt into passes in the order they come, each as many tokens as the ranks hold, and a few passes
spread over the data are looked at. All answers come from :func:`flexcp.compare.compare.compare`, so they are what
``flexcp compare`` says of the same documents:

- *static*: the best static method fixed for the run, documents dealt by tokens: the one that serves all these passes
  with one degree and is fastest over them; or the one the user has today. Gains are over it;
- *static by load*: the same, documents dealt by load (``ulysses:8@load``), for those who already deal so;
- *swap*: only attention is replaced; tokens stay where a contiguous split puts them (``layout="contiguous"``). Beside
  it stands *static in that layout*, the best static method that leaves them there too, fixed for the run: what a swap
  replaces. Both send what a layout that suits the documents need not send, so a gain over the latter is no gain over
  *static*;
- *free*: flexcp places tokens too, as its loader does: ``auto``, which takes the fastest of static and dynamic plans in
  every pass.

A document that exceeds what the ranks hold together is refused wherever in the data it is, not only in a pass that is
looked at.

A gain is worth having when it exceeds what the cost model may err by; then and only then the advice is to change
something. Where static stays, :mod:`flexcp.compare.why_static` says why.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from flexcp.arrays.totals import imbalance
from flexcp.batch import Batch, make_batch
from flexcp.clusters import Cluster
from flexcp.compare.compare import STATIC, STATIC_BY_LOAD, Row, compare_batches, planned
from flexcp.compare.static_choice import first_of_fastest, spread_over
from flexcp.cost import CostModel
from flexcp.data.lengths import batch_tokens, cut_batches, left_out_words
from flexcp.masks import Mask
from flexcp.models.preset import Preset
from flexcp.plan.plan import Plan
from flexcp.planners.request import Refused, Request
from flexcp.planners.token_runs import user_layout
from flexcp.schedule.predict import lower_bound
from flexcp.simulator.passes import Rules
from flexcp.simulator.step_parts import Sync, Training
from flexcp.simulator.training import StepTime

MOST_PASSES = 3


@dataclass(frozen=True)
class Question:
    """What the user trains, on what, and what fits. Without a mask the model's layers have their own.

    Cluster and model are those that context parallelism sees; ``divided`` says what tensor parallelism (``tp``) and
    others made them of.
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
    rules: Rules = Rules()  # noqa: RUF009 - immutable
    sync: Sync = "fsdp"
    overlap_permille: int = 1000

    @property
    def micro_batches(self) -> int:
        """Passes a step takes, so that no rank is over its cap."""
        return -(-self.tokens_per_step // self.most_tokens)

    @property
    def most_tokens(self) -> int:
        """Tokens of one pass that leave ranks room to differ."""
        return batch_tokens(self.max_tokens_per_rank, self.cluster.ranks)

    @property
    def training(self) -> Training:
        """The step whose time counts."""
        return Training(self.preset, self.sync, self.overlap_permille, self.tp)

    @property
    def masks(self) -> dict[str, tuple[Mask, int]]:
        """Masks of the layers, with their counts."""
        return self.preset.masks(self.mask)


@dataclass(frozen=True)
class Answer:
    """A way to run the steps that were looked at: what it is called, its plans, and their simulated steps."""

    name: str
    plans: tuple[Plan, ...]
    steps: tuple[StepTime, ...]

    @property
    def total_ns(self) -> int:
        return sum(step.total_ns for step in self.steps)

    def share(self, part: str) -> float:
        """Of the whole time, the slowest ranks' ``attention``, ``wait``, ``linear`` or ``sync``."""
        return float(sum(getattr(step, f"{part}_ns") for step in self.steps) / max(self.total_ns, 1))

    @property
    def uneven(self) -> float:
        """Of the whole time, what the slowest ranks compute, attention and other layers,
        beyond the mean of all ranks.
        """
        beyond = (
            step.attention_ns + step.linear_ns - float(step.ranks[[0, 2]].sum(axis=0).mean()) for step in self.steps
        )
        return sum(beyond) / max(self.total_ns, 1)

    @property
    def compute_imbalance(self) -> float:
        """The worst step's attention over all layers, max / mean over ranks."""
        return max(imbalance(plan.work_of_layers()) for plan in self.plans)

    @property
    def busiest_words(self) -> str:
        """Whose attention :attr:`compute_imbalance` is of, before how many times the mean's it is."""
        return "the busiest does" if len(self.plans) == 1 else "the busiest does, in its most uneven pass,"

    @property
    def most_tokens(self) -> int:
        """Tokens of the fullest rank."""
        return max(int(plan.placement.tokens.max()) for plan in self.plans)


@dataclass(frozen=True)
class Advice:
    """The answers. ``passes`` is how many passes the data makes in all, of which ``len(static.steps)`` were simulated;
    ``longest_in`` counts the passes with a document of the greatest length, among those simulated and among all.
    ``by_load`` is static by load,
    ``in_layout`` static in the layout of the swap; None where none fits. ``left_out`` says which documents at the end
    are in no pass, in words; it is empty where all are.
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

    @property
    def margin(self) -> float:
        """What a gain must exceed to be called one, as a fraction."""
        return self.question.cost.error_permille / 1000

    def gain(self, answer: Answer) -> float:
        """How many times faster than static."""
        return self.static.total_ns / answer.total_ns

    @property
    def baseline(self) -> str:
        """What gains are over, in words."""
        if self.question.today:
            return f"{self.static.name}, what you use today"
        return f"{self.static.name}, {self.best_static} by tokens"

    @property
    def best_static(self) -> str:
        """Which best static method it is, in words that end before how documents are dealt;
        of one pass none is fixed for more.
        """
        scope = "fixed for the run" if len(self.static.steps) > 1 else "of the batch"
        return f"the best static method {scope}, documents dealt"

    def sure(self, answer: Answer) -> bool:
        """Whether the gain exceeds the margin."""
        return self.gain(answer) > 1 + self.margin

    @property
    def verdict(self) -> str:
        """``free``, ``swap`` or ``static``: what to use. Only what is sure to gain;
        the loader only where it adds to a sure swap.
        """
        swap, free = self.swap, self.free
        if swap is not None and self.sure(swap) and swap.total_ns <= free.total_ns * (1 + self.margin):
            return "swap"
        return "free" if self.sure(free) else "static"

    @property
    def chosen(self) -> Answer:
        """The answer that the verdict names."""
        answer = {"free": self.free, "swap": self.swap, "static": self.static}[self.verdict]
        assert answer is not None
        return answer

    @property
    def pays(self) -> str:
        """Which of swap and loader pays, in a sentence; a gain within the model's error is none that is sure."""
        swap, free = self.swap, self.free
        loader = f"the loader ({self.gain(free):.2f} times the speed of {self.static.name})"
        if swap is None:
            return f"The swap does not fit, {loader} does."
        swapped = f"the swap ({self.gain(swap):.2f} times)"
        if self.verdict == "static":
            return f"Neither {loader} nor {swapped} pays beyond the model's error."
        if self.sure(free) and self.sure(swap):
            return f"Both pay: {loader} and {swapped}."
        if self.verdict == "free":
            return f"Of the two {loader} pays, not {swapped}."
        return f"Of the two {swapped} pays; {loader} is within the model's error."


def advise(question: Question, lengths: Sequence[int], tell: Callable[[str], None] = lambda _: None) -> Advice:
    """Look at some passes of the data and simulate what they would take."""
    refuse_too_long(question, lengths)
    passes = deal(lengths, question)
    looked_at = spread_over(passes, MOST_PASSES)
    requests = [request_of(question, make_batch(found, masks=question.masks)) for found in looked_at]
    static = fastest(answers_of(question, requests, (question.today,) if question.today else STATIC, tell))
    by_load = fastest(answers_of(question, requests, STATIC_BY_LOAD, tell))
    free = fastest(answers_of(question, requests, ("auto",), tell))
    if static is None or free is None:
        why = ""
        if static is None and question.today:
            what, out = f"{question.today}, what you use today, does not suit", "name another method with --today, "
            why = _refusal(question.today, requests)
        else:
            what, out = "no static method fits" if static is None else "no strategy fits", ""
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
    return Advice(question, tuple(lengths), len(passes), *answers)


def refuse_too_long(question: Question, lengths: Sequence[int]) -> None:
    """For data with a document that all ranks together cannot keep."""
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


def deal(lengths: Sequence[int], question: Question) -> list[list[int]]:
    """Documents in the order they come, each pass as many as fit."""
    most = min(question.most_tokens, -(-question.tokens_per_step // question.micro_batches))
    return cut_batches(lengths, most)


def fastest(answers: Sequence[Answer]) -> Answer | None:
    """The answer of the least time; of nearly equal ones the first."""
    if not answers:
        return None
    name = first_of_fastest({answer.name: answer.total_ns for answer in answers})
    return next(answer for answer in answers if answer.name == name)


def answers_of(
    question: Question, requests: Sequence[Request], names: Sequence[str], tell: Callable[[str], None]
) -> list[Answer]:
    """An answer for each strategy that takes all requests, a static one with the one degree
    that serves all of them best.
    """
    rows = compare_batches(requests, names, question.rules, tell)
    return [_answer(name, found) for name, found in rows.items()]


def _refusal(name: str, requests: Sequence[Request]) -> str:
    """Why a strategy takes not all requests, for the end of a sentence."""
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
    """What a planner is asked about a pass."""
    training = question.training
    return Request(
        batch,
        training.model.shape,
        question.cluster,
        replace(question.cost, model=training.model.model),
        max_tokens_per_rank=question.max_tokens_per_rank,
        training=training,
    )

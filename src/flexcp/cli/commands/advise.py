"""``flexcp advise``: whether dynamic context parallelism pays on a user's documents, and how to turn it on."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flexcp.cli.shared import options as o
from flexcp.cli.shared.batches import MaybeMask
from flexcp.cli.shared.model_and_cluster_options import ClusterOptions, ModelOptions
from flexcp.cli.shared.parallel import ParallelOptions
from flexcp.cli.shared.progress import compiling
from flexcp.cli.shared.step_options import StepOptions

if TYPE_CHECKING:
    from flexcp.compare.advice import Advice, Answer
    from flexcp.compare.epoch_memory import EpochMemory
    from flexcp.compare.tree_advice import TreeAdvice
    from flexcp.masks import Mask
    from flexcp.models.preset import Preset
    from flexcp.report.sections import Section

Documents = Annotated[
    str,
    typer.Argument(
        metavar="LENGTHS",
        help="4096,4k,1 or 64x2048 or @file or NAME:TOKENS:SEED; a .jsonl of texts or token ids; hf:NAME, a Hugging "
        "Face data set.",
    ),
]
Cap = Annotated[
    int,
    typer.Option(
        "--max-tokens-per-rank", parser=o.tokens, metavar="TOKENS", help="Tokens that fit a rank's memory, as in 32k."
    ),
]
StepTokens = Annotated[
    int | None,
    typer.Option(
        parser=o.tokens, metavar="TOKENS", help="Tokens of a training step; as many as fit the ranks by default."
    ),
]
Today = Annotated[
    str | None,
    typer.Option(help="What you use now, as in zigzag:8; the best static method fixed for the run by default."),
]
Framework = Annotated[
    str,
    typer.Option(
        help="pytorch, huggingface, trainer, fsdp, torchtitan, megatron or all: whose lines of code to print."
    ),
]
Tokenizer = Annotated[
    str | None, typer.Option(help="For texts: a tokenizer.json, or the name of a Hugging Face tokenizer.")
]
LengthsField = Annotated[
    str | None, typer.Option(help="The field of a .jsonl or data set that holds the text or the token ids.")
]


def advise(
    lengths: Documents,
    described: ModelOptions,
    place: ClusterOptions,
    parallel: ParallelOptions,
    beside: StepOptions,
    max_tokens_per_rank: Cap = 32_768,
    mask: MaybeMask = None,
    tokens_per_step: StepTokens = None,
    today: Today = None,
    framework: Framework = "pytorch",
    tokenizer: Tokenizer = None,
    field: LengthsField = None,
    cost: o.CostFile = None,
    html: o.Html = None,
    as_json: o.Json = False,
) -> None:
    """Tell what static context parallelism costs on your documents, what flexcp would give, and which lines to change.

    Without a model it is llama3-8b, without a cluster h100:4x8. Gains are over the best static method fixed for the
    run, documents dealt by tokens, or over what you use --today.

    For a .jsonl of trees (`parents` and `lengths` in every line) it tells what trees save compared with the same
    sequences as separate documents.

    Everything is simulated, and the known error of such simulations is stated. `flexcp compare` gives the same times
    for one pass: a batch of the same file, for the same model, cluster and --max-tokens-per-rank.

    Example: `flexcp advise lengths.txt --model llama3-8b --cluster h100:4x8 --max-tokens-per-rank 32768`
    """
    from flexcp.compare.advice import Question, advise
    from flexcp.compare.tree_advice import advise_trees, read_trees
    from flexcp.data.document_lengths import document_lengths
    from flexcp.data.lengths import batch_tokens
    from flexcp.report.code_lines import FRAMEWORKS, Lines, code_lines

    _check(max_tokens_per_rank, tokens_per_step, framework, today)
    rule, known = _one_mask(mask), o.cost_of(cost)
    preset = _model(described)
    divided = parallel.divided(known.on(place.found("h100:4x8")), preset.shape, preset)
    assert divided.preset is not None
    preset, where = divided.preset, divided.topology.cluster
    whole = tokens_per_step or batch_tokens(max_tokens_per_rank, where.ranks)
    step = beside.training(preset, parallel.tp)
    assert step is not None
    asked = Question(
        preset,
        where,
        rule,
        known.cost,
        max_tokens_per_rank,
        whole,
        today,
        parallel.tp,
        divided.words,
        sync=step.sync,
        overlap_permille=step.overlap_permille,
    )
    trees = read_trees(Path(lengths.removeprefix("@")))
    naming_ranks = parallel.naming_ranks(lambda: place.found("h100:4x8"))
    if trees is not None:
        _refuse_for_trees(lengths, today=today, tokenizer=tokenizer, field=field, html=html)
        with naming_ranks, compiling("planning trees") as progress:
            saved = advise_trees(asked, trees, progress.update)
        typer.echo(json.dumps(tree_data(saved), indent=2) if as_json else tree_text(saved))
        return
    with naming_ranks, compiling("reading documents") as progress:
        numbers = document_lengths(lengths, tokenizer, field, progress.update)
        found = advise(asked, numbers, progress.update)
    names = list(FRAMEWORKS) if framework == "all" else [framework]
    swap, sizes = found.verdict == "swap", (max_tokens_per_rank, whole, asked.micro_batches)
    strategy = "auto" if swap else found.free.name
    lines = Lines(asked.training, where, strategy, *sizes, asked.masks, swap, max(numbers), cost)
    code = [code_lines(name, lines) for name in names] if found.verdict != "static" else []
    if html is not None:
        _report(html, found, code)
    if as_json:
        typer.echo(json.dumps(as_data(found, code), indent=2))
        return
    typer.echo(text(found, code))


def _refuse_for_trees(lengths: str, **given: object) -> None:
    """Raise ValueError if options were given that are not used for trees.

    ``lengths`` is the file of trees, and ``given`` are the options by name, None if not given.
    """
    unused = [f"--{name}" for name, value in given.items() if value is not None]
    if unused:
        raise ValueError(
            f"{lengths} holds trees, which are compared with separate documents alone; drop {', '.join(unused)}"
        )


def _one_mask(mask: str | None) -> Mask | None:
    from flexcp.masks import parse_mask

    rule = None if mask is None else parse_mask(mask)
    if isinstance(rule, list):
        raise ValueError(f"advise takes one mask for all documents, as in causal or window:4096; {mask} gives one each")
    return rule


def _model(described: ModelOptions) -> Preset:
    """Return the described model, or llama3-8b if nothing is described; raise ValueError if only heads are."""
    from flexcp.models.find import find_model

    preset = described.whole()
    if preset is None and described.told:
        raise ValueError(f"{described.flags} alone is no model; give --heads, --hidden and --layers, or --model")
    return find_model("llama3-8b") if preset is None else preset


def _check(max_tokens_per_rank: int, tokens_per_step: int | None, framework: str, today: str | None) -> None:
    from flexcp.planners.strategies import find_strategy
    from flexcp.report.code_lines import check_framework

    if max_tokens_per_rank < 1:
        raise ValueError(f"--max-tokens-per-rank is at least 1; got {max_tokens_per_rank}")
    if tokens_per_step is not None and tokens_per_step < 1:
        raise ValueError(f"--tokens-per-step is at least 1; got {tokens_per_step}")
    if framework != "all":
        check_framework(framework)
    if today is not None:
        find_strategy(today)


def text(advice: Advice, code: list[tuple[str, str]]) -> str:
    """Return the advice as text for a terminal; ``code`` are pairs of a framework's title and its lines of code."""
    from flexcp.report.advice_words import advice_words

    parts = []
    for title, paragraphs in advice_words(advice):
        parts.append(title)
        parts += [fill(p, 110, initial_indent="  ", subsequent_indent="  ") for p in paragraphs]
        parts.append("")
    for title, lines in code:
        parts += [f"Lines for {title}", *(f"    {line}".rstrip() for line in lines.rstrip().split("\n")), ""]
    return "\n".join(parts).rstrip()


def tree_text(advice: TreeAdvice) -> str:
    """Return advice about trees as text for a terminal."""
    return "\n".join(fill(line, 110) for line in advice.words())


def tree_data(advice: TreeAdvice) -> dict[str, Any]:
    """Return advice about trees with the documented JSON keys."""
    sides = {"trees": asdict(advice.trees), "separate": asdict(advice.separate)}
    return {"simulated": True, **sides, "tokens_saved": advice.saved, "gain": round(advice.gain, 4)}


def as_data(advice: Advice, code: list[tuple[str, str]]) -> dict[str, Any]:
    """Return the advice with the documented JSON keys; ``code`` are pairs of a framework's title and its code."""
    from flexcp.compare.why_static import why_static
    from flexcp.known_errors.words import error_data

    question = advice.question

    def answer(found: Answer | None) -> dict[str, Any] | None:
        if found is None:
            return None
        return {
            "strategy": found.name,
            "pass_ms": round(found.total_ns / 1e6 / len(found.steps), 3),
            "gain": round(advice.gain(found), 4),
            "attention": round(found.share("attention"), 4),
            "waiting": round(found.share("wait"), 4),
            "other_layers": round(found.share("linear"), 4),
            "sync": round(found.share("sync"), 4),
            "compute_imbalance": round(found.compute_imbalance, 4),
            "most_tokens": found.most_tokens,
        }

    return {
        "simulated": True,
        "documents": len(advice.lengths),
        "tokens": sum(advice.lengths),
        "passes": advice.passes,
        "simulated_passes": len(advice.static.steps),
        "longest_in": dict(zip(("simulated", "all"), advice.longest_in, strict=True)),
        "left_out": advice.left_out or None,
        "micro_batches": question.micro_batches,
        "error": error_data(question.cost),
        "margin_permille": question.cost.error_permille,
        "bound_ms": round(advice.bound_ns / 1e6 / len(advice.static.steps), 3),
        "baseline": advice.baseline,
        "static": answer(advice.static),
        "static_by_load": answer(advice.by_load),
        "swap": answer(advice.swap),
        "static_in_layout": answer(advice.in_layout),
        "free": answer(advice.free),
        "pays": advice.pays,
        "verdict": advice.verdict,
        "why": why_static(advice) if advice.verdict == "static" else advice.cannot and advice.cannot.words(),
        "memory": None if advice.memory is None else _memory_data(advice.memory),
        "code": dict(code),
    }


def _memory_data(found: EpochMemory) -> dict[str, Any]:
    """Return the memory of the rank that needs the most, with the documented JSON keys."""
    return {
        "strategy": found.strategy,
        "max_rank_memory_bytes": found.bytes,
        "rank": found.rank,
        "pass": found.pass_number,
        "most_tokens": found.most_tokens,
        "planned_passes": found.planned,
        "refused_passes": found.refused,
    }


def _report(path: Path, advice: Advice, code: list[tuple[str, str]]) -> None:
    from flexcp.cli.shared.reports import write
    from flexcp.plan.statistics import bytes_a_layer
    from flexcp.report.advice_words import advice_words
    from flexcp.report.sections import code_section, words_section
    from flexcp.report.strategies_table import StrategyTime, strategies_section

    times = []
    for mark, found in (
        ("static", advice.static),
        ("attention swapped", advice.swap),
        ("with the loader", advice.free),
    ):
        if found is None:
            continue
        count = len(found.steps)
        parts = [sum(getattr(step, f"{part}_ns") for step in found.steps) // count for part in ("attention", "wait")]
        moved = sum(map(bytes_a_layer, found.plans)) // count
        other = found.total_ns // count - sum(parts)
        times.append(StrategyTime(found.name, parts[0], parts[1], other, moved, found.compute_imbalance, mark))
    passes = len(advice.static.steps)
    mean = f"Mean of the {passes} passes that were simulated" if passes > 1 else "One pass"
    sections = [words_section(title, paragraphs) for title, paragraphs in advice_words(advice)]
    sections.append(strategies_section(times, f"{mean}, forward and backward.", of="pass"))
    if code:
        sections.append(code_section("Lines of code", code))
    head_flops = advice.question.preset.head_flops_per_token
    sections.append(_first_pass(advice.static, "Static", head_flops))
    if advice.verdict != "static":
        sections.append(_first_pass(advice.chosen, "flexcp", head_flops))
    question = advice.question
    write(
        path, sections, f"Advice for {question.preset.model.name} on {question.cluster}", advice_words(advice)[0][1][0]
    )


def _first_pass(answer: Answer, who: str, head_flops: int) -> Section:
    """Return the report's section about the first simulated pass of ``answer``, with the time of this pass.

    The headline of the report has the mean of all passes instead. ``who`` begins the section's title, and
    ``head_flops`` are the forward FLOPs of one token in the projection to the vocabulary.
    """
    from flexcp.cli.shared.reports import timed_plan
    from flexcp.report.plan_time import PlanTime

    passes, first = len(answer.steps), answer.steps[0]
    which = f"pass 1 of {passes} simulated" if passes > 1 else "the pass simulated"
    mean = answer.total_ns / passes / 1e6
    says = f"This is {which}: {first.total_ns / 1e6:,.1f} ms" + (
        f"; their mean is {mean:,.1f} ms." if passes > 1 else "."
    )
    return timed_plan(
        answer.plans[0], f"{who}: {answer.name}, {which}", PlanTime.of_step(first, head_flops, "pass", says)
    )

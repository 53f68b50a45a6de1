"""Advice in plain words for the terminal and the page: paragraphs under short titles."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from flexcp.compare.advice import Advice, Answer
from flexcp.compare.why_static import why_static
from flexcp.io.sizes import count_of
from flexcp.known_errors.words import in_a_sentence, sure_words
from flexcp.masks import Mask, area

Paragraphs = list[tuple[str, list[str]]]


def advice_words(advice: Advice) -> Paragraphs:
    """Return (title, paragraphs) pairs: the documents, the static method, the gains, what to do."""
    return [
        ("Your documents", [_documents(advice), _setting(advice)]),
        ("Static context parallelism", [_static(advice)]),
        ("What flexcp would give", _gains(advice)),
        ("What to do", _todo(advice)),
    ]


def gain_words(advice: Advice, answer: Answer) -> str:
    """Return the gain of an answer and what it is relative to, such as "1.35 times the speed of ring"."""
    return f"{advice.times(advice.gain(answer))} times the speed of {advice.static.name}"


def how_sure(advice: Advice) -> str:
    """Return sentences that say that nothing was measured, and how far such predictions were off."""
    return f"Nothing of this was measured. {in_a_sentence(sure_words(advice.question.cost))}"


def _documents(advice: Advice) -> str:
    lengths = np.array(advice.lengths, np.int64)
    if len(set(advice.lengths)) == 1:
        all_of = ", all" if len(lengths) > 1 else ""
        return f"{count_of(len(lengths), 'document')}{all_of} of {count_of(int(lengths[0]), 'token')}."
    order = np.argsort(-lengths, kind="stable")[: max(1, len(lengths) // 10)]
    longest, work = lengths[order].astype(float), _pairs(lengths, advice.question.masks)
    pairs = 100 * work[order].sum() / work.sum()
    return (
        f"{len(lengths):,} documents of {int(lengths.min()):,} to {int(lengths.max()):,} tokens, median "
        f"{int(np.median(lengths)):,}. The longest tenth holds {100 * longest.sum() / lengths.sum():.0f} % of the "
        f"tokens and about {pairs:.0f} % of the attention."
    )


def _pairs(lengths: NDArray[np.int64], masks: Mapping[str, tuple[Mask, int]]) -> NDArray[np.float64]:
    """Return the number of (query, key) pairs of each document, summed over all layers."""
    found = np.zeros(len(lengths))
    for mask, layers in masks.values():
        documents, slices = mask.slices_of(lengths)
        found += layers * np.bincount(documents, area(slices).astype(float), minlength=len(lengths))
    return found


def _setting(advice: Advice) -> str:
    q = advice.question
    tokens = sum(plan.batch.tokens for plan in advice.static.plans)
    passes = f"{advice.passes} passes" if advice.passes > 1 else "one pass"
    simulated = len(advice.static.steps)
    looked = longest = ""
    if simulated < advice.passes:
        seen, of_all = advice.longest_in
        looked = f", of which {simulated}, evenly spread, were simulated"
        longest = (
            f" A document of the greatest length, {max(advice.lengths):,} tokens, is in {seen or 'none'} of the "
            f"{simulated} simulated passes and in {of_all or 'none'} of all {advice.passes}."
        )
    left, divided = _sentence(advice.left_out), _sentence(q.divided)
    dtype = "" if q.preset.shape.dtype == "bfloat16" else f" in {q.preset.shape.dtype}"
    return (
        f"{q.preset.model.name} on {q.cluster} ({count_of(q.cluster.ranks, 'rank')}), attention "
        f"{_attention(q.masks)}{dtype}, at most {q.max_tokens_per_rank:,} tokens a rank: "
        f"the documents make {passes}{looked} ({tokens:,} tokens).{longest}{left}{divided}"
    )


def _sentence(words: str) -> str:
    """Return the words as a further sentence (leading space, capital, full stop), or nothing if there are none."""
    return f" {words[0].upper()}{words[1:]}." if words else ""


def _attention(masks: Mapping[str, tuple[Mask, int]]) -> str:
    if len(masks) == 1:
        return " ".join(str(mask) for mask, _ in masks.values())
    return " and ".join(f"{mask} ({count_of(layers, 'layer')})" for mask, layers in masks.values())


def _share(answer: Answer) -> str:
    return (
        f"attention {100 * answer.share('attention'):.0f} %, waiting for others {100 * answer.share('wait'):.0f} %, "
        f"the rest of each layer {100 * answer.share('linear'):.0f} %, exposed gradient sync "
        f"{100 * answer.share('sync'):.0f} %"
    )


def _static(advice: Advice) -> str:
    static = advice.static
    lost = 100 * (1 - advice.bound_ns / static.total_ns)
    return (
        f"{advice.baseline}, takes {static.total_ns / 1e6 / len(static.steps):,.1f} ms a pass, forward and backward: "
        f"{_share(static)}. Of its ranks {static.busiest_words} {static.compute_imbalance:.2f} times the mean's "
        f"attention. Compute divided perfectly, with no transfer or collective beside it, would save {lost:.0f} %."
        f"{_by_load(advice)}{_passed_over(advice)}"
    )


def _by_load(advice: Advice) -> str:
    """Return a further sentence on the best static method that deals documents by load; nothing if there is none."""
    static, by_load = advice.static, advice.by_load
    if by_load is None:
        return ""
    if by_load.name == static.name:
        return " Of the static methods that deal documents to their groups by load it is the best."
    instead = "" if static.name.endswith("@load") else " instead"
    return (
        f" The best one that deals documents to its groups by load{instead}, {by_load.name}, takes {_ms(by_load)} a "
        "pass."
    )


def _passed_over(advice: Advice) -> str:
    """Return a further sentence on static methods that cannot run all passes; nothing if there is none."""
    if not advice.passed_over:
        return ""
    return f" Static methods that refuse a planned pass were not considered: {', '.join(advice.passed_over)}."


def _gains(advice: Advice) -> list[str]:
    free, by_load = advice.free, advice.by_load
    speed = "what you run today" if advice.runs_it_today else gain_words(advice, free)
    found = [
        f"With flexcp's loader, strategy {free.name!r}: {_ms(free)} a pass, {speed}"
        + (
            f", and {by_load.total_ns / free.total_ns:.2f} times {'the speed' if advice.runs_it_today else 'that'} of "
            f"{by_load.name}, {advice.best_static} by load"
            if by_load is not None and by_load.name not in (free.name, advice.static.name)
            else ""
        )
        + f". {_share(free)}."
    ]
    if advice.swap is None:
        found.append("Swapping attention alone does not fit: a contiguous split is over the cap of tokens.")
    else:
        layout = advice.in_layout
        found.append(
            f"Swapping attention alone (your loader, labels and shapes stay): {_ms(advice.swap)} a pass, "
            f"{gain_words(advice, advice.swap)}"
            + (
                f", and {layout.total_ns / advice.swap.total_ns:.2f} times that of the best static method in the same "
                f"layout ({layout.name}, {_ms(layout)} a pass)"
                if layout is not None
                else ""
            )
            + "."
        )
    found.append(advice.pays)
    return found


def _ms(answer: Answer) -> str:
    return f"{answer.total_ns / 1e6 / len(answer.steps):,.1f} ms"


def _in_what_was_seen(advice: Advice) -> str:
    """Return a restriction of the verdict if no simulated pass has a document of the greatest length, else nothing."""
    if advice.longest_in[0] or not advice.longest_in[1]:
        return ""
    return (
        " in the simulated passes, none of which has a document of the greatest length "
        "(flexcp compare --batch looks at one that has)"
    )


def _memory(advice: Advice) -> list[str]:
    return [] if advice.memory is None else [advice.memory.words()]


def _todo(advice: Advice) -> list[str]:
    if advice.verdict == "static":
        stay = (
            f"Stay with {advice.static.name}: it is what flexcp would advise, and what you run today."
            if advice.runs_it_today
            else f"Do not bother: stay with {advice.static.name}. The gain is under {100 * advice.margin:g} "
            f"%{_in_what_was_seen(advice)}, because {why_static(advice)}."
        )
        return [
            stay,
            *_memory(advice),
            how_sure(advice),
            "Ask again when lengths, ranks or the mask change, "
            "or with --cost and your own calibration (flexcp calibrate).",
        ]
    q, answer = advice.question, advice.chosen
    what = (
        f'Swap attention, with layout="contiguous"; the loader would not add {100 * advice.margin:g} % '
        f"({advice.times(answer.total_ns / advice.free.total_ns)} times the speed of the swap)."
        if advice.verdict == "swap"
        else f'Use flexcp\'s loader (layout="free") with strategy="{answer.name}".'
    )
    balanced = (
        'deal the documents of a step to them and plan each with layout="contiguous".'
        if advice.verdict == "swap"
        else "planner.micro_batches(...) balances them."
    )
    micro = (
        f"Make {q.micro_batches} micro-batches a step of {q.tokens_per_step:,} tokens: {balanced}"
        if q.micro_batches > 1
        else "One pass a step fits; no micro-batches."
    )
    return [
        *([] if advice.cannot is None else [f"You need a change: {advice.cannot.words()}."]),
        what,
        micro,
        *_memory(advice),
        how_sure(advice),
        "Check it on your machines with flexcp bench step, and calibrate with flexcp calibrate.",
    ]

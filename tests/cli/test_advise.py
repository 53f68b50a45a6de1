"""Tests of ``flexcp advise``: for equal lengths it advises a static method and says why, its gains are those of
``flexcp compare``, and it reads lengths from all kinds of files.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from typer.testing import CliRunner

import flexcp
import flexcp.compare.advice as advice_module
from flexcp.batch import make_batch
from flexcp.calibration import Calibration
from flexcp.cli.main import app
from flexcp.clusters import cluster
from flexcp.compare.advice import Advice, Answer, Question, advise, answers_of, deal, request_of
from flexcp.compare.static_choice import spread_over
from flexcp.compare.why_static import losses, why_static
from flexcp.cost import CostModel
from flexcp.data.document_lengths import document_lengths
from flexcp.masks import causal, window
from flexcp.models.find import find_model
from flexcp.report.advice_words import _documents, _setting, _todo, gain_words
from flexcp.report.code_lines import FRAMEWORKS, Lines, code_lines
from flexcp.simulator.step_parts import Training
from flexcp.simulator.training import StepTime

KEYS = [
    "simulated",
    "documents",
    "tokens",
    "passes",
    "simulated_passes",
    "longest_in",
    "left_out",
    "micro_batches",
    "error",
    "margin_permille",
    "bound_ms",
    "baseline",
    "static",
    "static_by_load",
    "swap",
    "static_in_layout",
    "free",
    "pays",
    "verdict",
    "why",
    "memory",
    "code",
]


@pytest.fixture(scope="module", autouse=True)
def simulated_once() -> Iterator[None]:
    """Let the tests of this file, many of which ask for the text and the JSON of one advice, simulate it once."""
    real, known = advice_module.advise, dict[tuple[Question, tuple[int, ...]], Advice]()

    def advise_once(question: Question, lengths: Sequence[int], *tell: Any) -> Advice:
        key = (question, tuple(lengths))
        if key not in known:
            known[key] = real(question, lengths, *tell)
        return known[key]

    with patch.object(advice_module, "advise", advise_once):
        yield


def invoke(*words: str) -> Any:
    result = CliRunner().invoke(app, list(words), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result


def advice(*words: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(invoke("advise", *words, "--json").stdout)
    assert list(found) == KEYS
    return found


def test_equal_lengths_stay_static_and_say_why() -> None:
    found = advice("32x8192", "--cluster", "h100:1x8")
    assert found["verdict"] == "static"
    assert found["free"]["gain"] < 1.08
    assert found["why"].startswith("all documents have 8,192 tokens, so equal shares of documents are equal work")
    assert found["code"] == {}
    text = " ".join(invoke("advise", "32x8192", "--cluster", "h100:1x8").stdout.split())
    assert "Do not bother: stay with" in text
    assert "112 documents" not in text and "32 documents, all of 8,192 tokens." in text


@pytest.mark.parametrize("lengths", ["web:131072:0", "libra1m:131072:3"])
def test_gains_are_those_of_compare(lengths: str) -> None:
    setting = ["--cluster", "h100:2x4", "--model", "llama3-8b", "--max-tokens-per-rank", "32768"]
    found = advice(lengths, *setting)
    beside = json.loads(invoke("compare", "--lengths", lengths, *setting, "--json").stdout)
    rows = {row["strategy"]: row for row in beside["strategies"] if "speed_up" in row}
    assert found["static"]["strategy"] == beside["best_static"]
    assert found["static"]["pass_ms"] == pytest.approx(rows[beside["best_static"]]["step_ms"], abs=1e-3)
    assert found["free"]["gain"] == pytest.approx(rows[found["free"]["strategy"]]["speed_up"], abs=1e-4)
    assert found["static_by_load"]["strategy"] == beside["best_static_by_load"]
    assert found["static_by_load"]["gain"] == pytest.approx(rows[beside["best_static_by_load"]]["speed_up"], abs=1e-4)
    assert found["free"]["gain"] >= 0.999 * max(rows[name]["speed_up"] for name in ("auto", "blocks", "groups"))


def test_a_long_tail_gets_code_and_a_page(tmp_path: Path) -> None:
    page = tmp_path / "advice.html"
    words = ["advise", "60000,40x500", "--cluster", "h100:1x8", "--today", "dp", "--max-tokens-per-rank", "65536"]
    text = invoke(*words, "--framework", "all", "--html", str(page)).stdout
    assert "dp, what you use today," in text
    for title, _ in FRAMEWORKS.values():
        assert f"Lines for {title}" in text
    written = page.read_text()
    for part in ("What to do", "Lines of code", "Static: dp", "flexcp: "):
        assert part in written


def test_perfectly_divided_compute_has_the_vocabulary_in_it(tmp_path: Path) -> None:
    """If only the vocabulary grows, the time of perfectly divided compute grows by as much as that of the static
    method.
    """
    found = []
    for size in (1_000, 300_000):
        sizes = {"hidden_size": 1024, "num_hidden_layers": 4, "intermediate_size": 2816, "num_attention_heads": 8}
        config = {"model_type": "llama", "vocab_size": size, "num_key_value_heads": 8, **sizes}
        path = tmp_path / f"{size}.json"
        path.write_text(json.dumps(config))
        found.append(advice("32x8192", "--model", str(path), "--cluster", "h100:1x8", "--today", "zigzag"))
    bound = found[1]["bound_ms"] - found[0]["bound_ms"]
    few, many = (answer["static"]["pass_ms"] * (1 - answer["static"]["sync"]) for answer in found)
    static = many - few  # without gradient sync, which is no compute
    assert bound > 0.1 * found[1]["bound_ms"]
    assert bound == pytest.approx(static, rel=0.02)


def test_today_decides_what_gains_are_against() -> None:
    setting = ["60000,40x500", "--cluster", "h100:1x8", "--max-tokens-per-rank", "65536"]
    best, dp = advice(*setting), advice(*setting, "--today", "dp")
    assert dp["static"]["strategy"] == "dp"
    assert dp["free"]["pass_ms"] == best["free"]["pass_ms"]
    assert dp["free"]["gain"] > best["free"]["gain"] > 1
    assert dp["verdict"] == "free" or dp["verdict"] == "swap"


def test_todays_method_is_not_compared_with_itself() -> None:
    setting = ["20000,40x500", "--cluster", "h100:1x4", "--max-tokens-per-rank", "16384"]
    best = advice(*setting)["static_by_load"]["strategy"]
    text = " ".join(invoke("advise", *setting, "--today", best).stdout.split())
    assert f"{best}, what you use today, takes" in text
    assert "Of the static methods that deal documents to their groups by load it is the best." in text
    assert f"by load instead, {best}" not in text and f"times that of {best}" not in text
    other = next(name for name in ("zigzag:4@load", "ring:4@load") if name != best)
    text = " ".join(invoke("advise", *setting, "--today", other).stdout.split())
    assert f"The best one that deals documents to its groups by load, {best}, takes" in text
    assert f"times that of {best}" in text


def test_who_runs_auto_today_is_told_so() -> None:
    setting = ["20000,40x500", "--cluster", "h100:1x4", "--max-tokens-per-rank", "16384", "--today", "auto"]
    assert advice(*setting)["verdict"] == "static"
    text = " ".join(invoke("advise", *setting).stdout.split())
    assert "Stay with auto: it is what flexcp would advise, and what you run today." in text
    assert "The loader with auto is what you run today; the swap (" in text
    assert "a pass, what you run today" in text and "1.00 times the speed of auto" not in text
    assert "Do not bother" not in text


def test_why_todays_method_cannot_be_simulated_is_told() -> None:
    result = CliRunner().invoke(app, ["advise", "4000,10x500", "--ranks", "8", "--today", "zigzag:3"])
    assert "zigzag:3 does not divide the 8 ranks into groups; degrees that do: [1, 2, 4, 8]" in str(result.exception)


def test_help_says_when_compare_gives_the_same_times() -> None:
    told = " ".join(invoke("advise", "--help").stdout.replace("`", "").split())
    assert "flexcp compare gives the same times for one pass" in told
    assert "for the same model, cluster and --max-tokens-per-rank." in told


RARE = ["500"] * 90 + ["6000"] + ["500"] * 10
"""Documents for 4 ranks of at most 4,096 tokens: ``dp`` suits the simulated passes, not the one with the long one."""


def test_a_static_method_that_cannot_run_a_pass_is_neither_baseline_nor_advice(tmp_path: Path) -> None:
    file = tmp_path / "lengths.txt"
    words = [str(file), "--ranks", "4", "--max-tokens-per-rank", "4k"]
    file.write_text("\n".join(length for length in RARE if length == "500"))
    assert advice(*words)["static"]["strategy"] == "dp", "a test of nothing: dp is not the best without the document"
    file.write_text("\n".join(RARE))
    found = advice(*words)
    assert found["longest_in"] == {"simulated": 0, "all": 1}, "a test of nothing: the long document was simulated"
    assert found["static"]["strategy"] != "dp" and found["baseline"].startswith(found["static"]["strategy"])
    assert found["static_by_load"]["strategy"] != "dp@load"
    assert found["memory"]["refused_passes"] == 0 and "refuses" not in (found["why"] or "")
    text = " ".join(invoke("advise", *words).stdout.split())
    assert "Static methods that refuse a planned pass were not considered: dp." in text
    assert "stay with dp." not in text


def test_todays_method_that_cannot_run_a_pass_is_never_advised(tmp_path: Path) -> None:
    file = tmp_path / "lengths.txt"
    file.write_text("\n".join(RARE))
    words = [str(file), "--ranks", "4", "--max-tokens-per-rank", "4k", "--today"]
    found = advice(*words, "dp")
    says = f"dp cannot run 1 of {found['passes']} planned passes: this strategy keeps 6000 tokens on rank 0, over "
    assert found["why"].startswith(f"{says}max_tokens_per_rank=4096; document 6 alone has 6000 tokens")
    assert found["baseline"] == "dp, what you use today" and found["verdict"] in ("swap", "free") and found["code"]
    assert found["pays"].startswith("Neither the loader (")
    assert found["memory"]["refused_passes"] == 0
    text = " ".join(invoke("advise", *words, "dp").stdout.split())
    assert f"What to do You need a change: {says}" in text and "Do not bother" not in text
    assert advice(*words, "zigzag")["why"] is None or "cannot run" not in advice(*words, "zigzag")["why"]


def test_where_no_static_method_can_run_all_passes_it_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "lengths.txt"
    file.write_text("\n".join(RARE))
    monkeypatch.setattr("flexcp.compare.epoch_refusals.refusal", lambda request, name: "too long for a test")
    result = CliRunner().invoke(app, ["advise", str(file), "--ranks", "4", "--max-tokens-per-rank", "4097"])
    assert str(result.exception).startswith(
        "no static method can run all planned passes of these documents on h100:1x4 with at most 4,097 tokens a rank "
        "(dp: too long for a test); raise --max-tokens-per-rank"
    )


def test_one_rank_and_too_long_a_document() -> None:
    found = advice("100,7", "--cluster", "h100:1x1")
    assert (found["verdict"], found["why"]) == ("static", "there is one rank, so nothing has to be divided")
    result = CliRunner().invoke(app, ["advise", "100000", "--cluster", "h100:1x2", "--max-tokens-per-rank", "1000"])
    assert "document 0 has 100,000 tokens" in str(result.exception)


def test_a_document_longer_than_the_step_that_was_asked_for_is_told() -> None:
    asked = ["advise", "100,6000", "--cluster", "h100:1x2", "--max-tokens-per-rank", "4k", "--tokens-per-step"]
    assert str(CliRunner().invoke(app, [*asked, "5999"]).exception) == (
        "document 1 has 6,000 tokens, more than a step of 5,999 holds; raise --tokens-per-step to 6,000 or more, "
        "or cut such documents"
    )
    assert CliRunner().invoke(app, [*asked, "6000"]).exit_code == 0
    longer_than_the_default_step = ["advise", "100,7900", *asked[2:-1]]
    assert CliRunner().invoke(app, longer_than_the_default_step).exit_code == 0


def test_a_document_over_the_capacity_is_told_wherever_it_is(tmp_path: Path) -> None:
    """It is reported also in a pass that is not simulated, here the last of many passes."""
    file = tmp_path / "lengths.txt"
    file.write_text("\n".join(["512"] * 400 + ["131072", "600", "200000"]))
    words = ["advise", str(file), "--cluster", "h100:4x8", "--max-tokens-per-rank", "1k"]
    result = CliRunner().invoke(app, words)
    assert isinstance(result.exception, ValueError)
    for part in (
        "document 400 has 131,072 tokens",
        "2 documents in all are too long",
        "keep 32,768",
        "--max-tokens-per-rank to 6,250",
        "cut such",
    ):
        assert part in str(result.exception), result.exception


def test_a_static_method_keeps_one_degree_over_all_passes() -> None:
    """For one long document a group of all ranks is best, for many equal ones small groups are. Only a method with a
    degree that can run both passes is an answer.
    """
    question = Question(find_model("llama3-8b"), cluster("h100:1x8"), causal(), CostModel(), 8192, 57_344)
    passes = [[50_000, 7_000], [4096] * 14]
    requests = [request_of(question, make_batch(found, masks=question.masks)) for found in passes]
    for name in ("ulysses", "zigzag", "allgather", "usp", "dp"):
        found = answers_of(question, requests, (name,), lambda _: None)
        fits = [len(answers_of(question, [request], (name,), lambda _: None)) for request in requests]
        assert [answer.name.partition(":")[0] for answer in found] == ([name] if all(fits) else []), name
        assert all(len(answer.steps) == 2 for answer in found)
    assert len({answers_of(question, [r], ("ulysses",), lambda _: None)[0].name for r in requests}) == 2, (
        "a test of nothing"
    )


def test_the_advice_says_whether_the_longest_document_was_simulated() -> None:
    question = Question(find_model("llama3-8b"), cluster("h100:1x4"), None, CostModel(), 100, 100)
    answer = Answer("zigzag", (), (StepTime(9, 4, 2, 0, 1, np.zeros((4, 4), np.int64)),) * 3)
    seen = Advice(question, (5, 6), 12, answer, None, answer, 8, (1, 2), left_out="the last 3 are left out")
    assert _setting(seen).endswith(
        "were simulated (0 tokens). A document of the greatest length, 6 tokens, is in 1 of the 3 simulated passes and "
        "in 2 of all 12. The last 3 are left out."
    )
    assert "in none of the 3 simulated passes and in 1 of all 12." in _setting(replace(seen, longest_in=(0, 1)))
    assert "simulated" not in _setting(replace(seen, passes=3))


def test_the_share_of_attention_is_that_of_the_mask() -> None:
    question = Question(find_model("llama3-8b"), cluster("h100:1x4"), window(99), CostModel(), 4096, 4096)
    answer = Answer("zigzag", (), (StepTime(9, 4, 2, 0, 1, np.zeros((4, 4), np.int64)),))
    told = _documents(Advice(question, (1000, *[100] * 9), 1, answer, None, answer, 8))
    own, others = sum(min(i + 1, 100) for i in range(1000)), 9 * 5050
    assert f"53 % of the tokens and about {100 * own / (own + others):.0f} % of the attention." in told


def test_passes_with_a_document_of_the_greatest_length_are_counted() -> None:
    """Data that was cut at a maximum length has many documents of that length."""
    question = Question(find_model("llama3-8b"), cluster("h100:1x4"), None, CostModel(), 128, 512)
    given = [400, 100] * 7 + [300, 200]
    passes = deal(given, question)
    found = advise(question, given)
    assert found.longest_in == (sum(400 in each for each in spread_over(passes, len(found.static.steps))), 7)
    assert sum(400 in each for each in passes) == 7 < len(passes), "a test of nothing"


def answer_of(name: str, parts: list[list[int]], work: list[int]) -> Answer:
    """An answer of one pass. ``parts`` are the times of attention, waiting, the rest of each layer and sync of
    each rank, ``work`` the query-key pairs of each rank.
    """
    ranks = np.array(parts, np.int64).T
    done = ranks.sum(axis=0)
    plan: Any = SimpleNamespace(work_of_layers=lambda: np.array(work, np.int64))
    return Answer(name, (plan,), (StepTime(int(done.max()), *(int(x) for x in ranks[:, done.argmax()]), ranks),))


def advice_on(static: Answer, free: Answer, bound: int, lengths: tuple[int, ...] = (5, 6)) -> Advice:
    question = Question(find_model("llama3-8b"), cluster("h100:1x4"), None, CostModel(), 100, 100)
    return Advice(question, lengths, 1, static, None, free, bound)


def test_why_static_speaks_of_times_not_of_percentages_over_100() -> None:
    even = answer_of("zigzag", [[500, 0, 570, 0]] * 4, [1] * 4)
    assert why_static(advice_on(even, even, 1000)) == (
        "zigzag takes only 7 % longer on these documents than all compute divided perfectly over the ranks"
    )
    static = answer_of("zigzag", [[500, 1200, 600, 330]] * 4, [1] * 4)
    far = why_static(advice_on(static, answer_of("blocks", [[500, 1180, 600, 330]] * 4, [1] * 4), 1000))
    for part in (
        "zigzag takes 2.63 times as long as perfectly divided compute, and the best plan, blocks, 2.61 times",
        "46 % waiting for others, 13 % gradient sync and 4 % work that perfectly divided compute does not have",
    ):
        assert part in far, far
    assert "%" not in far.split("compute")[0]


@pytest.mark.parametrize(
    ("rank", "way_out"),
    [
        ([900, 0, 500, 0], "more tokens a pass, or a larger --max-tokens-per-rank, would leave more room"),
        ([400, 500, 500, 0], "faster links or more tokens a pass would help"),
        ([400, 0, 500, 500], "would hide more of the gradient sync"),
    ],
)
def test_why_static_follows_from_what_was_simulated(rank: list[int], way_out: str) -> None:
    """If one rank has twice the mean's attention, uneven work is given as the reason, and no other one; likewise for
    waiting and for sync.
    """
    uneven = rank[0] > 400
    others = [[250 if uneven else 400, rank[1] * (not uneven), 500, rank[3]]] * 3
    static = answer_of("zigzag:2", [rank, *others], [9, 3, 3, 3] if uneven else [1] * 4)
    near = answer_of(
        "ulysses:2@load", [[rank[0] - 20 * uneven, *rank[1:]], *others], [8, 3, 3, 3] if uneven else [1] * 4
    )
    advice = advice_on(static, near, 900)
    assert advice.verdict == "static"
    why = why_static(advice)
    assert way_out in why.rpartition("; ")[2], why
    assert ("(the busiest does 2.00 times the mean's attention)" in why) == uneven
    assert "not how documents are divided" not in why
    for answer in (static, near):
        lost = losses(answer, 900)
        assert sum(lost.values()) == pytest.approx(1 - 900 / answer.total_ns)
        assert max(lost, key=lambda part: lost[part]) == {900: "uneven"}.get(rank[0], "waiting" if rank[1] else "sync")


@pytest.mark.parametrize(
    ("swap_ns", "free_ns", "verdict", "says"),
    [
        (1050, 1010, "static", "Neither the loader"),
        (1050, 1000, "free", "Of the two the loader (1.09 times the speed of zigzag) pays, not the swap (1.04 times)."),
        (1000, 1050, "swap", "Of the two the swap (1.09 times) pays; the loader"),
        (900, 880, "swap", "Both pay"),
        (1000, 880, "free", "Both pay"),
        (None, 1000, "free", "The swap does not fit; the loader (1.09 times the speed of zigzag) pays."),
        (None, 1050, "static", "The swap does not fit; the loader (1.04 times the speed of zigzag) does not pay"),
    ],
)
def test_the_verdict_is_what_the_sentence_says_pays(swap_ns: int | None, free_ns: int, verdict: str, says: str) -> None:
    """Here a gain must exceed 8 %; a swap that gains less is not advised, even if the loader gains hardly more."""

    def taking(name: str, ns: int) -> Answer:
        return answer_of(name, [[ns // 2, 0, ns - ns // 2, 0]] * 4, [1] * 4)

    free, swap = taking("auto", free_ns), None if swap_ns is None else taking("auto contiguous", swap_ns)
    found = replace(advice_on(taking("zigzag", 1090), free, 800), swap=swap)
    assert found.margin == 0.08, "a test of other cases"
    assert (found.verdict, found.pays[: len(says)]) == (verdict, says)
    assert found.chosen is {"static": found.static, "swap": swap, "free": free}[verdict]


@pytest.mark.parametrize(
    ("free_ns", "verdict", "gain"),
    [(100_000, "static", "1.078"), (99_630, "free", "1.082"), (99_820, "static", "1.0799"), (99_000, "free", "1.09")],
)
def test_a_gain_close_to_the_margin_is_printed_on_its_side_of_it(free_ns: int, verdict: str, gain: str) -> None:
    """Here a gain must exceed 8 %; rounded to two digits, 1.078 and 1.082 would both be 1.08."""
    static, free = (
        answer_of(name, [[ns, 0, 0, 0]] * 4, [1] * 4) for name, ns in (("ring", 107_800), ("auto", free_ns))
    )
    found = advice_on(static, free, 90_000)
    assert (found.margin, found.verdict) == (0.08, verdict)
    for told in (found.pays, gain_words(found, free)):
        assert f"{gain} times the speed of ring" in told
    swap = replace(found, swap=free).pays
    assert swap.count(f"{gain} times") == 2, swap


def test_the_loader_beside_a_swap_is_printed_on_its_side_of_the_margin() -> None:
    static, swap, free = (
        answer_of(name, [[ns, 0, 0, 0]] * 4, [1] * 4)
        for name, ns in (("ring", 200_000), ("auto contiguous", 107_800), ("auto", 100_000))
    )
    found = replace(advice_on(static, free, 90_000), swap=swap)
    assert _todo(found)[0].endswith("the loader would not add 8 % (1.078 times the speed of the swap).")


def test_a_static_method_close_to_perfect_compute_is_printed_on_its_side_of_the_margin() -> None:
    static = answer_of("zigzag", [[1077, 0, 0, 0]] * 4, [1] * 4)
    assert why_static(advice_on(static, static, 1000)).startswith("zigzag takes only 7.7 % longer")


@pytest.mark.parametrize(
    ("swap_ns", "words"),
    [(700, 'plan each with layout="contiguous".'), (1000, "planner.micro_batches(...) balances them.")],
    ids=["swap", "loader"],
)
def test_micro_batches_are_made_in_the_layout_that_is_advised(swap_ns: int, words: str) -> None:
    """``planner.micro_batches`` takes no layout, so for the swap every micro-batch is planned on its own."""
    static, swap, free = (
        answer_of(name, [[ns, 0, 0, 0]] * 4, [1] * 4)
        for name, ns in (("zigzag", 1000), ("auto contiguous", swap_ns), ("auto", 700))
    )
    found = replace(advice_on(static, free, 600), swap=swap)
    found = replace(found, question=replace(found.question, tokens_per_step=1000))
    [told] = (line for line in _todo(found) if line.startswith("Make 3 micro-batches a step of 1,000 tokens: "))
    assert told.endswith(words)


@pytest.mark.parametrize("below", [1, 60])
def test_no_share_of_what_is_lost_is_negative(below: int) -> None:
    """The slowest rank computes less than the mean, by a little or by much, and waits for the others."""
    static = answer_of("zigzag", [[400 - below, 400, 300, 0], *[[400, 390 - below, 300, 0]] * 3], [1] * 4)
    advice, lost = advice_on(static, static, 700), losses(static, 700)
    assert static.uneven < 0, "a test of nothing"
    assert min(lost.values()) >= 0 and sum(lost.values()) >= 1 - 700 / static.total_ns - 1e-9
    assert (lost["waiting"], lost["sync"]) == (static.share("wait"), static.share("sync")), "as in the sentence before"
    assert "-" not in why_static(advice) and "of its pass 0 % is compute of the slowest rank" in why_static(advice)
    fast = answer_of("zigzag", [[399, 0, 300, 0]] * 4, [1] * 4)
    assert why_static(advice_on(fast, fast, 700)).startswith("zigzag takes only 0 % longer")


def test_equal_documents_that_divide_unevenly_are_not_called_equal_work() -> None:
    static = answer_of("dp", [[800, 0, 100, 0], [400, 0, 50, 0], [400, 0, 50, 0], [400, 0, 50, 0]], [2, 1, 1, 1])
    why = why_static(advice_on(static, static, 500, (7, 7, 7, 7, 7)))
    assert "equal work" not in why and "no plan is faster" in why and "1.60 times the mean's attention" in why


def test_a_config_brings_its_masks_and_the_lines_explain_themselves(tmp_path: Path) -> None:
    kinds = ["sliding_attention", "full_attention"] * 2
    (tmp_path / "config.json").write_text(
        json.dumps(
            {
                "model_type": "gpt_oss",
                "hidden_size": 2880,
                "intermediate_size": 2880,
                "num_attention_heads": 64,
                "head_dim": 64,
                "num_key_value_heads": 8,
                "num_hidden_layers": 4,
                "num_local_experts": 32,
                "num_experts_per_tok": 4,
                "vocab_size": 201088,
                "sliding_window": 128,
                "layer_types": kinds,
                "_name_or_path": "openai/gpt-oss-20b",
            }
        )
    )
    setting = ["60000,40x500", "--ranks", "8", "--max-tokens-per-rank", "64k", "--today", "dp"]
    text = invoke("advise", *setting, "--model", str(tmp_path)).stdout
    flat = " ".join(text.split())
    assert "gpt-oss-20b on h100:1x8 (8 ranks), attention causal (2 layers) and window of 128 keys (2 layers)" in flat
    assert 'masks={"full": (flexcp.causal(), 2), "window": (flexcp.window(127, 0), 2)}' in text
    by_numbers = invoke(
        "advise", *setting, "--heads", "8", "--hidden", "1024", "--layers", "2", "--mask", "window:4096"
    ).stdout
    assert "attention window of 4,096 keys, at most" in " ".join(by_numbers.split())
    assert 'masks={"mask": (flexcp.window(4095, 0), 2)}' in by_numbers


@pytest.mark.parametrize("more", [[], ["--tp", "2"], ["--max-tokens-per-rank", "8k"], ["--cost"]])
def test_the_lines_make_the_planner_that_was_simulated(
    more: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lines for PyTorch and for Hugging Face are executed and plan the same; the others must contain the cap."""
    kept: list[Advice] = []
    real = advice_module.advise
    monkeypatch.setattr(advice_module, "advise", lambda *given: kept.append(real(*given)) or kept[0])
    if more == ["--cost"]:
        file = tmp_path / "cost.json"
        file.write_text(
            json.dumps(Calibration(CostModel("mine", forward_efficiency=300), "", {"gflops": 7777}).to_json())
        )
        more = ["--cost", str(file)]
    sizes = ["--heads", "8", "--kv-heads", "4", "--head-dim", "64", "--hidden", "768", "--layers", "3"]
    code = advice("30000,20x500", "--cluster", "h100:1x4", "--today", "ring", "--framework", "all", *sizes, *more)[
        "code"
    ]
    (found,) = kept
    plan, cap = found.chosen.plans[0], found.question.max_tokens_per_rank
    swap = {"layout": "contiguous"} if found.verdict == "swap" else {}
    sizes_of_model = {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}
    config = pytest.importorskip("transformers").LlamaConfig(**sizes_of_model, dtype="bfloat16")
    for title, text in code.items():
        if "FSDP2" not in title and title != "torchtitan":
            assert f"max_tokens_per_rank={cap}" in text, title
        if title == "PyTorch, your own loop" or "Hugging Face" in title:
            planner = executed(text, model=config)["planner"]
            assert planner.max_tokens_per_rank == cap
            assert planner(plan.batch.lengths, masks=found.question.masks, **swap).hash == plan.hash, title
    masks = re.search(r"masks=(\{.*?\})", code["PyTorch, your own loop"])
    assert masks is not None and eval(masks[1], {"flexcp": flexcp}) == found.question.masks


def executed(code: str, **known: Any) -> dict[str, Any]:
    """Return the namespace after the imports of ``code`` and its assignments to ``planner`` and ``calibration``."""
    for line in ast.parse(code).body:
        names = (
            [target.id for target in line.targets if isinstance(target, ast.Name)]
            if isinstance(line, ast.Assign)
            else []
        )
        wanted = isinstance(line, ast.Import | ast.ImportFrom) and "huggingface_trainer" not in ast.unparse(line)
        if wanted or names in (["planner"], ["calibration"]):
            exec(ast.unparse(line), known)
    return known


def test_the_budget_is_explained() -> None:
    def lines(step: int, passes: int, longest: int = 1) -> str:
        masks = {"mask": (causal(), 4)}
        filled = Lines(
            Training(find_model("llama3-8b")),
            cluster("h100:4x8"),
            "blocks",
            32_768,
            step,
            passes,
            masks,
            False,
            longest,
        )
        return code_lines("pytorch", filled)[1]

    assert "# budget: tokens of a batch, 7/8 of 32 ranks x 32,768" in lines(917_504, 1) and "budget=917504" in lines(
        917_504, 1
    )
    assert "4 batches make a step of 2,000,000" in lines(2_000_000, 4) and "budget=500000" in lines(2_000_000, 4)
    assert "the step you asked for" in lines(1000, 1)
    assert "budget=1000000, " in lines(917_504, 1, 1_000_000), (
        "the loader would refuse a document longer than its budget"
    )
    assert "your longest document" in lines(917_504, 1, 1_000_000)


def test_documents_at_the_end_that_no_pass_has_are_told(tmp_path: Path) -> None:
    file = tmp_path / "lengths.txt"
    file.write_text("\n".join(["3000", "500"] * 3 + ["400", "300"]))
    words = [str(file), "--ranks", "4", "--max-tokens-per-rank", "1k"]
    found = advice(*words)
    says = "the last 2 documents (700 tokens), less than half a pass, are left out"
    assert (found["passes"], found["left_out"]) == (3, says)
    assert f"3 passes (10,500 tokens). T{says[1:]}." in " ".join(invoke("advise", *words).stdout.split())
    file.write_text("\n".join(["3000", "500"] * 3))
    assert advice(*words)["left_out"] is None


def test_ranks_are_one_node_and_not_beside_a_cluster() -> None:
    by_ranks, by_cluster = (advice("9000,800,31", *way) for way in (["--ranks", "4"], ["--cluster", "h100:1x4"]))
    assert by_ranks == by_cluster
    result = CliRunner().invoke(app, ["advise", "9000", "--ranks", "4", "--cluster", "h100:1x4"])
    assert "--ranks R is one node of R; drop it, or drop --cluster" in str(result.exception)


def test_documents_are_dealt_in_order() -> None:
    def question(cap: int, step: int) -> Question:
        return Question(find_model("llama3-8b"), cluster("h100:1x4"), causal(), CostModel(), cap, step)

    assert deal([30, 30, 30, 30, 30], question(20, 70)) == [[30, 30], [30, 30]]
    assert deal([500, 1, 1], question(20, 70)) == [[500]], "the rest is less than half a pass"
    assert deal([500, 1, 34], question(20, 70)) == [[500], [1, 34]]
    assert question(20, 70).micro_batches == 1
    assert question(20, 140).micro_batches == 2
    assert deal([35] * 4, question(20, 140)) == [[35, 35], [35, 35]]
    assert spread_over([[i] for i in range(9)], 3) == [[0], [3], [6]]


# --- where lengths come from ------------------------------------------------------------------------------------------


def test_json_lines_of_lengths_ids_and_texts(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    file = tmp_path / "documents.jsonl"
    file.write_text('{"text": "a b a"}\n{"input_ids": [5, 6]}\n\n{"length": 7}\n"b"\n4\n')
    told: list[str] = []
    assert document_lengths(str(file), str(tmp_path / "tokenizer.json"), None, told.append) == [3, 2, 7, 1, 4]
    file.write_text('{"body": "a b", "text": "a"}\n')
    assert document_lengths(f"@{file}", str(tmp_path / "tokenizer.json"), "body") == [2]


def test_a_saved_data_set(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict({"input_ids": [[1, 2, 3], [4]]}).save_to_disk(tmp_path / "set")
    assert document_lengths(f"hf:{tmp_path / 'set'}", None, None) == [3, 1]
    with pytest.raises(ValueError, match="holds one data set, not the split 'test'; write hf:"):
        document_lengths(f"hf:{tmp_path / 'set'}:test", None, None)


def test_splits_of_a_saved_data_set(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = {name: datasets.Dataset.from_dict({"input_ids": [[1] * n]}) for n, name in ((3, "first"), (4, "second"))}
    datasets.DatasetDict(rows).save_to_disk(tmp_path / "sets")
    assert document_lengths(f"hf:{tmp_path / 'sets'}:second", None, None) == [4]
    with pytest.raises(ValueError, match="has no split 'train'; it has first, second: name one, as in hf:"):
        document_lengths(f"hf:{tmp_path / 'sets'}", None, None)


def test_options_that_trees_do_not_use_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "trees.JSONL"
    file.write_text('{"parents": [-1, 0, 0], "lengths": [40, 20, 30]}\n')
    result = CliRunner().invoke(app, ["advise", str(file), "--ranks", "2", "--html", str(tmp_path / "page.html")])
    assert str(result.exception).endswith("holds trees, which are compared with separate documents alone; drop --html")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"text": "a"}', ["documents.jsonl, line 1", "--tokenizer"]),
        ('{"body": 3}', ["no field input_ids", "it has body", "--field"]),
        ("[1, 2]\nnot", ["documents.jsonl, line 2: not JSON, or cut off"]),
        ("\n0", ["documents.jsonl, line 2", "0 is no document"]),
        ("true", ["True is no document"]),
        ('{"input_ids": [[1, 2, 3]]}', ["documents.jsonl, line 1", "a list of lists", "without a batch dimension"]),
        ('[{"length": 5000}]', ["documents.jsonl, line 1", "a list of objects"]),
        ("", ["holds no documents"]),
    ],
)
def test_mistakes_in_documents(content: str, words: list[str], tmp_path: Path) -> None:
    file = tmp_path / "documents.jsonl"
    file.write_text(content)
    with pytest.raises(ValueError) as error:
        document_lengths(str(file), None, None)
    assert not [word for word in words if word not in str(error.value)], error.value


def test_other_mistakes(tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text("{}")
    (tmp_path / "d.jsonl").write_text("3\n")
    for text, tokenizer, field, words in (
        ("4,5", "x.json", None, "are for .jsonl files"),
        (str(tmp_path / "none.jsonl"), None, None, "No such file"),
        (str(tmp_path / "d.jsonl"), str(tmp_path / "bad.json"), None, "is no tokenizer.json"),
        (f"hf:{tmp_path}", None, None, "cannot load the data set"),
    ):
        with pytest.raises(ValueError, match=words):
            document_lengths(text, tokenizer, field)


def test_an_error_without_words_is_told_by_its_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def broken(name: str) -> None:
        raise KeyError

    monkeypatch.setitem(
        sys.modules, "transformers", SimpleNamespace(AutoTokenizer=SimpleNamespace(from_pretrained=broken))
    )
    (tmp_path / "d.jsonl").write_text("3\n")
    with pytest.raises(ValueError, match=r"cannot load the tokenizer 'nobody/none': KeyError\(\)"):
        document_lengths(str(tmp_path / "d.jsonl"), "nobody/none", None)


def test_advice_under_tensor_parallelism_counts_pools_not_gpus() -> None:
    setting = ["20000,40x500", "--cluster", "h100:4x8", "--tp", "8", "--max-tokens-per-rank", "65536", "--today", "dp"]
    found = advice(*setting, "--framework", "all")
    assert found["free"]["most_tokens"] >= 40_000 / 4
    says = "H100:4x8 under tp 8: 4 context-parallel ranks, 1 a node, each with 4 query and 1 KV heads."
    assert says in " ".join(invoke("advise", *setting).stdout.split())
    shape = 'flexcp.cluster("h100", nodes=4, ranks_per_node=1)'
    assert found["code"] and "heads=4, kv_heads=1" in found["code"]["PyTorch, your own loop"]
    assert all(shape in text for title, text in found["code"].items() if "FSDP2" not in title)
    assert "tp=8" in found["code"]["Hugging Face Transformers"]


def test_a_gain_says_what_it_is_over(tmp_path: Path) -> None:
    """With one pass the baseline is the best static method of that batch; with several it is one method for all."""
    file = tmp_path / "lengths.txt"
    file.write_text("\n".join(["3000", "900", "200", "100"] * 4))
    words = ["--cluster", "h100:1x4", "--max-tokens-per-rank"]
    for cap, scope in (("1500", "fixed for the run"), ("8k", "of the batch")):
        found = advice(str(file), *words, cap)
        static, by_load = found["static"], found["static_by_load"]
        assert found["baseline"] == f"{static['strategy']}, the best static method {scope}, documents dealt by tokens"
        assert static["gain"] == 1 and by_load["strategy"].endswith("@load")
        text = " ".join(invoke("advise", str(file), *words, cap).stdout.split())
        assert f"{found['baseline']}, takes" in text and f"times the speed of {static['strategy']}" in text
        assert f"deals documents to its groups by load instead, {by_load['strategy']}, takes" in text
    assert advice(str(file), *words, "8k", "--today", "dp")["baseline"] == "dp, what you use today"


def test_gradient_sync_is_that_of_the_options(tmp_path: Path) -> None:
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("700\n300\n500\n200\n" * 4)
    words = ["advise", str(lengths), "--model", "llama3-8b", "--cluster", "h100:1x2", "--max-tokens-per-rank", "4k"]
    shown = {
        more: re.search(r"exposed gradient sync (\d+) %", " ".join(invoke(*words, *more).stdout.split()))
        for more in (("--sync", "none"), ("--sync", "allreduce", "--overlap", "0"), ("--sync", "allreduce"))
    }
    none, exposed, hidden = (int(found[1]) for found in shown.values() if found is not None)
    assert none == 0 < exposed and hidden <= exposed
    with pytest.raises(ValueError, match="--sync is fsdp, allreduce, none; got 'nope'"):
        invoke(*words, "--sync", "nope")


def test_a_length_in_quotes_is_no_text(tmp_path: Path) -> None:
    """Taken for a text, ``"800"`` would be tokenized, and the tokens of its digits counted."""
    file = tmp_path / "lengths.jsonl"
    file.write_text('{"length": 500}\n{"length": "800"}\n')
    with pytest.raises(ValueError, match=r"line 2: length is the text '800'; write lengths as numbers, without quotes"):
        document_lengths(str(file), None, None)

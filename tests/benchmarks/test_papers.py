"""Tests of the page that compares ``auto`` with the planners of three papers (DCP, FCP, DHP): verdicts, one for each
comparison; the summary; the degrees of baselines; and complete rows.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import papers
import papers_dcp
import papers_dhp
import papers_fcp
import papers_reshuffle
import papers_words
from flexcp.clusters import cluster
from flexcp.compare.compare import planned
from flexcp.cost import PEAK_PERMILLE
from flexcp.data.lengths import draw_lengths
from flexcp.models.find import find_model
from flexcp.simulator.passes import Rules
from flexcp.simulator.training import StepTime
from papers_rows import BOX_TIME, BYTES, HEADS, PLANNING, Row, absent, counts, percent, verdicts
from papers_runs import OverStatic, Runs, Timed, attention_ns, least_of_few, timing
from papers_summary import summary, told
from simulated import step_of


@pytest.mark.parametrize(
    ("planner", "auto", "more", "verdict"),
    [(1.0, 1.04, True, "same"), (1.0, 1.2, True, "better"), (1.0, 1.2, False, "worse"), (10.0, 8.0, False, "better")],
)
def test_verdicts_compare_auto_with_the_published_planner(
    planner: float, auto: float, more: bool, verdict: str
) -> None:
    assert Row("1", "x", "words", planner, auto, "simulated", more).verdict == verdict


def test_a_figure_that_is_not_here_says_why() -> None:
    found = absent("20", "loss", "the same", "not here").cells()
    assert found == ["20", "loss", "the same", *["-"] * 6, "not here"]


def compared(planner: float, auto: float, comparison: str = "", **more: Any) -> Row:
    return Row("14", f"over {planner}", 1.5, planner, auto, "simulated", comparison=comparison, **more)


def test_a_comparison_is_judged_once() -> None:
    """A row of the same comparison over another baseline says "as above"; another aspect (bytes instead of time) or
    another batch gets a verdict of its own.
    """
    rows = [
        compared(1.0, 1.2, "a batch"),
        compared(2.0, 2.4, "a batch"),
        compared(2.0, 2.4, "another batch"),
        compared(5.0, 4.0, "a batch", aspect=BYTES, more_is_better=False),
        compared(3.0, 3.6),
        compared(3.5, 4.2),
        compared(1.0, 9.0, aspect=None),
        absent("20", "loss", "the same", "not here"),
    ]
    assert verdicts(rows) == ["better", "as above", "better", "better", "better", "better", "-", "-"]
    assert counts(rows) == {"time": {"better": 4}, "bytes": {"better": 1}}
    assert rows[1].cells(verdicts(rows)[1])[5] == "as above"


def test_rows_without_a_verdict_hide_no_later_one() -> None:
    rows = [compared(1.0, 2.0, "a batch", aspect=None), compared(1.0, 2.0, "a batch")]
    assert verdicts(rows) == ["-", "better"]


def test_the_summary_has_a_line_for_every_figure_and_counts_each_comparison_once() -> None:
    static = OverStatic(1.1, 1.3)
    rows = [
        compared(1.0, 1.2, "a batch", static=static),
        compared(2.0, 2.4, "a batch", static=static),
        compared(4.0, 3.0, static=OverStatic(0.9, 1.0)),
        compared(1.0, 3.0, part="elsewhere"),
        Row("17", "planning", "under 10", 3.0, 0.2, "measured, one core", False, aspect=PLANNING),
        Row("imbalance", "of a rival", "48 to 75 %", 0.5, None, "counted in plans", False, percent),
        absent("20", "loss", "the same", "not here"),
    ]
    lines = summary(rows)
    assert lines[2:-1] == [
        "| 14 | 3 | 1.50 | 2.00 (1.00 to 4.00) | 2.40 (1.20 to 3.00) | 1 better, 1 worse | 1.10 | 1.30 | simulated |",
        "| 14, elsewhere | 1 | 1.50 | 1.00 | 3.00 | 1 better | - | - | simulated |",
        "| 17 | 1 | under 10 | 3.00 | 0.20 | 1 better | - | - | measured |",
        "| imbalance | 1 | 48 to 75 % | 50.0% | - | - | - | - | counted in plans |",
    ]
    assert told(rows) == (
        "time (simulated): 2 better, 0 the same, 1 worse; planning (measured): 1 better, 0 the same, 0 worse"
    )


def test_times_measured_in_the_box_are_counted_apart() -> None:
    boxed = Row("reshuffle", "box", "-", 10, 8, "measured, kernels replaced by waits", False, aspect=BOX_TIME)
    assert told([compared(1.0, 1.2), boxed]) == (
        "time (simulated): 1 better, 0 the same, 0 worse; time in the box (measured): 1 better, 0 the same, 0 worse"
    )


def test_the_page_begins_with_the_summary() -> None:
    rows = {name: [compared(1.0, 1.2, "a batch"), compared(2.0, 2.4, "a batch")] for name in papers.PAPERS}
    words = {name: replace(paper, words=lambda rows: ["why"]) for name, paper in papers.PAPERS.items()}
    text = papers.written(rows, False, 11.4, words)
    assert text.index("## In short") < text.index("1 better, 0 the same, 0 worse") < text.index("## DCP (arXiv")
    assert text.count("| as above |") == 3 and "its lead is probably too large" in text and "in 11 CPU minutes" in text


@pytest.mark.parametrize(
    ("longest", "scale", "ranks"), [(65_536, 0.5, 8), (65_536, 1.0, 16), (65_536, 4.0, 32), (262_144, 0.5, 32)]
)
def test_baselines_have_the_degrees_of_dcps_code(longest: int, scale: float, ranks: int) -> None:
    """DCP's code fixes the degree for a whole run: data parallelism is the largest power of two such that a batch has
    room for that many of the data set's longest documents, and context parallelism has the remaining factor of ranks.
    """
    assert papers_dcp.degree(longest, scale) == ranks
    assert papers_dcp.baselines(ranks, causal=True) == [f"ring:{ranks}", f"zigzag:{ranks}", f"usp:2,{ranks // 2}"]
    assert papers_dcp.baselines(ranks, causal=False) == [f"usp:2,{ranks // 2}"], (
        "TransformerEngine alone has other masks"
    )


def test_end_to_end_batches_are_as_long_as_their_longest_document_may_be() -> None:
    for cap in (16_384, 131_072):
        lengths = papers_dcp.capped("longalign", cap, 0)
        assert sum(lengths) == cap and max(lengths) <= cap


def test_fixed_methods_have_ulysses_and_usp() -> None:
    found = papers_dhp.fixed_methods(16)
    assert {"dp", "zigzag:16"} <= set(found["Megatron-LM"]) and {"dp", "ulysses:16"} <= set(found["DeepSpeed"])
    assert {*found["Megatron-LM"], *found["DeepSpeed"], "usp:8,2", "usp:2,8"} <= set(found["any fixed"])
    assert not any(name.startswith("usp") for whose in ("Megatron-LM", "DeepSpeed") for name in found[whose])


def test_ulysses_has_any_degree_that_divides_the_heads() -> None:
    """32 query heads over 8 KV heads can run on up to 32 ranks; 28 heads, as for powers of two, only on 2 or 4."""
    runs = Runs()
    for model, most in (("llama3-8b", 32), ("qwen2.5-vl-7b", 4)):
        where = step_of(find_model(model), cluster("ascend910b", 8, 8))
        ran = {d for d in (2, 4, 8, 16, 32, 64) if runs.plan(where, [64 * 512], f"ulysses:{d}") is not None}
        assert ran == {d for d in (2, 4, 8, 16, 32, 64) if d <= most}


def test_no_ratio_is_over_magiattention_and_both_rings_over_all_gpus_are_rivals() -> None:
    """The scaling rows of FCP compare with the zig-zag ring, so the speed rows must compare with it as well."""
    found = papers_fcp.rivals(64)
    assert not any("minheap" in rival for rival in found)
    assert {"hdp", "wlb", "ring:64", "zigzag:64"} == set(found)


def test_rings_hold_the_longest_document() -> None:
    assert papers_fcp.rings(16) == ["zigzag:16"] and papers_fcp.rings(64) == ["zigzag:16", "zigzag:32", "zigzag:64"]
    assert papers_fcp.rings(8) == ["zigzag:8"]


class ToldRuns:
    """A stand-in for ``Runs`` whose times are given by strategy instead of simulated."""

    def __init__(self, **times: int) -> None:
        self.times = {name.replace("_", ":"): ns for name, ns in times.items()}

    def least(self, where: Any, batches: Any, names: list[str], time: Any) -> tuple[str, int]:
        best = min(names, key=self.times.__getitem__)
        return best, self.times[best]

    def searched(self, where: Any, batches: Any) -> list[str]:
        return ["ulysses:8"]

    def over_static(self, *_: Any, also: list[str]) -> OverStatic:
        return OverStatic(1.0, 1.0)

    def chosen(self, where: Any, batches: Any) -> tuple[str, ...]:
        return ("blocks",) * len(batches)

    def run(self, where: Any, lengths: Any, name: str) -> Any:
        return SimpleNamespace(mfu=lambda way: 1 / self.times[name], pass_ns=lambda way: self.times[name])


def test_speed_of_fcp_is_over_rivals_rings_and_any_fixed_method(monkeypatch: pytest.MonkeyPatch) -> None:
    """The zig-zag ring is one of FCP's rivals, smaller rings and fixed methods have rows of their own, and only the
    first row of the comparison gets a verdict.
    """
    monkeypatch.setattr(papers_fcp, "LENGTHS", ("bimodal",))
    monkeypatch.setattr(papers_fcp, "_evenness", lambda *_: [])
    times = {"hdp": 30, "wlb": 40, "ring_32": 50, "zigzag_32": 20, "zigzag_16": 15, "ulysses_8": 12}
    runs: Any = ToldRuns(fcp_2048=12, fcp_4096=11, fcp_6144=10, fcp_8192=11, auto=8, **times)
    rows = papers_fcp.speed_ups(runs, (32,), 1)
    speed = [(row.part, row.planner, verdict) for row, verdict in zip(rows, verdicts(rows), strict=True)][:3]
    assert speed == [
        ("over its rivals", 2.0, "better"),
        ("over rings", 1.5, "as above"),
        ("over any fixed", 1.2, "as above"),
    ]
    assert "`fcp:6144`" in rows[0].cell, "the fastest of its block sizes"
    assert [row.cell.split(": over ")[1].split(",")[0] for row in rows[:3]] == ["zigzag:32", "zigzag:16", "ulysses:8"]


def test_rungs_of_the_ablation_are_not_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: Any = ToldRuns(fcp_4096=10, auto=8)
    monkeypatch.setattr(papers_fcp, "_in_layout", lambda lengths, ranks, name: runs.run(None, lengths, name))
    rows = papers_fcp.ladder(runs, 16)
    assert len(rows) == len(papers_fcp.LENGTHS) * (len(papers_fcp.setting.ABLATION) + 2)
    assert verdicts(rows) == ["-"] * len(rows)


def test_a_fixed_method_of_each_part_is_no_slower_than_one_for_both() -> None:
    """A method that cannot run the language model may still be the best one for the encoder."""
    parts: papers_dhp.Parts = {
        "dhp": [(4, 6), (4, 6)],
        "auto": [(3, 5), (3, 5)],
        "a": [(4, 9), (4, 9)],
        "b": [(9, 6), (9, 6)],
        "c": [(2, None), (3, None)],
        "d": [(1, 1), (None, None)],
    }
    ran = papers_dhp._whole_steps(parts)
    assert ran == {"dhp": [10, 10], "auto": [8, 8], "a": [13, 13], "b": [15, 15]}
    row = papers_dhp._over_each_part("case", parts, ran, ["a", "b", "c", "d"], {})
    assert "over c in the encoder and b in the language model" in row.cell
    assert (row.planner, row.auto) == (17 / 20, 17 / 16)
    assert row.static == OverStatic((8 + 9) / 16, (8 + 9) / 16)


def test_waiting_is_of_all_ranks_and_of_the_slowest() -> None:
    """Ranks that finish early wait for the slowest one."""
    ranks = np.array([[70, 40], [30, 20], [0, 0], [0, 20]])
    step = StepTime(100, 70, 30, 0, 0, ranks)
    found: Any = SimpleNamespace(step=step)
    assert papers_dcp.waiting_share(found) == pytest.approx((30 + 20 + 20) / 2 / 100)
    assert papers_dcp.slowest_share(found) == 0.3


def boxed(layout: str, part: str, planner: float, auto: float) -> Row:
    return Row("reshuffle", layout, "-", planner, auto, "how", False, part=f"{layout}, {part}")


def test_the_text_on_the_box_says_where_the_order_is_reversed_and_where_there_is_none() -> None:
    free, kept = papers_reshuffle.FREE, papers_reshuffle.CONTIGUOUS
    measured, simulated = papers_reshuffle.BOX, papers_reshuffle.BOX_SIMULATED
    rows = [boxed(free, measured, 10, 9), boxed(kept, measured, 10, 15)]
    assert papers_reshuffle.order(rows) == ""
    rows += [boxed(free, simulated, 10, 8), boxed(kept, simulated, 10, 9)]
    text = papers_reshuffle.order(rows)
    assert f"0.90 with {free} (simulated 0.80) and 1.50 with {kept} (simulated 0.90)" in text
    assert f"With {free} the order is the simulated one." in text
    assert text.endswith(f"With {kept} the order is the reverse of the simulated one.")
    rows[1] = boxed(kept, measured, 10, 9.6)
    assert papers_reshuffle.order(rows).endswith("which is no order.")
    rows[1] = boxed(kept, measured, 10, 8)
    assert papers_reshuffle.order(rows).endswith(f"With {free} and with {kept} the order is the simulated one.")


def test_planners_are_told_the_speed_at_which_the_box_is_paced() -> None:
    where = papers_reshuffle.machine()
    assert where.gflops * PEAK_PERMILLE[papers_reshuffle.DTYPE] / 1000 == papers_reshuffle.GFLOPS


def test_a_maker_makes_the_plan_of_a_name_that_is_no_strategy() -> None:
    where, lengths = papers_fcp._where(8), draw_lengths("web", 8 * 2048, 0)
    runs = Runs({"ours": lambda request: planned(request, "zigzag:8", search=False)[1]})
    ours, theirs = runs.plan(where, lengths, "ours"), runs.plan(where, lengths, "zigzag:8")
    assert ours is not None and theirs is not None and ours.plan.hash == theirs.plan.hash


def test_dcp_has_both_tolerances_of_its_code_end_to_end() -> None:
    for cap in (16_384, 65_536, 131_072):
        found = papers_dcp.blocks_of(cap)
        assert set(found) - set(papers_dcp.MAKERS) == {name for name in found if "within" not in name}
        assert len(found) == 2 * len({name.split()[0] for name in found})


def test_plans_are_made_once_and_static_baselines_are_of_the_batch_and_of_the_run() -> None:
    where, runs = papers_fcp._where(8), Runs()
    batches = [draw_lengths("web", 8 * 2048, seed) for seed in range(2)]
    found = runs.over_static(where, batches, "auto", attention_ns)
    assert found.of_one_fixed >= found.of_each_batch >= 0.9, "the best of a batch is never behind the one of the run"
    assert any(name.endswith("@load") for name in runs.searched(where, batches)), "dealt by load as well"
    first = runs.plan(where, batches[0], "auto")
    assert first is not None and runs.plan(where, batches[0], "auto") is first
    rules = replace(where, rules=Rules(in_line=True))
    assert runs.run(rules, batches[0], "auto").plan is first.plan, "rules are not the planner's"


def test_every_paper_has_rows_for_what_is_not_here() -> None:
    for module in (papers_dcp, papers_fcp, papers_dhp):
        for row in module.rest():
            assert len(row.cells()) == len(HEADS)
            assert row.verdict == "-"


def test_short_planning_times_are_the_least_of_few_runs() -> None:
    again = iter((0.4, 0.3, 0.1))
    assert least_of_few(0.5, lambda: next(again), 3) == Timed(0.3, 3)
    assert least_of_few(1.5, lambda: next(again)) == Timed(1.5, 1) and next(again) == 0.1, "a long one runs once"
    assert "least of 3" in timing(Timed(0.3, 3), Timed(0.2, 3)) and "one run each" in timing(Timed(2, 1), Timed(3, 1))
    assert "least of 7 runs below a second, one run above" in timing(Timed(0.3, 7), Timed(3, 1))


def test_planning_time_of_fcp_has_its_rounds() -> None:
    """A plan makes its communication rounds when they are first asked for; the measured planning time must include
    them.
    """
    found = Runs().plan(papers_fcp._where(8), draw_lengths("web", 8 * 2048, 0), "fcp:1024")
    assert found is not None
    assert {key[1] for key in found.plan._rounds} == {False, True}


def test_dry_runs_are_of_dcps_machine_and_megatrons_line_is_all_keys_to_seven_nodes() -> None:
    assert str(papers_dcp.DRY.cluster) == "a100:8x2" and papers_dcp.KEYS == 1024
    assert papers_dcp.CURVE.endswith(f"{1024 * 7 * 8 * 8192 / 1e6:.0f}")


def test_only_the_default_block_size_of_dcp_is_judged() -> None:
    """All block sizes are compared with the same plans of ``auto``, so a verdict for each would count them twice."""
    pytest.importorskip("mtkahypar")
    batch = papers_dcp.capped("longtail", 8192, 0)
    rows = papers_dcp._by_block(Runs(), [batch], "causal", "data", (1024, 2048))
    assert [(row.figure, row.verdict == "-") for row in rows] == [
        ("16", False),
        ("17", False),
        ("16", True),
        ("17", True),
    ]
    assert all(row.planner is not None and "; all bytes " in row.cell for row in rows if row.figure == "16")


def test_nothing_hides_the_sum_of_gradients_end_to_end_and_the_feed_forward_is_dcps() -> None:
    training, model = papers_dcp.machine().training, find_model("gpt-8b").model
    assert training is not None and training.overlap_permille == 0
    plain = 2 * model.hidden * papers_dcp.FEED_FORWARD
    assert 3 * model.hidden * training.model.model.feed_forward == pytest.approx(plain, rel=1e-3)


def test_more_devices_take_the_same_documents_several_batches_at_a_time() -> None:
    drawn = papers_dhp.batches_of("libra256k", 8 * papers_dhp.A_RANK, 4)
    assert {sum(batch) for batch in drawn} == {8 * papers_dhp.A_RANK}
    for count in (1, 2, 4):
        batches = papers_dhp.joined(drawn, count)
        assert len(batches) == 4 // count and {sum(batch) for batch in batches} == {count * 8 * papers_dhp.A_RANK}
        assert [n for batch in batches for n in batch] == [n for batch in drawn for n in batch]


def test_texts_count_where_auto_is_static_and_how_the_foldings_compare() -> None:
    rows = [
        compared(1.0, 1.2, chose=("groups:team=8", "usp:8,2@load")),
        compared(1.0, 1.2, chose=("ulysses:8", "usp:4,4")),
        Row("16", "a", "-", 10, 20, "counted in plans", False, aside=12),
        Row("16", "b", "-", 10, 20, "counted in plans", False, aside=9),
        Row("16", "c", "-", 10, 20, "counted in plans", False, aside=11),
    ]
    assert "In 3 of 4 batches" in papers_words._chosen(rows) and "`usp` 2, `ulysses` 1" in papers_words._chosen(rows)
    assert "none of 1 batches" in papers_words._chosen([compared(1.0, 1.2, chose=("blocks",))])
    text = papers_words._foldings(rows)
    assert text.startswith("In 2 of 3 rows") and text.endswith("DCP is judged kindly.")
    assert not papers_words._foldings(rows[-2:]).endswith("kindly.")


def test_texts_say_where_dcps_gains_and_fcps_imbalance_leave_the_published_ranges() -> None:
    def step(cap: str, planner: float) -> Row:
        words = f"causal, data up to {cap}: step over Megatron's (1.00 s)"
        return Row("14", words, 1.0, planner, 1.2, "simulated", base_off=-0.2, aside=0.3)

    waits = Row("1, 21", "share", "-", 0.2, 0.1, "simulated", False, aside=0.6)
    text = papers_words._steps([step("16,384", 1.02), step("65,536", 1.5), waits])
    assert text.endswith("too large at 65,536 (1.50).") and "is 30% of its steps" in text and "waits 60%" in text
    assert "too large" not in papers_words._steps([step("16,384", 1.02), waits])

    def uneven(name: str, part: str, value: float) -> Row:
        return Row("imbalance", f"{name}, 16 GPUs: {part}", "-", value, None, "counted in plans", False, part=part)

    parts = ("work", "work, ByteScale", "bytes received, MagiAttention")
    rows = [
        uneven(name, part, 0.02 if name == "lognormal16k" else 0.05) for name in papers_fcp.LENGTHS for part in parts
    ]
    assert "2.0% on lognormal16k, 5.0% on bimodal, above it in every cell of bimodal." in papers_words._imbalance(rows)

"""Tests of the comparison with published figures: a wrong field of the file is named, units are converted correctly,
and the errors and the order of simulated figures are judged correctly.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import published
import published_page
from flexcp.clusters import cluster
from flexcp.simulator.copies import copy_mbps
from lib.published_figures import Figure, FiguresError, parse_figure, read_figures
from lib.published_judging import Result, pairs, spread
from published_parameters import KERNELS, MACHINES, ONE, PACKED, WEB, Measured, place

ROOT = Path(__file__).parents[2]
GOOD: dict[str, Any] = {
    "source": "a table",
    "system": "ours",
    "cluster": "h100:1x4",
    "heads": [8, 2, 64],
    "lengths": [2048, 1024],
    "mask": "causal",
    "method": "zigzag:4",
    "direction": "forward",
    "value": 1.5,
    "unit": "ms",
}


def figure(**changed: Any) -> Figure:
    return parse_figure({**GOOD, **changed})


def simulated(**changed: Any) -> float:
    found = published.simulate(1, figure(**changed))
    assert found.simulated is not None, found.refused
    return found.simulated


# --- the file ---------------------------------------------------------------------------------------------------------


def test_our_file_has_figures_of_many_systems() -> None:
    figures = [f for _, f in read_figures(published.FIGURES)]
    assert len(figures) >= 25 and len({f.system for f in figures}) >= 5
    assert all(f.assumed for f in figures if not f.stated)
    assert {f.cluster.partition(":")[0] for f in figures} >= set(MACHINES), "every measured machine is used"
    assert {f.kernel for f in figures} - {None} == set(KERNELS), "every measured kernel is used"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"heads": [64]}, "field 'heads': it is [64]; write query heads, KV heads and their size, as in [64, 8, 128]"),
        ({"heads": "6/4"}, "field 'heads': heads must be a multiple of kv_heads"),
        ({"heads": "many"}, "as in [64, 8, 128]"),
        ({"cluster": "h10:1x8"}, "field 'cluster': unknown cluster 'h10': did you mean 'h100'?"),
        ({"cluster": "p4de:4by8"}, "field 'cluster': "),
        ({"cluster": "h100:99999x8"}, "field 'cluster': h100:99999x8 has 799,992 ranks; at most 4,096 are simulated"),
        ({"lengths": "8x"}, "field 'lengths': lengths '8x'"),
        ({"lengths": []}, "field 'lengths': it is []; write 8x32768"),
        ({"lengths": [0, 5]}, "field 'lengths': it is [0, 5]"),
        ({"lengths": "web:99999999999999"}, "field 'lengths': a batch has 99,999,999,999,999 tokens; at most"),
        ({"mask": "casual"}, "field 'mask': unknown mask 'casual': did you mean 'causal'?"),
        ({"method": "zigzig:4"}, "field 'method': unknown strategy 'zigzig:4': did you mean 'zigzag'?"),
        ({"method": []}, "field 'method': it is empty; name a strategy"),
        ({"method": 4}, "field 'method': a strategy is given by its name"),
        (
            {"direction": "fwd"},
            "field 'direction': 'fwd' is not known: did you mean 'forward'? known are forward, backward, both, step",
        ),
        ({"value": 0}, "field 'value': it is a number above 0; got 0"),
        ({"value": "1.5"}, "field 'value': it is a number above 0; got '1.5'"),
        ({"value": float("nan")}, "field 'value': it is a number above 0; got nan"),
        ({"unit": "TFLOPS"}, "field 'unit': 'TFLOPS' is not known: did you mean 'TFLOP/s'?"),
        ({"unit": "efficiency", "value": 93}, "field 'value': efficiency is a share from 0 to 1; got 93; 93 % is 0.93"),
        ({"unit": "ratio"}, "field 'over' is missing: a ratio needs the method it is over"),
        ({"over": "ring:4"}, "field 'over' is of a ratio; drop it, or say unit ratio"),
        ({"unit": "TFLOP/s", "direction": "both"}, "field 'unit': TFLOP/s are of one direction"),
        ({"kernel": "fa9"}, "field 'kernel': unknown kernel 'fa9'; measured ones are fa2-h800"),
        ({"seeds": 3}, "field 'seeds': these lengths are not drawn"),
        ({"seeds": 1.5}, "field 'seeds': it is a whole number from 1 to 100; got 1.5"),
        ({"scale": 2}, "field 'scale': only a distribution without its seed is scaled"),
        ({"direction": "step"}, "field 'model' is missing: a step needs one"),
        ({"recompute": True}, "field 'recompute' is of a step"),
        (
            {"model": "llama3-8b", "direction": "step"},
            "field 'heads': llama3-8b has 32 / 8 heads of 128; got [8, 2, 64]",
        ),
        ({"model": "lama"}, "field 'model': unknown model 'lama'"),
        ({"rules": {"overlap": False}}, "field 'rules': 'overlap' is no rule; rules are contention"),
        ({"rules": {"in_line": 1}}, "field 'rules': in_line is true or false; got 1"),
        ({"rules": {"ahead": -1}}, "field 'rules': ahead is a whole number of at least 0; got -1"),
        ({"stated": False}, "field 'assumed' is missing: say what was taken for what is not stated"),
        ({"stated": "no"}, "field 'stated': it is true or false; got 'no'"),
        ({"metod": "ring"}, "field 'metod' is not known: did you mean 'method'?"),
        ({"source": " "}, "field 'source': it is a text that is not empty"),
    ],
)
def test_a_wrong_field_is_named_with_the_way_out(changed: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "figures.jsonl"
    path.write_text(json.dumps(GOOD) + "\n\n" + json.dumps({**GOOD, **changed}) + "\n")
    with pytest.raises(FiguresError, match=re.escape(f"{path}, line 3: ") + ".*") as told:
        read_figures(path)
    assert message in str(told.value)


def test_all_mistakes_of_a_file_are_told_together(tmp_path: Path) -> None:
    path = tmp_path / "figures.jsonl"
    bare = {name: value for name, value in GOOD.items() if name not in ("value", "mask")}
    path.write_text(
        "\n".join([json.dumps(bare), "{oops", "[1]", json.dumps(GOOD), json.dumps({**GOOD, "unit": "h", "value": -1})])
    )
    with pytest.raises(FiguresError) as told:
        read_figures(path)
    starts = [re.match(r".*, line (\d): (field '\w+')?", line) for line in str(told.value).splitlines()]
    assert [(m[1], m[2]) for m in starts if m] == [
        ("1", "field 'mask'"),
        ("1", "field 'value'"),
        ("2", None),
        ("3", None),
        ("5", "field 'value'"),
        ("5", "field 'unit'"),
    ]


@pytest.mark.parametrize(
    ("content", "message"), [(b"", "holds no figures"), (b"\xff\xfe", "not a text file"), (None, "cannot read figures")]
)
def test_a_file_that_is_none_is_told(content: bytes | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "figures.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(FiguresError, match=message):
        read_figures(path)


def test_the_command_refuses_before_it_simulates(tmp_path: Path) -> None:
    path = tmp_path / "figures.jsonl"
    path.write_text(json.dumps({**GOOD, "unit": "hours"}))
    ran = subprocess.run(
        [sys.executable, ROOT / "benchmarks/published.py", path], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 1 and ran.stdout == ""
    assert (
        ran.stderr.startswith(f"{path}, line 1: field 'unit': 'hours' is not known") and "Traceback" not in ran.stderr
    )


# --- simulating -------------------------------------------------------------------------------------------------------


def test_units_are_of_one_time() -> None:
    ms = simulated()
    assert simulated(unit="s") == pytest.approx(ms / 1000)
    assert simulated(unit="iter/s") == pytest.approx(1000 / ms)
    assert simulated(unit="tokens/s") == pytest.approx(3072 / 4 / ms * 1000)
    pairs_ = sum(n * (n + 1) // 2 for n in GOOD["lengths"])
    tflops = 4 * pairs_ * 8 * 64 / 4 / ms / 1e9
    assert simulated(unit="TFLOP/s") == pytest.approx(tflops)
    assert simulated(unit="MFU", value=0.5) == pytest.approx(tflops * 1000 / cluster("h100").gflops)
    assert simulated(direction="both") == pytest.approx(ms + simulated(direction="backward"))
    assert 0 < simulated(unit="efficiency", value=0.5) < 1


def test_batches_are_averaged_and_the_fastest_method_is_taken() -> None:
    one, other = simulated(lengths=[4096]), simulated(lengths=[1024])
    assert simulated(lengths=[[4096], [1024]]) == pytest.approx((one + other) / 2)
    assert simulated(lengths="web:8192", seeds=2) != simulated(lengths="web:8192")
    found = published.simulate(1, figure(method=["ring:4", "zigzag:4"]))
    assert found.simulated == min(simulated(method="ring:4"), simulated()) and found.method in ("ring:4", "zigzag:4")
    rates = [simulated(method=each, unit="iter/s") for each in ("ring:4", "zigzag:4", ["ring:4", "zigzag:4"])]
    assert rates[2] == max(rates[:2]) > min(rates[:2]), "of rates the largest is the fastest"
    ratio = simulated(unit="ratio", over="ring:4", value=1.2)
    assert ratio == pytest.approx(simulated(method="ring:4") / simulated())
    assert max(published.Setting(figure(lengths=[5000], longest=2048)).batches[0]) == 2048


def test_recomputing_costs_a_forward() -> None:
    step = {"direction": "step", "model": "llama3-8b", "heads": "32/8", "lengths": "8192"}
    plain, again = (simulated(**step, recompute=way) for way in (False, True))
    attention = 32 * simulated(heads="32/8", lengths="8192")
    assert attention < again - plain < plain / 2


def test_a_method_that_refuses_is_a_result_with_its_reason() -> None:
    found = published.simulate(7, figure(method="zigzag:3"))
    assert found.simulated is None and found.is_miss and "zigzag:3 does not divide the 4 ranks" in found.refused


def test_a_sample_of_our_file_is_near_what_was_published() -> None:
    """Figures of one node whose settings are fully stated: with parameters taken from other measurements, and fitted to
    none of these figures, the simulation is off by less than 25 %.
    """
    sample = {line: f for line, f in read_figures(published.FIGURES) if line in (3, 7, 21, 22)}
    assert all(f.stated and not f.assumed for f in sample.values())
    for line, each in sample.items():
        few = replace(each, seeds=min(each.seeds, 2))
        assert abs(published.simulate(line, few).error) < 0.25, each.source


# --- parameters -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kernel", "preset", "batches", "forward"),
    [
        ("fa3-varlen-h100", "h100", WEB, 584.0),
        ("ffa-h100", "h100", WEB, 546.0),
        ("fa2-a100", "a100", ONE, 205.3),
        ("fa2-varlen-h800", "h100", PACKED, 311.1),
    ],
)
def test_a_kernels_cost_model_gives_its_measured_rate(kernel: str, preset: str, batches: Any, forward: float) -> None:
    cost, gflops = KERNELS[kernel](), cluster(preset).gflops
    share = Measured(batches, 1.0, 1.0).efficiency(1.0, gflops)
    assert cost.forward_efficiency / 1000 / share == pytest.approx(forward, rel=0.01)


def test_measured_links_lose_nothing_more() -> None:
    found, rules, cost = place("p4de:4x8", "fa2-varlen-a100")
    assert (found.nodes, found.ranks_per_node, rules.ranks_per_nic, cost.link_efficiency) == (4, 8, 2, 1000)
    assert rules.copy_mbps == copy_mbps(cluster("a100")) and rules.copies_messages_only
    assert found.inter_mbps * 8 == pytest.approx(29_600) and found.intra_mbps == 230_000
    preset, _, analytic = place("h20:2x8", None)
    assert preset == cluster("h20:2x8") and analytic.name == "analytic"


# --- judging ----------------------------------------------------------------------------------------------------------


def result(value: float, found: float | None, **changed: Any) -> Result:
    return Result(1, figure(value=value, **changed), found)


def test_errors_and_misses() -> None:
    assert result(10, 11).error == pytest.approx(0.1) and not result(10, 11).is_miss
    assert result(10, 8).is_miss and result(10, None).is_miss
    found = spread([-0.1, 0.2, 0.3, -0.9])
    assert found is not None and (found.count, found.median, found.p90, found.worst) == (4, 0.25, 0.9, 0.9)
    assert spread([]) is None


def test_pairs_are_of_one_setting_and_apart() -> None:
    a, b = result(10, 12), result(12, 9, method="ring:4")
    near, elsewhere = result(10.5, 1, method="dp"), result(30, 1, lengths=[4096])
    ratio, refused = result(3, 2, unit="ratio", over="dp"), result(40, None, method="allgather:4")
    found = pairs([a, b, near, elsewhere, ratio, refused])
    assert [(p.first, p.second) for p in found] == [(b, a), (b, near)]
    assert [p.is_right for p in found] == [False, True]
    assert found[0].error == pytest.approx(9 / 12 / 1.2 - 1)


def test_the_page_has_every_figure_and_its_misses() -> None:
    results = [
        result(10, 10.5),
        replace(result(10, 20, method="ring:4", reason="no such link"), line=2),
        replace(result(10, None, method="dp", stated=False, assumed="the network"), line=5, refused="no"),
    ]
    text = published_page.page(results)
    assert "| 1 | ours | h100:1x4 | 2048, 1024 | zigzag:4 | forward | 10 ms | 10.5 | +5% | stated |" in text
    assert "| 2 | ours | +100% | no such link |" in text and "| 5 | ours | refused | no |" in text
    assert "| 5 | the network |" in text and "| all | 2 of 3 | 52% | 100% | 100% |" in text


def test_a_figure_simulated_again_is_shown_and_not_counted() -> None:
    first, again = result(10, 20, reason="ours stood for it"), replace(result(10, 11, method="ring:4", again=1), line=2)
    other = replace(result(20, 21, method="dp"), line=3)
    text = published_page.page([first, again, other])
    assert "2 published figures" in text and "| all | 2 of 2 | 52% | 100% | 100% |" in text
    assert "| 10 ms | 20 | +100% | stated; first run |" in text
    assert "| 10 ms | 11 | +10% | stated; line 1 again, not counted |" in text
    assert f"| {published_page.SAME_FIGURES} | 1 of 1 | 10% |" in text
    assert "| 1 | ours | +100% | ours stood for it; first run, again in line 2 |" in text
    assert [r.line for r in published_page.counted_once([first, again, other])] == [1, 3]


@pytest.mark.parametrize(("line", "value"), [(3, 1.5), (2, 1.5), (1, 2.0), (9, 1.5)])
def test_again_names_an_earlier_line_of_the_same_value(line: int, value: float, tmp_path: Path) -> None:
    path = tmp_path / "figures.jsonl"
    path.write_text("\n".join(json.dumps(each) for each in (GOOD, {**GOOD, "value": value, "again": line}, GOOD)))
    with pytest.raises(FiguresError, match=f"line 2: field 'again': line {line} is no earlier figure of {value:g} ms"):
        read_figures(path)


def test_lines_of_our_file_that_were_counted_still_are() -> None:
    """The lines that simulate the papers' own planners repeat values of earlier lines, which alone are counted."""
    figures = read_figures(published.FIGURES)
    assert [line for line, f in figures if f.again is None] == list(range(1, 78))
    assert {f.system.partition(",")[0] for _, f in figures if f.again is not None} == {
        "DCP",
        "Megatron-LM",
        "FCP",
        "DHP",
    }


def test_ratios_are_judged_by_source_with_a_reason_where_one_misses() -> None:
    ours = [result(10, 20), result(20, 22, method="ring:4")]
    theirs = [result(v, 31, method=m, source="DCP, a chart", lengths=[4096]) for v, m in ((30, "dp"), (40, "ring:4"))]
    near = [result(v, v, method=m, source="FCP", lengths=[512]) for v, m in ((30, "dp"), (40, "ring:4"))]
    lines = published_page.ratios_by_source([*ours, *theirs, *near])
    assert "| a table | 1 | 1 (100%) | 45% | 1 | not known |" in lines
    assert any(line.startswith("| DCP | 1 | 0 (0%) | 25% | 1 | the artifact runs its baselines in ") for line in lines)
    assert "| FCP | 1 | 1 (100%) | 0% | 0 |  |" in lines


def test_the_written_page_is_of_the_files_figures() -> None:
    text = (ROOT / "docs/results/published.md").read_text()
    for line, each in read_figures(published.FIGURES):
        assert f"| {line} | {each.system} | {each.cluster} | " in text and f" | {each.value:g} {each.unit} | " in text
    assert "not known |" not in text, "every miss has a reason"

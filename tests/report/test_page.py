"""Tests of the HTML text of a report: it loads nothing from elsewhere, names from users cannot inject HTML or scripts,
it stays small, and it is written completely or not at all.
"""

from __future__ import annotations

import json
import re
from html import unescape
from pathlib import Path

import numpy as np
import pages
import pytest
from typer.testing import CliRunner

import flexcp
from flexcp.cli.main import app
from flexcp.data.lengths import draw_lengths
from flexcp.report.page import page, write_report
from flexcp.report.plan_data import MOST_PAIRS, drawn_documents, plan_data, traffic
from flexcp.report.plan_tables import plan_section
from flexcp.report.plan_time import PlanTime
from flexcp.report.sections import code_section, lines_section, table_section, words_section
from flexcp.report.timeline import MOST_BARS, timeline_data
from flexcp.simulator.passes import Event

LIMIT = 3_000_000


def planned(strategy: str, nodes: int, each: int, lengths: list[int]) -> flexcp.Plan:
    return flexcp.Planner(32, 8, 128, cluster=flexcp.cluster("h100", nodes, each), strategy=strategy)(lengths)


def data_of(plan: flexcp.Plan) -> dict[str, object]:
    return plan_data(plan, PlanTime.of_plan(plan))


def test_nothing_is_loaded_from_elsewhere() -> None:
    text = page(pages.every_kind(), "title")
    assert "Content-Security-Policy" in text and "default-src 'none'" in text
    assert not re.findall(r"https?://|src=|@import|url\(", text)


def test_the_times_of_an_advice_agree(tmp_path: Path) -> None:
    """The headline, the bars and their table give the mean over passes. The panel of a plan says which pass it shows,
    and gives the time of that pass.
    """
    pages.write_advice(tmp_path / "advice.html")
    text = unescape((tmp_path / "advice.html").read_text())
    takes = re.search(r"ring, what you use today, takes ([\d,.]+) ms a pass", text)
    assert takes is not None
    mean = float(takes[1].replace(",", ""))
    assert "Predicted pass time" in text and "Mean of the 3 passes that were simulated" in text
    row = re.search(r'<td>ring</td><td class="number" data-value="([\d.]+)">', text)
    assert row is not None and float(row[1]) == pytest.approx(mean, abs=0.051)
    held_data = re.search(r'<script type="application/json" id="data">(.*?)</script>', text)
    assert held_data is not None
    data = json.loads(held_data[1])
    bars = next(section for section in data if "names" in section)
    at = bars["names"].index("ring")
    assert sum(bars["time"][kind][at] for kind in bars["time"]) / 1e6 == pytest.approx(mean, abs=0.051)
    panel = text.index("Static: ring, pass 1 of 3 simulated</h2>")
    says = re.search(r"This is pass 1 of 3 simulated: ([\d.]+) ms; their mean is ([\d.]+) ms", text[panel:])
    tile = re.search(r"<dt>simulated pass</dt><dd>([\d.]+) ms", text[panel:])
    assert says is not None and tile is not None
    assert float(says[2]) == pytest.approx(mean, abs=0.11)
    assert float(tile[1]) == pytest.approx(float(says[1]), abs=0.051) != pytest.approx(mean, abs=0.051)
    plan = next(section for section in data if "bound" in section)
    longest = max(map(sum, zip(*(plan["time"][kind] for kind in plan["time"]), strict=True)))
    assert longest / 1e6 == pytest.approx(float(tile[1]), abs=0.006)


@pytest.mark.parametrize("model", [[], ["--model", "llama3-8b"]])
def test_the_times_of_a_comparison_agree(tmp_path: Path, model: list[str]) -> None:
    page_file = tmp_path / "compare.html"
    words = [
        "compare",
        "--lengths",
        "9000,800,31",
        "--ranks",
        "4",
        "--strategies",
        "blocks",
        *model,
        "--html",
        str(page_file),
    ]
    found = json.loads(CliRunner().invoke(app, [*words, "--json"], catch_exceptions=False).stdout)["strategies"][0]
    ms = found["step_ms"] if model else found["attention_ms"]
    text = page_file.read_text()
    tile = re.search(r"<dt>simulated (?:step|attention)</dt><dd>([\d.,]+) ms", text)
    assert tile is not None and float(tile[1].replace(",", "")) == pytest.approx(ms, abs=0.006)
    row = re.search(r'<td>blocks</td><td class="number" data-value="([\d.]+)">', text)
    assert row is not None and float(row[1]) == pytest.approx(ms, abs=0.001)


def test_what_users_name_stays_text() -> None:
    bad = '</script><script>alert("x")</script>'
    text = page(
        [words_section(bad, [bad]), code_section(bad, [(bad, bad)]), lines_section(bad, [1], {bad: [1.0]}, bad)],
        bad,
        bad,
    )
    assert bad not in text
    assert text.count("</script>") == 2, "the data's and the program's own"
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', text)
    assert data is not None
    assert json.loads(data[1])[2]["series"][0]["name"] == bad


@pytest.mark.parametrize("bad", ["<!--<script>", "<!-- <script", "</script", "a\u2028b\u2029c"])
def test_no_name_keeps_the_data_from_ending(bad: str) -> None:
    text = page([lines_section("lines", [1], {bad: [1.0]}, "")], "title")
    data = text.partition('id="data">')[2].partition("</script>")[0]
    assert "<" not in data and data.isascii()
    assert json.loads(data)[0]["series"][0]["name"] == bad


def test_cells_of_tables_are_text() -> None:
    bad = '<img src=x onerror="alert(1)">&'
    text = page([table_section(bad, [bad], [[bad], [1], [2.0]], bad)], "title")
    assert "<img" not in text
    assert text.count("&lt;img src=x onerror=&quot;alert(1)&quot;&gt;&amp;") >= 4, "title, header, cell, words"
    assert "<td>&lt;img" in text


@pytest.mark.parametrize("strategy", ["blocks", "zigzag", "allgather"])
def test_a_page_of_64_ranks_is_small(strategy: str) -> None:
    from flexcp.cli.shared.reports import timed_plan

    plan = planned(strategy, 8, 8, draw_lengths("web", 1_048_576, 0))
    assert len(page([timed_plan(plan)], strategy).encode()) < LIMIT


def test_all_of_a_small_plan_is_drawn() -> None:
    plan = pages.two_masks()
    data = data_of(plan)
    assert data["drawn"] == list(range(len(pages.LENGTHS)))
    runs = plan.placement.runs
    assert data["runs"] == {"rank": runs.rank.tolist(), "start": runs.start.tolist(), "stop": runs.stop.tolist()}
    for mask, regions in zip(data["masks"], plan.placement.regions, strict=True):  # type: ignore[call-overload]
        assert mask["regions"]["rank"] == regions.rank.tolist()
        forward = np.zeros((8, 8), np.int64)
        sent = mask["bytes"][0]
        forward[sent["source"], sent["target"]] = sent["bytes"]
        number = [m.name for m in plan.batch.masks].index(mask["name"])
        assert len(mask["slices"]["document"]) == len(plan.batch.masks[number].slices) == len(pages.LENGTHS)
        assert np.array_equal(forward, plan.bytes(mask=number))


def test_slices_are_those_of_their_documents_with_bands_that_end() -> None:
    planner = flexcp.Planner(4, 2, 64, cluster=flexcp.cluster("h100", 1, 2), strategy="dp")
    masks = [flexcp.window(3, 0), flexcp.window(None, 2), flexcp.full(), flexcp.masks.chunked(20)]
    plan = planner([30, 40, 35, 40], masks)
    names = ("document", "q0", "q1", "k0", "k1", "lo", "hi")
    [mask] = data_of(plan)["masks"]  # type: ignore[misc]
    assert list(zip(*(mask["slices"][name] for name in names), strict=True)) == [
        (0, 0, 30, 0, 30, -3, 0),
        (1, 0, 40, 0, 40, -39, 2),
        (2, 0, 35, 0, 35, -34, 34),
        (3, 0, 20, 0, 20, -19, 0),
        (3, 20, 40, 20, 40, -19, 0),
    ]


def test_one_document_is_drawn_whatever_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned("dp", 1, 2, [30, 50, 40])
    for most, drawn in ((0, [1]), (1, [1]), (2, [1, 2]), (3, [0, 1, 2])):
        monkeypatch.setattr("flexcp.report.plan_data.MOST_ROWS", most)
        assert data_of(plan)["drawn"] == drawn


def test_runs_count_where_a_document_has_more_of_them_than_regions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four ranks keep five tokens each in turn, so the first document has 12 runs and the second has 8."""
    planner = flexcp.Planner(4, 2, 64, cluster=flexcp.cluster("h100", 1, 4), strategy="blocks")
    plan = planner([60, 40], layout=[[t for t in range(100) if t // 5 % 4 == rank] for rank in range(4)])
    assert max(len(regions) for regions in plan.placement.regions) < 20
    for most, drawn in ((19, [0]), (20, [0, 1])):
        monkeypatch.setattr("flexcp.report.plan_data.MOST_ROWS", most)
        assert drawn_documents(plan).tolist() == drawn


def test_of_many_cuts_the_longest_documents_are_drawn() -> None:
    lengths = draw_lengths("web", 524_288, 1)
    plan = planned("zigzag", 8, 8, lengths)
    drawn = drawn_documents(plan).tolist()
    assert 0 < len(drawn) < len(lengths)
    assert min(lengths[d] for d in drawn) >= max(lengths[d] for d in range(len(lengths)) if d not in set(drawn))
    assert "Striped" in plan_section(plan).body(0)
    runs, starts = plan.placement.runs, plan.batch.starts.tolist()
    held = [[starts[d], starts[d] + lengths[d]] for d in drawn]
    rows = zip(runs.rank.tolist(), runs.start.tolist(), runs.stop.tolist(), strict=True)
    of_drawn = [row for row in rows if any(row[1] < stop and start < row[2] for start, stop in held)]
    shown = data_of(plan)["runs"]
    columns = [shown[name] for name in ("rank", "start", "stop")]  # type: ignore[index]
    assert list(zip(*columns, strict=True)) == of_drawn
    assert len(of_drawn) < len(runs)


def test_many_pairs_are_told_by_node(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned("allgather", 4, 4, [4096])
    assert MOST_PAIRS > 16 * 15
    monkeypatch.setattr("flexcp.report.plan_data.MOST_PAIRS", 100)
    sent = data_of(plan)["masks"][0]["bytes"][0]  # type: ignore[index]
    assert sent["unit"] == "node"
    assert sum(sent["bytes"]) == plan.bytes().sum()
    monkeypatch.setattr("flexcp.report.plan_data.MOST_PAIRS", 16 * 15)
    assert data_of(plan)["masks"][0]["bytes"][0]["unit"] == "rank"  # type: ignore[index]


def test_bytes_of_nodes_are_the_sums_over_their_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned("ring", 3, 2, [4096, 700])
    monkeypatch.setattr("flexcp.report.plan_data.MOST_PAIRS", 0)
    sent = traffic(plan, 0, False)
    by_hand: dict[tuple[int, int], int] = {}
    for source, target in np.argwhere(plan.bytes()).tolist():
        nodes = source // 2, target // 2
        by_hand[nodes] = by_hand.get(nodes, 0) + int(plan.bytes()[source, target])
    found = dict(zip(zip(sent["source"], sent["target"], strict=True), sent["bytes"], strict=True))
    assert found == by_hand and len({*by_hand.values()}) > 1


def test_bars_that_touch_are_one_and_texts_are_listed_once() -> None:
    bars = [Event(0, "receive inside", f"full, stage 1, from rank {r}", 10 * r, 10 * r + 10, 5) for r in (1, 2, 3)]
    bars += [Event(0, "compute", "full, slot 0", 0, 20_000, 0), Event(0, "compute", "full, slot 1", 20_000, 40_000, 0)]
    data = timeline_data(bars)
    received = [i for i, lane in enumerate(data["spans"]["lane"]) if data["lanes"][lane]["row"] == 1]
    assert [(data["spans"]["start"][i], data["spans"]["stop"][i]) for i in received] == [(10, 40)]
    assert data["labels"][data["spans"]["label"][received[0]]] == "full, stage 1, several"
    assert len(data["spans"]["rank"]) == 3, "compute is never joined"
    many = [Event(0, "send across", f"{i}", 7 * i, 7 * i + 1, 1) for i in range(3 * MOST_BARS)]
    assert len(timeline_data(many)["spans"]["rank"]) <= MOST_BARS
    with pytest.raises(ValueError, match="unknown tracks"):
        timeline_data([Event(0, "sleep", "", 0, 1, 0)])


def test_lines_of_another_length_are_refused() -> None:
    with pytest.raises(ValueError, match="'a' has 2 values for 3 steps"):
        lines_section("Loss", [1, 2, 3], {"a": [1.0, 2.0]}, "")
    with pytest.raises(ValueError, match="at least one section"):
        page([], "empty")


def test_a_page_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "page.html"
    size = write_report(target, [words_section("a", ["b"])], "t")
    assert target.stat().st_size == size
    monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        write_report(target, [words_section("a", ["c"])], "t")
    assert [p.name for p in tmp_path.iterdir()] == ["page.html"]
    assert "<p>b</p>" in target.read_text()


def test_a_page_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot write the report to .*nowhere"):
        write_report(tmp_path / "nowhere" / "page.html", [words_section("a", ["b"])], "t")

"""Tests of the timeline of a report: only bars that may be joined are joined, and the table below adds bars up."""

from __future__ import annotations

import re

import pytest

from flexcp.report import timeline
from flexcp.report.timeline import TRACKS, timeline_data, timeline_figure
from flexcp.simulator.passes import Event

MS = 1_000_000


def spans_of(bars: list[Event]) -> list[tuple[int, str, int, int, str]]:
    """Return (rank, track, start, stop, name) of the bars that are drawn."""
    data = timeline_data(bars)
    columns = (data["spans"][name] for name in ("rank", "lane", "start", "stop", "label"))
    names, lanes = data["labels"], list(TRACKS)
    return [(rank, lanes[lane], a, b, names[label]) for rank, lane, a, b, label in zip(*columns, strict=True)]


def test_transfers_are_joined_up_to_a_two_thousandth_and_only_with_their_own_kind() -> None:
    """The timeline is 4000 ns long, so bars with a gap of 2 are joined, and bars with a gap of 3 are not."""
    bars = [
        Event(0, "compute", "slot 0", 0, 4000, 0),
        Event(0, "compute", "slot 1", 1, 2, 0),
        Event(0, "send inside", "stage 1, to rank 1", 10, 20, 5),
        Event(0, "send inside", "stage 1, to rank 2", 22, 23, 5),
        Event(0, "send inside", "stage 2, to rank 2", 26, 30, 5),
        Event(0, "send across", "stage 1, to rank 9", 30, 31, 5),
        Event(1, "send across", "stage 1, to rank 9", 31, 40, 5),
        Event(1, "send across", "stage 1, to rank 9", 32, 35, 5),
        Event(1, "receive inside", "nothing", 7, 7, 5),
    ]
    assert sorted(spans_of(bars)) == [
        (0, "compute", 0, 4000, "slot 0"),
        (0, "compute", 1, 2, "slot 1"),
        (0, "send across", 30, 31, "stage 1, to rank 9"),
        (0, "send inside", 10, 23, "stage 1, several"),
        (0, "send inside", 26, 30, "stage 2, to rank 2"),
        (1, "send across", 31, 40, "stage 1, to rank 9"),
    ]
    data = timeline_data(bars)
    assert data["end"] == 4000 and len(data["labels"]) == len(set(data["labels"]))
    assert [lane["row"] for lane in data["lanes"]] == [0, 0, 0, 1, 1, 2, 2]
    assert timeline_data([])["end"] == 1


def test_names_that_are_joined_again_say_several_once() -> None:
    bars = [
        Event(0, "send inside", f"full, stage {s}, to {r}", 10 * s + r, 10 * s + r + 1, 1)
        for s in (1, 2)
        for r in (1, 2)
    ]
    assert [name for *_, name in spans_of([*bars, Event(0, "compute", "", 0, 40_000, 0)])][1:] == ["full, several"]


def test_as_many_bars_as_a_page_holds_are_not_joined_further(monkeypatch: pytest.MonkeyPatch) -> None:
    bars = [Event(0, "send across", f"{i}", 10 * i, 10 * i + 1, 1) for i in range(100)]
    monkeypatch.setattr(timeline, "MOST_BARS", 100)
    assert len(spans_of(bars)) == 100
    monkeypatch.setattr(timeline, "MOST_BARS", 99)
    assert len(spans_of(bars)) == 1, "the first gap that joins two joins all"


def test_the_table_behind_a_timeline_adds_bars_up() -> None:
    bars = [
        Event(0, "compute", "a", 0, 2 * MS, 0),
        Event(0, "wait", "b", 2 * MS, 5 * MS, 0),
        Event(0, "compute", "c", 5 * MS, 6 * MS, 0),
        Event(1, "wait", "d", MS, 2 * MS, 0),
        Event(1, "receive across", "e", 3 * MS, 5 * MS, 0),
    ]
    text = timeline_figure(3, timeline_data(bars), 2, "caption")
    rows = [re.findall(r'data-value="([\d.]+)"', row) for row in re.findall(r"<tr>(.*?)</tr>", text)[1:]]
    assert [list(map(float, row)) for row in rows] == [[0, 3, 0, 3, 0, 0, 0, 0], [1, 0, 0, 1, 0, 2, 0, 0]]
    assert "6.000 ms in all; ranks wait 1.000 to 3.000 ms." in text and 'data-section="3"' in text


def test_bars_that_may_not_be_joined_are_all_drawn_however_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline, "MOST_BARS", 5)
    assert len(spans_of([Event(0, "compute", f"{i}", 10 * i, 10 * i + 1, 1) for i in range(20)])) == 20


def test_times_in_the_table_have_four_digits() -> None:
    text = timeline_figure(1, timeline_data([Event(0, "compute", "a", 0, 123_456, 0)]), 1, "caption")
    assert 'data-value="0.1235"' in text


def test_a_track_that_a_timeline_does_not_have_is_named() -> None:
    with pytest.raises(ValueError, match=r"unknown tracks \['dance'\]; a timeline has compute, other, wait"):
        timeline_data([Event(0, "dance", "a", 0, 1, 0)])

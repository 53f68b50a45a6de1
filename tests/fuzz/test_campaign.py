"""Tests of the fuzzer: it finds nothing in flexcp as it is, finds planted bugs, shrinks failing cases, and writes case
files that ``flexcp verify`` replays.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flexcp.cli.main import app
from flexcp.fuzz.campaign import Limits, campaign
from flexcp.fuzz.cases import Case, Layer, Run, is_case_file, read_case, save_case
from flexcp.fuzz.draw import draw
from flexcp.fuzz.findings import Found
from flexcp.fuzz.judge import Extras, Outcome, judge
from flexcp.fuzz.shrink import shrunk, simplifications
from flexcp.fuzz.worker import Task, serve
from flexcp.measure.ranks import RankPool
from lib.planted_bugs import BUGS, plant, plant_on_rank, planted

SMALL = Case(
    [7, 2],
    [Layer("one", 2, ["window", 2, 1])],
    {"name": "cpu", "nodes": 1, "ranks_per_node": 2},
    {"heads": 2, "kv_heads": 1, "head_dim": 8, "v_head_dim": 8, "dtype": "float64"},
    {"strategy": "blocks"},
)
FOUND_IN = {"masks": 60, "planners": 60, "schedule": 60, "simulator": 60, "loader": 200, "report": 60}
"""Within how many cases the fuzzer must find the planted bug of each area."""


def test_cases_follow_from_seed_and_number() -> None:
    assert draw(3, 5) == draw(3, 5) != draw(3, 6)
    assert draw(3, 5) != draw(4, 5)
    assert all(draw(0, n, 3).cluster.ranks <= 3 for n in range(30))


@pytest.fixture(scope="module")
def passed(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """Return what a campaign of 20 cases and two workers finds in flexcp as it is."""
    return campaign(Task(0, 0.0, tmp_path_factory.mktemp("passed")), Limits(cases=20), jobs=2)


def test_flexcp_passes_and_workers_share_the_cases(passed: Found) -> None:
    found = passed
    assert not found.failures, found.failures[0].message
    assert found.cases == 20 and found.plans > 10 and found.refused < 10 and found.unfinished == 0
    assert found.checks["check"] == found.checks["file"] == found.plans > found.checks["loader"] > 0
    assert len(found.covered["strategy"]) > 5 and len(found.covered["mask"]) > 5
    assert not _children()


def test_a_campaign_finds_makes_small_and_goes_on(tmp_path: Path) -> None:
    found = campaign(Task(5, 0.0, tmp_path, prepare=partial(plant, "report")), Limits(cases=8))
    assert found.cases == 8 and {failure.check for failure in found.failures} == {"report"}
    for failure in found.failures:
        assert sum(read_case(failure.file).lengths) < sum(draw(5, failure.number).lengths)


def test_time_ends_a_campaign_whatever_its_workers_do(tmp_path: Path) -> None:
    """A worker that sleeps forever is never ready; the campaign still ends in time and leaves no process behind."""
    begin = time.monotonic()
    found = campaign(Task(0, 0.0, tmp_path, prepare=partial(time.sleep, 3600)), Limits(seconds=1.0))
    assert time.monotonic() - begin < 60 and found.cases == 0
    assert not _children()


def test_a_worker_that_dies_is_a_failure_and_is_replaced(tmp_path: Path) -> None:
    found = campaign(Task(0, 0.0, tmp_path, prepare=_die_while_planning), Limits(cases=5, failures=2))
    assert [failure.check for failure in found.failures] == ["process"] * 2
    assert "ended with code 7" in found.failures[0].message and is_case_file(found.failures[0].file)


def _die_while_planning() -> None:
    import flexcp.fuzz.worker as worker

    worker.judge = lambda *_: os._exit(7)


def _children() -> list[str]:
    """Return the living child processes that this test run spawned, except for the rank pool that tests share."""

    def living() -> Iterator[str]:
        for path in Path("/proc").glob("[0-9]*"):
            try:
                words, parent = (
                    (path / "cmdline").read_bytes(),
                    (path / "stat").read_text().rpartition(")")[2].split()[1],
                )
            except (FileNotFoundError, ProcessLookupError):
                continue
            if b"spawn_main" in words and parent == str(os.getpid()):
                yield words.decode()

    return list(living())


def test_ranks_pass_and_their_number_is_bounded(pool: RankPool) -> None:
    ran = 0
    for number in range(12):
        outcome = judge(draw(1, number, 3), Extras(False, False, False, pool))
        assert outcome.verdict != "failed", outcome.message
        ran += outcome.verdict == "passed"
    assert ran >= 6


def test_a_rank_alone_does_not_wait_for_the_others_of_its_pool(pool: RankPool) -> None:
    alone = replace(SMALL, machine={"name": "cpu", "nodes": 1, "ranks_per_node": 1}, run=Run(sinks=True))
    assert "ranks" in judge(alone, Extras(False, False, False, pool)).checks


@pytest.mark.parametrize("area", FOUND_IN)
def test_a_planted_bug_is_found(area: str, tmp_path: Path) -> None:
    with planted(area):
        failed = (number for number in range(FOUND_IN[area]) if judge(draw(0, number)).verdict == "failed")
        number = next(failed, None)
    assert number is not None, BUGS[area].says
    assert judge(draw(0, number)).verdict != "failed"


@pytest.mark.parametrize("area", [area for area, bug in BUGS.items() if bug.on_ranks])
def test_a_bug_planted_on_ranks_is_found(area: str) -> None:
    with RankPool(2) as ranks:
        ranks.run(plant_on_rank, area)
        outcomes = (judge(draw(0, n, 2), Extras(False, False, False, ranks)) for n in range(25))
        failed = next((outcome for outcome in outcomes if outcome.verdict == "failed"), None)
    assert failed is not None and failed.check == "ranks", BUGS[area].says


def test_a_failing_case_becomes_small() -> None:
    """In this test a case fails if it has a document of 20 tokens or more and a mask with a window."""

    def fails(case: Case) -> Outcome:
        windows = any("window" in str(layer.words) for layer in case.layers)
        return Outcome("failed", "made up") if windows and max(case.lengths) >= 20 else Outcome("passed")

    case = next(
        case for case in (draw(0, n) for n in range(1000)) if fails(case).verdict == "failed" and len(case.lengths) > 3
    )
    small, outcome = shrunk(case, fails(case), fails, lambda: True)
    assert outcome.check == "made up"
    assert len(small.lengths) == 1 and 20 <= small.lengths[0] < 40 and small.cluster.ranks == 1
    assert not any(fails(simpler).verdict == "failed" for simpler in simplifications(small))


def test_a_case_survives_its_file(tmp_path: Path) -> None:
    for number in range(30):
        case = draw(2, number)
        save_case(tmp_path / "case.json", case, "tokens", "why")
        assert is_case_file(tmp_path / "case.json")
        assert read_case(tmp_path / "case.json") == case


@pytest.mark.parametrize(
    "change", [{"lengths": []}, {"lengths": ["a"]}, {"layers": [{"name": "x"}]}, {"planner": {}}, {"run": {"speed": 1}}]
)
def test_a_file_that_is_no_case_is_refused_by_name(change: dict[str, object], tmp_path: Path) -> None:
    path = tmp_path / "case.json"
    save_case(path, SMALL, "tokens", "why")
    content = json.loads(path.read_text())
    content["case"] |= change
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"case\.json is no case"):
        read_case(path)


def test_the_command_says_what_it_covered(tmp_path: Path, passed: Found, monkeypatch: pytest.MonkeyPatch) -> None:
    """The campaign is one that has run; tests of the docs run the command with one of its own."""
    asked_for: list[tuple[Task, Limits, int]] = []

    def campaign_that_ran(task: Task, limits: Limits, jobs: int, tell: object) -> Found:
        asked_for.append((task, limits, jobs))
        return replace(passed, seed=task.seed)

    monkeypatch.setattr("flexcp.fuzz.campaign.campaign", campaign_that_ran)
    summary = tmp_path / "summary.json"
    asked = [
        "fuzz",
        "--cases",
        "8",
        "--seed",
        "5",
        "--ranks-share",
        "0",
        "--folder",
        str(tmp_path),
        "--write",
        str(summary),
    ]
    ended = CliRunner().invoke(app, asked)
    assert asked_for == [(Task(5, 0.0, tmp_path), Limits(cases=8), 1)]
    assert ended.exit_code == 0 and "seed 5: 20 cases" in ended.stdout and "strategy:" in ended.stdout
    written = json.loads(summary.read_text())
    assert written["seed"] == 5 and written["cases"] == 20 and written["failures"] == []
    assert f"check {written['checks']['check']}" in ended.stdout


def test_the_command_names_what_failed_and_verify_replays_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with planted("report"):
        number = next(n for n in range(20) if judge(draw(5, n, 2)).verdict == "failed")
    failure = Task(5, 0.0, tmp_path).failed(number, draw(5, number, 2), Outcome("failed", "report", "why"))
    found = Found(5, cases=number + 1, failures=[failure])
    monkeypatch.setattr("flexcp.fuzz.campaign.campaign", lambda *_: found)
    ended = CliRunner().invoke(app, ["fuzz", "--cases", "8"])
    assert ended.exit_code == 1 and f"flexcp verify @{failure.file}" in ended.stdout
    again = CliRunner().invoke(app, ["verify", f"@{failure.file}"])
    assert again.exit_code == 0 and again.stdout.startswith("passed")


def test_wrong_options_are_refused() -> None:
    for wrong in (
        ["--ranks-share", "2"],
        ["--minutes", "-1"],
        ["--folder", "/nowhere"],
        ["--jobs", "-1"],
        ["--most-ranks", "0"],
    ):
        assert isinstance(CliRunner().invoke(app, ["fuzz", *wrong]).exception, ValueError)


def test_a_refusal_without_a_reason_is_a_failure() -> None:
    refused = replace(SMALL, planner={"strategy": "blocks", "max_tokens_per_rank": 1})
    assert judge(refused).verdict == "refused"
    odd = replace(SMALL, attention={**SMALL.attention, "heads": 3, "kv_heads": 2})
    assert judge(odd).verdict == "failed"


def test_a_worker_at_its_end_is_not_interrupted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The campaign may send SIGTERM while the worker's exit functions run, where an exception raised by the signal
    handler would be printed as a traceback; so the worker must ignore SIGTERM by then.
    """
    monkeypatch.setattr(os, "setsid", lambda: None)
    monkeypatch.setattr("flexcp.fuzz.worker.warm", lambda: None)
    monkeypatch.setattr("torch.set_num_threads", lambda _: None)
    ours, theirs = multiprocessing.Pipe()
    ours.send(None)
    before = signal.getsignal(signal.SIGTERM)
    try:
        serve(Task(0, 0.0, tmp_path), theirs)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)

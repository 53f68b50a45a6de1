"""Tests that names and notes from files are printed as plain text: no escape sequences, forged lines or markup."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest

import flexcp
from flexcp.cli.commands.verify import _as_text
from flexcp.cli.main import run
from flexcp.cli.shared import progress
from flexcp.cost import CostModel
from flexcp.io.terminal_text import visible, visible_lines
from flexcp.measure.replay_dumps import Replay, Replayed
from flexcp.measure.verify import Verdict
from flexcp.plan.file import load_plan, save_plan
from flexcp.plan.plan import Plan
from flexcp.telemetry.dump import Dump

BAD = "\x1b[31mred\x1b[0m\nforged\rline\x9b2J\u202etfel\u2028x"
SHOWN = r"\x1b[31mred\x1b[0m\nforged\rline\x9b2J\u202etfel\u2028x"


def bad_plan() -> Plan:
    """Return a plan whose mask, cluster and note hold control characters, which a terminal would obey."""
    where = dataclasses.replace(flexcp.cluster("cpu", 1, 2), name=BAD)
    plan = flexcp.Planner(2, 2, 8, cluster=where, strategy="zigzag")([40, 7], masks={BAD: (flexcp.causal(), 1)})
    return dataclasses.replace(plan, placement=dataclasses.replace(plan.placement, note=BAD))


def obeyed(text: str) -> set[str]:
    """Return the control characters of a text, except newlines."""
    return {c for c in text if not c.isprintable() and c != "\n"}


def test_what_is_obeyed_is_shown_and_the_rest_is_as_it_was() -> None:
    assert visible(BAD) == SHOWN
    assert visible("Längen, 長さ, [red], 50 %\u00a0") == "Längen, 長さ, [red], 50 %\u00a0"
    assert visible_lines("a\nb\x07", "  ") == "a\n  b\\x07"
    assert visible("\ud800") == r"\ud800"


def test_a_saved_plan_is_shown_as_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = bad_plan()
    (tmp_path / "a.plan").write_bytes(save_plan(plan))
    assert load_plan(save_plan(plan)).placement.note == BAD, "the file keeps it"
    for more in ([], ["--json"]):
        monkeypatch.setattr(sys, "argv", ["flexcp", "show", str(tmp_path / "a.plan"), *more])
        with pytest.raises(SystemExit):
            run()
        out, err = capsys.readouterr()
        assert not obeyed(out + err)
        assert not any(line.startswith("forged") for line in out.splitlines())
    assert SHOWN in str(plan) and not obeyed(str(plan))


def test_a_replayed_dump_is_shown_as_text() -> None:
    plan = bad_plan()
    verdict = Verdict({"out": 0.0}, {"out": 1.0}, True)
    found = Replay(
        [Dump(Path(f"{BAD}.json"), BAD, BAD, 0, [])],
        [Replayed(plan, [(0, 1)], verdicts={BAD: verdict}), Replayed(plan, [(0, 2)], problem=BAD)],
        [],
    )
    text = _as_text(found)
    assert not obeyed(text)
    assert not any(line.startswith("forged") for line in text.splitlines())


def test_an_error_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["show", BAD], ["plan", "--lengths", "40", "--ranks", "2", "--mask", BAD], ["plan", f"--{BAD}"]):
        monkeypatch.setattr(sys, "argv", ["flexcp", *words])
        with pytest.raises(SystemExit) as end:
            run()
        err = capsys.readouterr().err
        assert end.value.code == 2 and not obeyed(err) and err.count("\n") == 1


def test_a_name_is_no_markup() -> None:
    assert progress.plain("[red]a[/nonsense]\x1b").plain == "[red]a[/nonsense]\\x1b"


def test_the_words_of_a_cost_model_are_text() -> None:
    from flexcp.known_errors.words import error_words

    assert not obeyed(error_words(dataclasses.replace(CostModel(), name=BAD)))

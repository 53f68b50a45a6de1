"""Tests of ``benchmarks/lib/progress.py`` where standard error is no terminal: lines now and then, and all items."""

from __future__ import annotations

import pytest

from lib import progress
from lib.progress import tracked


def test_lines_say_how_many_items_are_done(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "SECONDS", 0)
    assert list(tracked("ab", "letters")) == ["a", "b"]
    assert capsys.readouterr().err == "letters: 1 of 2\nletters: 2 of 2\n"
    assert list(tracked(iter("ab"), "letters", 5)) == list(tracked(iter("ab"), "no length")) == ["a", "b"]
    said = capsys.readouterr().err
    assert said == "letters: 1 of 5\nletters: 2 of 5\nno length: 1\nno length: 2\n"


def test_nothing_is_said_of_short_loops(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(tracked(range(3), "numbers")) == [0, 1, 2]
    assert capsys.readouterr().err == ""

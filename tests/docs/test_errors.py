"""Tests that the page of errors and the README state the errors of the simulator that the package's file records."""

from __future__ import annotations

from flexcp.calibration import Errors
from flexcp.known_errors.entries import ROWS, KnownError, known_errors
from flexcp.known_errors.words import PAGE
from lib.record_errors import README, ROOT, errors_page, how_sure


def test_the_page_is_that_of_the_entries() -> None:
    assert (ROOT / PAGE).read_text() == errors_page(known_errors()), (
        "the command that records an entry writes the page too"
    )


def test_the_readme_says_the_same() -> None:
    assert f"\n\n{how_sure()}\n\n" in README.read_text()


def test_what_was_not_run_is_a_dash() -> None:
    entries = {"links, box": KnownError("links, box", Errors(7, 0.015, 0.03, 0.25), "2026-02-03", "2 cores, idle")}
    rows = errors_page(entries).splitlines()
    assert sum("not run" in row for row in rows) == len(ROWS) - 1
    assert "| 7 | 1.5% | 3.0% | 25.0% |  | `make box`, 2026-02-03, 2 cores, idle |" in "\n".join(rows)

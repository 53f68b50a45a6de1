"""Tests that the table of trainers in docs/trainers.md is what its script writes, except for the date, and that every
test which the table relies on exists.
"""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError

import pytest

from lib.trainer_table import COLUMNS, FAILED, ROOT, TESTS, TRAINERS, table
from trainers import BEGIN, END, failed_tests, written

PAGE = (ROOT / "docs" / "trainers.md").read_text()


def test_the_page_has_the_table() -> None:
    """The page has the versions, the lines to change, and the features that work, as they are in this checkout."""
    try:
        found = table()
    except PackageNotFoundError as error:
        pytest.skip(f"{error}: the table has the versions of all packages")
    assert f"\n{found}\n" in PAGE


def test_every_test_exists() -> None:
    for test in {test for trainer in TRAINERS for test in trainer.tests}:
        file, _, name = test.partition("::")
        assert re.search(rf"^def {name}\(", (ROOT / TESTS / file).read_text(), re.MULTILINE), test


def test_columns_are_those_of_the_table() -> None:
    for trainer in TRAINERS:
        assert not {*trainer.works, *trainer.refuses} - set(COLUMNS), trainer.name
        assert not set(trainer.works) & set(trainer.refuses), trainer.name


def test_a_test_that_failed_is_in_the_table_and_other_words_are_kept() -> None:
    test = TRAINERS[0].works["resume"]
    assert table({test}).count(FAILED) == 1
    assert FAILED not in table()
    page = written(PAGE, "words")
    assert f"{BEGIN}\n\nwords\n\n{END}" in page
    assert page.startswith("# Which trainer") and len(page) < len(PAGE)


def test_all_tests_of_an_environment_run_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that did not pass counts as failed, also if it was skipped."""
    ran: list[str] = []

    def passed(environment: str, tests: list[str], steps: int) -> set[str]:
        ran.append(environment)
        return set(tests) - {TRAINERS[0].works["resume"]}

    monkeypatch.setattr("trainers._passed", passed)
    assert failed_tests(4) == {TRAINERS[0].works["resume"]}
    assert ran == sorted({trainer.environment for trainer in TRAINERS})

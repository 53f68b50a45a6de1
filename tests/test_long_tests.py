"""Proves that the tests which ``make test`` leaves out exist, and that the first of sampled cases stays."""

from __future__ import annotations

from pathlib import Path

import pytest

from long_tests import LEFT_OUT, ONE_IN, long_among

TESTS = Path(__file__).parent


@pytest.mark.parametrize("name", [*LEFT_OUT, *ONE_IN])
def test_it_is_the_name_of_a_test(name: str) -> None:
    file, _, function = name.partition("[")[0].partition("::")
    assert f"\ndef {function}" in (TESTS / file).read_text()


def test_the_first_case_and_every_so_many_th_stay() -> None:
    [sampled, *_] = (name for name, one_in in ONE_IN.items() if one_in == 3)
    names = [f"tests/{sampled}[{case}]" for case in "abcdefg"] + ["tests/test_other.py::test_it"]
    assert set(names) - long_among(names) == {*(f"tests/{sampled}[{case}]" for case in "adg"), names[-1]}
    [all_of_a_file] = (name for name in LEFT_OUT if name.endswith("::"))
    assert long_among([f"tests/{all_of_a_file}test_any[1]"]) == {f"tests/{all_of_a_file}test_any[1]"}

"""Runs the fuzzer's checks of plans on a few random cases in this process, so that every change of a planner is fuzzed
in CI.
"""

from __future__ import annotations

import pytest

from flexcp.fuzz.draw import draw
from flexcp.fuzz.judge import Extras, judge


@pytest.mark.parametrize("seed", range(4))
def test_random_cases_pass(seed: int) -> None:
    outcomes = [judge(draw(seed, number), Extras(False, False, False)) for number in range(20)]
    assert [outcome.message for outcome in outcomes if outcome.verdict == "failed"] == []
    assert sum(outcome.verdict == "passed" for outcome in outcomes) >= 10

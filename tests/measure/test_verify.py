"""Tests that verification reports its progress. What it verifies is tested in tests/benchmarks/test_matrix.py and with
the commands.
"""

from __future__ import annotations

import flexcp
from flexcp.measure.verify import Options, verifying


def test_verification_says_how_far_it_is() -> None:
    planner = flexcp.Planner(2, 1, 8, dtype="float32", cluster=flexcp.cluster("cpu", 1, 1))
    steps, said = verifying(None, planner([600, 40, 1]), Options()), []
    try:
        while True:
            said.append(next(steps))
    except StopIteration as end:
        assert end.value.passed
    assert said[0] == "forward and backward under the plan, on 1 process"
    exact, rounded = (
        [text.rpartition(": ")[2] for text in said if f"dense {name} attention" in text]
        for name in ("float64", "float32")
    )
    assert exact == rounded
    assert exact == [f"{way}, {done} of 641 tokens" for way in ("forward", "backward") for done in (600, 641)]

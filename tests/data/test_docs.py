"""Tests that the examples of docs/data.md run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TEXT = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
EXAMPLES = re.findall(r"(?<!-->\n)```python\n(.*?)```", TEXT, re.DOTALL)
"""All Python blocks except fragments, which have an HTML comment before them."""


@pytest.mark.parametrize("number", range(5))
def test_an_example_runs(number: int) -> None:
    assert len(EXAMPLES) == 5
    exec(compile(EXAMPLES[number], f"docs/data.md example {number}", "exec"), {})

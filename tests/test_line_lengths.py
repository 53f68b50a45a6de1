"""Proves that no line of Python is wider than 120 columns, and that no code is excluded from formatting."""

from __future__ import annotations

import io
import subprocess
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MOST_COLUMNS = 120


def faults(text: str) -> Iterator[str]:
    """Yield line and reason for each line that is too wide and each comment that turns the formatter off."""
    for number, line in enumerate(text.splitlines(), 1):
        if len(line) > MOST_COLUMNS:
            yield f"{number}: {len(line)} columns"
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and token.string.lstrip("# ").startswith("fmt:"):
            yield f"{token.start[0]}: {token.string}"


def test_no_tracked_file_has_a_wide_line_or_an_unformatted_part() -> None:
    """The linter alone accepts long lines that end in a URL or in a comment for another tool."""
    listed = subprocess.run(["git", "ls-files", "-z", "*.py"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    files = [ROOT / name for name in listed.stdout.split("\0") if name]
    found = [
        f"{file.relative_to(ROOT)}:{fault}" for file in files if file.exists() for fault in faults(file.read_text())
    ]
    assert not found, f"break the line at {MOST_COLUMNS} columns, or let the formatter have it: {found}"


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("a = 1\n", 0),
        ("#" * MOST_COLUMNS + "\n", 0),
        ("#" * MOST_COLUMNS + "#\n", 1),
        ("a = 1  # type: ignore[" + "x" * MOST_COLUMNS + "]\n", 1),
        ("a = 1  # fmt: skip\n", 1),
        ("# fmt: off\na = 1\n# fmt: on\n", 2),
        ('a = "# fmt: off"\n', 0),
    ],
)
def test_wide_lines_and_comments_are_seen(text: str, count: int) -> None:
    assert len(list(faults(text))) == count

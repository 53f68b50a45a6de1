"""Proves that changing the system's clock while flexcp runs changes nothing: time limits and measurements use clocks
that only go forward.

The wall clock is read only for dates in files and their names.
"""

from __future__ import annotations

import ast
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src/flexcp"
WALL = {
    ("time", "time"),
    ("time", "time_ns"),
    ("datetime", "now"),
    ("datetime", "utcnow"),
    ("date", "today"),
    ("time", "localtime"),
}
MAY = {"telemetry/dump.py", "cli/commands/bench_step.py", "measure/accept/accept.py"}
"""Files that may read the wall clock, because they write dates into files."""


def readers_of_the_wall_clock(path: Path) -> list[int]:
    """Return the lines of a file that read the wall clock."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and (node.value.id, node.attr) in WALL
    ]


def test_only_dates_in_files_are_of_the_wall_clock() -> None:
    found = {
        str(path.relative_to(SOURCE)): lines
        for path in SOURCE.rglob("*.py")
        if (lines := readers_of_the_wall_clock(path))
    }
    assert found.keys() == MAY, found


def test_a_reader_would_be_found(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("import time\nbegin = time.time()\n")
    assert readers_of_the_wall_clock(tmp_path / "a.py") == [2]

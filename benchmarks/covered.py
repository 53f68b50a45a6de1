"""The page of test coverage, from the file that ``make coverage`` leaves.

    python benchmarks/covered.py build/coverage.json --tests "all tests" --page docs/results/coverage.md

A line counts as covered if a test ran it in pytest's processes, in a rank of the session's pool, or in another process
that ended by itself. Ranks that a test kills take their counts with them. Compiled loops and GPU functions are left out
(``pyproject.toml`` names their files): Python does not run their lines.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections import Counter
from datetime import date
from pathlib import Path
from typing import Any


def main(words: list[str] | None = None) -> int:
    """Print the table, or write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--tests", default="all tests", help="which tests ran, in words")
    parser.add_argument("--where", help="the machine that ran them, in words; this one without it")
    parser.add_argument("--page", type=Path)
    asked = parser.parse_args(words)
    here = f"{os.cpu_count()} cores ({platform.machine()}), Python {platform.python_version()}"
    made = page(json.loads(asked.file.read_text()), asked.tests, asked.where or here)
    print(made)
    if asked.page is not None:
        asked.page.write_text(made)
    return 0


def page(found: dict[str, Any], tests: str, where: str) -> str:
    """Return the page: the share of all lines, and a row for each folder and module of ``src/flexcp``.

    ``tests`` and ``where`` say in words which tests ran, and on which machine.
    """
    lines, run = Counter[str](), Counter[str]()
    for name, file in found["files"].items():
        room = _room(name)
        lines[room] += file["summary"]["num_statements"]
        run[room] += file["summary"]["covered_lines"]
    rows = [f"| `{room}` | {lines[room]:,} | {100 * run[room] / lines[room]:.1f} % |" for room in sorted(lines)]
    return (
        f"# Coverage\n\n**Measured** {date.today()} by `make coverage` on {where}, with {tests}: "
        f"**{100 * run.total() / lines.total():.1f} %** of {lines.total():,} lines of `src/flexcp`. Not counted are "
        "compiled loops and GPU functions, whose lines Python does not run. What ran in ranks that a test killed is "
        "not seen.\n\n| room | lines | run by a test |\n| --- | --- | --- |\n" + "\n".join(rows) + "\n"
    )


def _room(name: str) -> str:
    """Return the folder or module directly in ``src/flexcp`` that a file belongs to."""
    parts = Path(name).parts
    inside = parts[parts.index("flexcp") + 1 :]
    return inside[0] if len(inside) > 1 else inside[0].removesuffix(".py")


if __name__ == "__main__":
    sys.exit(main())

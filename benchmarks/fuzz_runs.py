"""The table of fuzzing campaigns in docs/trust.md, made from the summaries that ``flexcp fuzz --json`` prints.

    python benchmarks/fuzz_runs.py plans.json ranks.json more.json --on "16 cores (x86_64), Python 3.12, torch 2.11"

The table stands between two comments of the page, which are kept. Failures are those found in the run, whether they
have been fixed since or not.
"""

from __future__ import annotations

import argparse
import json
from datetime import date
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[1] / "docs/trust.md"
BEGIN, END = "<!-- campaigns -->\n", "<!-- end of campaigns -->\n"


def table(runs: list[dict[str, Any]], machine: str, day: str) -> str:
    """Return the table with one row per campaign."""
    names = ("seed", "cases", "refused", "plans", "on real ranks", "jobs", "seconds", "failed")
    head = f"**Measured** {day} on {machine}:\n\n| {' | '.join(names)} |\n|{' --- |' * len(names)}"
    rows = [
        f"| {run['seed']} | {run['cases']:,} | {run['refused']:,} | {run['plans']:,} | {run['on_ranks']:,} | "
        f"{run['jobs']} | {run['seconds']:.0f} | {_failed(run)} |"
        for run in runs
    ]
    return "\n".join([head, *rows]) + "\n"


def _failed(run: dict[str, Any]) -> str:
    cases = ", ".join(str(failure["case"]) for failure in run["failures"])
    return f"{len(run['failures'])}: cases {cases}" if cases else "0"


def with_table(page: str, made: str) -> str:
    """Return the page with its table replaced."""
    before, _, rest = page.partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        raise ValueError(f"the page has no {BEGIN.strip()} ... {END.strip()}")
    return f"{before}{BEGIN}\n{made}\n{END}{after}"


def main(words: list[str] | None = None) -> None:
    """Read the summaries and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("summaries", type=Path, nargs="+")
    parser.add_argument("--on", required=True, help="the machine, in words")
    parser.add_argument("--date", default=date.today().isoformat(), help="the day of the runs; today by default")
    asked = parser.parse_args(words)
    runs = [json.loads(path.read_text()) for path in asked.summaries]
    PAGE.write_text(with_table(PAGE.read_text(), table(runs, asked.on, asked.date)))


if __name__ == "__main__":
    main()

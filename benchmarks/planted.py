"""Deliberate bugs, one for each area: does ``flexcp fuzz`` find each, and how soon?

    python benchmarks/planted.py --jobs 2 --write out/planted.json --page docs/results/planted.md

The run fails if a bug is not found within the limit, or only because a process died, which says nothing about the
comparisons.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from dataclasses import asdict, dataclass
from datetime import date
from functools import partial
from pathlib import Path

from flexcp.fuzz.campaign import Limits, campaign
from flexcp.fuzz.worker import Task
from flexcp.measure.warmup import warm
from lib.planted_bugs import BUGS, plant, plant_on_pool


@dataclass(frozen=True)
class Hunt:
    """A bug, the check that found it (empty if none did), and after how many cases and seconds."""

    area: str
    bug: str
    check: str
    cases: int
    seconds: float

    @property
    def found(self) -> bool:
        return self.check not in ("", "process")

    def row(self) -> str:
        """Return the row of the table."""
        found = self.check if self.found else "NOT FOUND"
        return f"| {self.area} | {self.bug} | {found} | {self.cases} | {self.seconds:.0f} |"


def hunt(area: str, seed: int, seconds: float, most_ranks: int, jobs: int) -> Hunt:
    """Run a campaign with the bug of an area until a case fails or the time is over."""
    bug = BUGS[area]
    with tempfile.TemporaryDirectory() as folder:
        if bug.on_ranks:
            task = Task(seed, 1.0, Path(folder), most_ranks, prepare_ranks=partial(plant_on_pool, area))
        else:
            task = Task(seed, 0.0, Path(folder), most_ranks, prepare=partial(plant, area))
        found = campaign(task, Limits(seconds=seconds, failures=1), jobs)
    return Hunt(area, bug.says, found.failures[0].check if found.failures else "", found.cases, round(found.seconds, 1))


def page(hunts: list[Hunt], command: str, jobs: int) -> str:
    """Return the page with its table."""
    head = (
        f"# Planted bugs\n\n**Measured** {date.today()} by `{command}` with `--jobs {jobs}` on {os.cpu_count()} cores "
        f"({platform.machine()}): a bug put into each area, and after how many cases and seconds `flexcp fuzz` failed. "
        "Seconds include starting the processes.\n\n| area | bug | found by | cases | seconds |\n| --- | --- | --- | "
        "--- | --- |\n"
    )
    return head + "\n".join(one.row() for one in hunts) + "\n"


def main() -> int:
    """Print one row for each area; returns 1 if a bug was not found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0, help="for each bug")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--most-ranks", type=int, default=4)
    parser.add_argument("--jobs", type=int, default=1, help="processes that judge cases")
    parser.add_argument("--areas", default=",".join(BUGS))
    parser.add_argument("--write", type=Path, help="JSON, rewritten after every bug")
    parser.add_argument("--page", type=Path, help="the table")
    asked = parser.parse_args()
    warm()  # compiles loops and keeps them for the workers
    hunts = []
    for area in asked.areas.split(","):
        hunts.append(hunt(area, asked.seed, 60 * asked.minutes, asked.most_ranks, asked.jobs))
        print(hunts[-1].row(), flush=True)
        if asked.write is not None:
            asked.write.write_text(json.dumps([asdict(one) for one in hunts], indent=1) + "\n")
    if asked.page is not None:
        asked.page.write_text(page(hunts, f"python benchmarks/planted.py --seed {asked.seed}", asked.jobs))
    return int(not all(one.found for one in hunts))


if __name__ == "__main__":
    sys.exit(main())

"""Bugs put in on purpose, one an area: does ``flexcp fuzz`` find each, and how soon?

    python benchmarks/planted.py --minutes 5 --write docs/results/planted.md

A bug that is not found within the limit fails the run.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from contextlib import nullcontext
from datetime import date
from pathlib import Path

from flexcp.fuzz.campaign import Found, campaign
from lib.planted_bugs import BUGS, plant_on_rank, planted


def found_with(area: str, seed: int, seconds: float, most_ranks: int) -> Found:
    """A campaign with the bug of an area, until it is found or the time is over."""
    bug = BUGS[area]
    with tempfile.TemporaryDirectory() as folder, nullcontext() if bug.on_ranks else planted(area):
        found: Found | None = None

        def tell(now: Found) -> None:
            nonlocal found
            found = now

        def more(_: int, spent: float) -> bool:
            return spent < seconds and not (found is not None and found.failures)

        share = 1.0 if bug.on_ranks else 0.0
        return campaign(
            seed,
            share,
            Path(folder),
            more,
            tell,
            most_ranks,
            (lambda pool: pool.run(plant_on_rank, area)) if bug.on_ranks else (lambda _: None),
        )


def main() -> int:
    """One row an area."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--most-ranks", type=int, default=4)
    parser.add_argument("--areas", default=",".join(BUGS))
    parser.add_argument("--write", type=Path)
    asked = parser.parse_args()
    rows, missed = [], []
    for area in asked.areas.split(","):
        begin = time.monotonic()
        found = found_with(area, asked.seed, 60 * asked.minutes, asked.most_ranks)
        took = time.monotonic() - begin
        check = found.failures[0].check if found.failures else ""
        if not found.failures:
            missed.append(area)
        rows.append(f"| {area} | {BUGS[area].says} | {check or 'NOT FOUND'} | {found.cases} | {took:.0f} |")
        print(rows[-1], flush=True)
    if asked.write is not None:
        head = (
            f"# Planted bugs\n\n**Measured** {date.today()} by `python benchmarks/planted.py --seed {asked.seed}`: a bug put into each "
            "area, and after how many cases `flexcp fuzz` failed. Seconds include making the failing case small.\n\n"
            "| area | bug | found by | cases | seconds |\n| --- | --- | --- | --- | --- |\n"
        )
        asked.write.write_text(head + "\n".join(rows) + "\n")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())

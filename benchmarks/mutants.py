"""Mutation testing: how many of the automatically changed sources do the tests notice?

    python benchmarks/mutants.py --count 200 --jobs 16 --write build/mutants.json --page docs/results/mutants.md

Each mutant is one small change (:mod:`lib.mutations`) of a source of :data:`lib.mutant_areas.AREAS`, in a copy of the
checkout (:mod:`lib.mutant_runs`). It is killed if one of its tests fails, or takes more than three times as long as
without it. Changes that compile to the same code as the original are recognised and never drawn. All others count, even
those that a reader would call equivalent.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import as_completed
from datetime import date
from pathlib import Path
from typing import Any

from flexcp.measure.warmup import warm
from lib.mutant_areas import AREAS, Area
from lib.mutant_runs import START_SECONDS, Copies, Verdict, baseline, drawn, nearest_tests, tried

ROOT = Path(__file__).parents[1]
WANTED = 0.9
"""The share of mutants that tests must kill."""


def say(text: str) -> None:
    """Print progress on stderr."""
    print(text, file=sys.stderr, flush=True)


def measured(root: Path, areas: dict[str, Area], asked: argparse.Namespace) -> tuple[list[Verdict], dict[str, Any]]:
    """Return verdicts in the order of drawing, and facts about the run.
    Stops at ``asked.minutes`` and rewrites ``asked.write`` as it goes.
    """
    begin, verdicts = time.monotonic(), dict[int, Verdict]()
    with tempfile.TemporaryDirectory(prefix="flexcp-mutants-") as folder:
        copies = Copies(root, Path(folder), asked.jobs)
        tests = {test for area in areas.values() for test in area.tests}
        seconds, left_out = baseline(copies, tests, asked.slowest, say)
        places = drawn(root, areas, asked.count, asked.seed)
        facts = {
            "date": str(date.today()),
            "seed": asked.seed,
            "asked": len(places),
            "jobs": asked.jobs,
            "cores": os.cpu_count(),
            "machine": platform.machine(),
            "tests": seconds,
            "left_out": left_out,
        }

        def one(number: int) -> Verdict | None:
            place = places[number]
            if asked.minutes and time.monotonic() - begin > 60 * asked.minutes:
                return None
            tests = nearest_tests(root, place.source, areas[place.area], seconds)
            if not tests:
                raise ValueError(f"no test of {place.area} passes on the unchanged sources")
            limit = 3 * sum(seconds[test] for test in tests) + START_SECONDS
            return copies.with_copy(lambda copy: tried(place, tests, limit, copy, copies.stop, left_out))

        with copies.threads() as pool:
            runs = {pool.submit(one, number): number for number in range(len(places))}
            for run in as_completed(runs):
                verdict = run.result()
                if verdict is None:
                    continue
                verdicts[runs[run]] = verdict
                facts["seconds"] = round(time.monotonic() - begin)
                place = verdict.place
                say(
                    f"{len(verdicts)}/{len(places)} {verdict.how} in {verdict.seconds:.0f} s: {place.source} "
                    f"{place.mutant.kind}, {place.mutant.diff()}"
                )
                if asked.write is not None:
                    write(asked.write, [verdicts[number] for number in sorted(verdicts)], facts)
    return [verdicts[number] for number in sorted(verdicts)], facts


def write(path: Path, verdicts: list[Verdict], facts: dict[str, Any]) -> None:
    """Write verdicts and facts as JSON."""
    rows = [
        {
            "area": v.place.area,
            "source": v.place.source,
            "kind": v.place.mutant.kind,
            "change": v.place.mutant.diff(),
            "verdict": v.how,
            "seconds": v.seconds,
        }
        for v in verdicts
    ]
    path.write_text(json.dumps({**facts, "mutants": rows}, indent=1) + "\n")


def page(content: dict[str, Any]) -> str:
    """Return the page, from the JSON's content."""
    rows = content["mutants"]
    all_of = Counter(row["area"] for row in rows)
    killed = Counter(row["area"] for row in rows if row["verdict"] != "survived")
    head = (
        f"# Mutants\n\n**Measured** {content['date']} by `python benchmarks/mutants.py --count {content['asked']} "
        f"--seed {content['seed']} --jobs {content['jobs']}` on {content['cores']} cores ({content['machine']}) in "
        f"{content['seconds']} s: {summary(rows)}. Changes that compile to the same code are not drawn; all others "
        "count, also those that mean the same to a reader.\n"
    )
    table = [f"| {area} | {count} | {killed[area]} |" for area, count in all_of.items()]
    survivors = [
        f"| {row['area']} | {row['source']} | {row['kind']} | {row['change']} |"
        for row in rows
        if row["verdict"] == "survived"
    ]
    lines = [head, "| area | mutants | killed |", "| --- | --- | --- |", *table, "\n## Survivors\n"]
    return "\n".join([*lines, "| area | file | change | where |", "| --- | --- | --- | --- |", *survivors]) + "\n"


def summary(rows: list[dict[str, Any]]) -> str:
    """Return the number of killed mutants in words."""
    killed = sum(row["verdict"] != "survived" for row in rows)
    return f"{killed} of {len(rows)} mutants killed ({100 * killed / max(1, len(rows)):.0f} %)"


def main(words: list[str] | None = None, root: Path = ROOT, areas: dict[str, Area] = AREAS) -> int:
    """Make mutants, run tests and write the results; returns 1 if too few were killed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200, help="mutants in all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--areas", default=",".join(areas))
    parser.add_argument(
        "--jobs", type=int, default=2, help="copies of the checkout in which tests run beside each other"
    )
    parser.add_argument(
        "--slowest", type=float, default=120.0, help="seconds; a test file that takes longer is left out"
    )
    parser.add_argument(
        "--minutes", type=float, default=0.0, help="no further mutant is tried after this; 0 for no limit"
    )
    parser.add_argument("--write", type=Path, help="JSON, rewritten after every mutant")
    parser.add_argument("--page", type=Path, help="the table")
    asked = parser.parse_args(words)
    unknown = set(asked.areas.split(",")) - set(areas)
    if unknown:
        parser.error(f"no areas {', '.join(sorted(unknown))}; there are {', '.join(areas)}")
    with tempfile.TemporaryDirectory() as folder:
        asked.write = asked.write or Path(folder) / "mutants.json"
        verdicts, _ = measured(root, {name: areas[name] for name in asked.areas.split(",")}, asked)
        if not verdicts:
            print("no mutant was tried within --minutes", file=sys.stderr)
            return 1
        content = json.loads(asked.write.read_text())
    print(summary(content["mutants"]))
    if asked.page is not None:
        asked.page.write_text(page(content))
    return int(sum(verdict.killed for verdict in verdicts) < WANTED * len(verdicts))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    warm()  # compiled loops are copied with the checkout
    sys.exit(main())

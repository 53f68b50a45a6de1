"""Mutants: of automatically changed sources, how many do the tests notice?

    python benchmarks/mutants.py --count 200 --seed 0 --write docs/results/mutants.md

Each mutant is one small change (:mod:`lib.mutations`) of a file of the areas below, in a copy of the checkout. The tests that mirror the
file run with ``-x``, the nearest first; a mutant is killed when one fails, or when they take four times as long as without it. Survivors
are listed with their change: some mean the same as the original, the others are tests to write.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from lib.mutations import Mutant, mutants

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Area:
    """Files of ``src/flexcp``, and the tests that are theirs, nearest first."""

    files: tuple[str, ...]
    tests: tuple[str, ...]


AREAS = {
    "masks": Area(
        ("masks/named.py", "masks/slices.py", "masks/tree.py", "masks/conversions.py", "masks/mask.py"),
        ("tests/masks", "tests/fuzz/test_references.py"),
    ),
    "planners": Area(
        ("planners/token_runs.py", "planners/microbatch.py", "planners/static/static.py", "planners/static/dealing.py",
         "planners/groups/groups.py", "planners/groups/rows.py", "planners/blocks/blocks.py", "planners/auto/auto.py"),
        ("tests/planners/test_token_runs.py", "tests/planners/test_microbatch.py", "tests/planners/test_dealing.py",
         "tests/test_planner.py", "tests/planners/groups", "tests/planners/test_strategies.py", "tests/planners/test_auto.py"),
    ),
    "schedule": Area(
        ("schedule/work.py", "schedule/needs.py", "schedule/routes.py", "schedule/stages.py", "schedule/transfers.py"),
        ("tests/schedule", "tests/test_planner.py", "tests/plan/test_check.py"),
    ),
    "exchange": Area(
        ("executor/exchange/transports.py", "executor/exchange/arena.py", "executor/exchange/plan_agreement.py",
         "executor/run/packing.py", "executor/run/message_layout.py", "executor/run/rank_program.py"),
        ("tests/executor/exchange/test_transports.py", "tests/executor/exchange/test_arena.py", "tests/executor/run"),
    ),
    "merge": Area(("executor/kernels/__init__.py", "executor/kernels/cpu.py"), ("tests/executor/kernels/test_kernels.py",)),
    "backward": Area(
        ("executor/kernels/sinks_and_delta.py", "executor/run/executor.py", "executor/run/one_device.py"),
        ("tests/executor/test_edges.py", "tests/executor/test_attention.py"),
    ),
    "loader": Area(
        ("data/documents.py", "data/order.py", "data/loader.py", "data/row_sharing.py", "data/local_batch.py"),
        ("tests/data/test_state.py", "tests/data/test_loader.py", "tests/data/test_micro_batches.py"),
    ),
    "report": Area(
        ("report/plan_data.py", "report/page.py", "report/markup.py", "report/plan_time.py", "report/timeline.py"),
        ("tests/report/test_page.py", "tests/report/test_plan_time.py", "tests/report/test_rounds_table.py"),
    ),
}  # fmt: skip


def run_tests(checkout: Path, tests: tuple[str, ...], seconds: float) -> tuple[str, float]:
    """ "killed", "survived" or "killed (too slow)", and how long it took."""
    there = [test for test in tests if (checkout / test).exists()]
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "--no-header", "-p", "no:randomly", *there]
    # Loops that were compiled for the checkout serve its copy, where the source is the same.
    environment = {
        **os.environ,
        "PYTHONPATH": f"{checkout / 'src'}:{checkout / 'benchmarks'}",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    begin = time.monotonic()
    process = subprocess.Popen(
        command,
        cwd=checkout,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        code = process.wait(seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        process.wait()
        return "killed (too slow)", time.monotonic() - begin
    return ("survived" if code == 0 else "killed"), time.monotonic() - begin


def drawn(count: int, seed: int, areas: list[str]) -> list[tuple[str, str, Mutant]]:
    """(area, file, mutant): the areas in turn, files of each at random."""
    rng, found = random.Random(seed), []
    streams = {}
    for area in areas:
        files = [(file, mutants((ROOT / "src/flexcp" / file).read_text(), rng)) for file in AREAS[area].files]
        streams[area] = files
    while len(found) < count:
        area = areas[len(found) % len(areas)]
        file, stream = rng.choice(streams[area])
        mutant = next(stream, None)
        if mutant is not None:
            found.append((area, file, mutant))
    return found


def main() -> int:
    """Make mutants, run tests, write a table; 1 when fewer than 90 % were killed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--areas", default=",".join(AREAS))
    parser.add_argument("--seconds", type=float, default=900.0, help="the most that the tests of a mutant may take")
    parser.add_argument("--write", type=Path)
    asked = parser.parse_args()
    areas = asked.areas.split(",")
    killed, all_of, survivors = Counter[str](), Counter[str](), []
    with tempfile.TemporaryDirectory() as folder:
        checkout = Path(folder) / "checkout"
        kept = shutil.ignore_patterns(
            ".git", ".venv", "__pycache__", ".mypy_cache", ".ruff_cache", ".hypothesis", "build"
        )
        shutil.copytree(ROOT, checkout, ignore=kept)
        limit = {}
        for area in areas:
            verdict, took = run_tests(checkout, AREAS[area].tests, asked.seconds)
            if verdict != "survived":
                print(
                    f"the tests of {area} do not pass on the unchanged source; nothing can be said about its mutants",
                    file=sys.stderr,
                )
                return 1
            limit[area] = min(asked.seconds, 4 * took + 60)
        for number, (area, file, mutant) in enumerate(drawn(asked.count, asked.seed, areas)):
            path = checkout / "src/flexcp" / file
            original = path.read_text()
            path.write_text(mutant.source)
            verdict, took = run_tests(checkout, AREAS[area].tests, limit[area])
            path.write_text(original)
            all_of[area] += 1
            killed[area] += verdict != "survived"
            print(
                f"{number + 1}/{asked.count} {verdict} ({took:.0f} s) {file} {mutant.kind}, {mutant.diff()}", flush=True
            )
            if verdict == "survived":
                survivors.append(f"| {area} | {file} | {mutant.kind} | {mutant.diff()} |")
    share = 100 * killed.total() / max(1, all_of.total())
    summary = f"{killed.total()} of {all_of.total()} mutants killed ({share:.0f} %)"
    print(summary)
    if asked.write is not None:
        head = f"# Mutants\n\n**Measured** {date.today()} by `python benchmarks/mutants.py --count {asked.count} --seed {asked.seed}`"
        rows = [f"| {area} | {all_of[area]} | {killed[area]} |" for area in areas]
        lines = [f"{head}: {summary}.\n", "| area | mutants | killed |", "| --- | --- | --- |", *rows]
        lines += ["\n## Survivors\n", "| area | file | change | where |", "| --- | --- | --- | --- |", *survivors]
        asked.write.write_text("\n".join(lines) + "\n")
    return int(share < 90)


if __name__ == "__main__":
    sys.exit(main())

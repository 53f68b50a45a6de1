"""The promises of the data pipeline, measured; ``make data`` writes docs/results/data.md.

    resume     a training run killed with signal 9 at twenty random moments, on one rank and on two, against one that
               is not disturbed
    planners   planner processes killed with signal 9 all through an epoch
    waits      how long the loop waits when planning takes ten times as long as usual, with and without look-ahead
    million    1,000,000 document lengths: time to the first batch, memory over an epoch
    fuzz       100,000 mutated plan files (benchmarks/fuzz_plans.py)

Each part runs in its own process. ``--part NAME`` runs one part and prints its numbers as JSON; ``--quick`` runs a
sample.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

# --- the parts --------------------------------------------------------------------------------------------------------


def resume(quick: bool) -> dict[str, Any]:
    """Kill runs on one and on two ranks and compare their steps with undisturbed runs; none may differ."""
    from lib.resume import disturbed, undisturbed

    kills = 2 if quick else 10
    found: dict[str, Any] = {}
    for ranks in (1, 2):
        steps = 12 * kills + 10
        with tempfile.TemporaryDirectory() as folder:
            expected = undisturbed(Path(folder) / "whole", ranks, steps)
            killed = disturbed(Path(folder) / "killed", ranks, steps, kills, seed=20 + ranks)
        differ = sum(a != b for a, b in zip(expected, killed.lines, strict=True))
        starting = sum(not begun for _, begun in killed.moments)
        found[f"{ranks} ranks"] = {
            "kills": kills,
            "while starting": starting,
            "steps": steps,
            "steps that differ": differ,
        }
    return found | {"passed": all(v["steps that differ"] == 0 for v in found.values())}


class Sized:
    """A map-style dataset with known lengths and tokens that cost nothing to make."""

    def __init__(self, lengths: np.ndarray) -> None:
        self.lengths = lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, number: int) -> np.ndarray:
        return np.full(self.lengths[number], number)


def _lengths(count: int) -> np.ndarray:
    """Draw long-tailed lengths around 500 tokens."""
    drawn = np.random.default_rng(0).lognormal(5.7, 1.0, count)
    return np.clip(drawn.astype(np.int64), 1, 16_384)


def _planner(strategy: str = "blocks") -> Any:
    import flexcp

    return flexcp.Planner(32, 8, 128, cluster=flexcp.cluster("h100", 1, 1), strategy=strategy)


def planners(quick: bool) -> dict[str, Any]:
    """Kill a planner process every other second, and compare the samples with those of an undisturbed loader."""
    from flexcp.data import Loader, Planning

    data = Sized(_lengths(2_000 if quick else 20_000))
    with Loader(data, _planner("zigzag"), budget=16_384, shuffle=True, planning=Planning(workers=0)) as whole:
        expected = [b.samples.tolist() for b in whole]
    done = threading.Event()
    rng = random.Random(0)
    with (
        Loader(data, _planner("zigzag"), budget=16_384, shuffle=True, planning=Planning(workers=2)) as loader,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        pool: Any = loader.plans

        def kill() -> None:
            while not done.wait(2.0):
                for pid in rng.sample(pool.processes(), min(1, len(pool.processes()))):
                    os.kill(pid, signal.SIGKILL)

        thread = threading.Thread(target=kill)
        thread.start()
        try:
            got = []
            for batch in loader:
                got.append(batch.samples.tolist())
                time.sleep(0.02)
        finally:
            done.set()
            thread.join()
    return {"steps": len(got), "killed": loader.stats.deaths, "passed": got == expected}


def waits(quick: bool) -> dict[str, Any]:
    """Measure how long a loop waits for plans. Work and slow planning are sleeps,
    so that the machine's cores do not matter.
    """
    from flexcp.data import Loader, Planning
    from lib.slow_planner import SlowPlanner

    steps = 60 if quick else 300
    data = Sized(_lengths(60 * (steps + 10)))
    rows: dict[str, Any] = {}

    def run(planner: Any, lookahead: int, work: float) -> dict[str, float]:
        with Loader(data, planner, budget=32_768, planning=Planning(lookahead=lookahead)) as loader:
            begin = 0.0
            for batch in loader:
                begin = begin or time.perf_counter()
                if batch.number == steps:
                    break
                time.sleep(work)
            seconds = time.perf_counter() - begin
            stats = loader.stats
            waited = stats.waited_s - stats.first_wait_s
            planned = stats.planned_ahead + stats.planned_here
            return {
                "planning ms": round(stats.planning_s / planned * 1000, 1),
                "step ms": round(seconds / steps * 1000, 1),
                "waits": stats.waits - 1,
                "waiting share": round(waited / seconds, 4),
                "longest ms": round(1000 * stats.longest_wait_s if waited else 0, 1),
            }

    usual = run(_planner(), 4, 0.0)["planning ms"] / 1000
    work = 13 * usual
    rows["usual"] = run(_planner(), 4, work)
    rows["10 times slower, look-ahead 4"] = run(SlowPlanner(_planner(), 9 * usual), 4, work)
    rows["10 times slower, no look-ahead"] = run(SlowPlanner(_planner(), 9 * usual), 0, work)
    return {**rows, "passed": rows["10 times slower, look-ahead 4"]["waiting share"] < 0.02}


def million(quick: bool) -> dict[str, Any]:
    """Measure start and memory of an epoch of many documents."""
    from flexcp.data import Loader

    count = 50_000 if quick else 1_000_000
    data = Sized(_lengths(count))
    begin = time.perf_counter()
    with Loader(data, _planner("zigzag"), budget=131_072, shuffle=True) as loader:
        made = time.perf_counter() - begin
        batches = len(loader)
        first, early = 0.0, 0.0
        for batch in loader:
            first = first or time.perf_counter() - begin
            if batch.number == batches // 10:
                early = _memory()
        return {
            "documents": count,
            "made after s": round(made, 2),
            "first batch after s": round(first, 2),
            "steps": batches,
            "epoch s": round(time.perf_counter() - begin, 1),
            "memory at a tenth MB": round(early, 1),
            "memory at the end MB": round(_memory(), 1),
            "passed": first < 3 and _memory() - early < 16 and loader.stats.documents_read == count,
        }


def _memory() -> float:
    """Return the resident megabytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 1e6


def fuzz(quick: bool) -> dict[str, Any]:
    """Run the fuzzer, which is a program of its own."""
    command = [sys.executable, str(Path(__file__).with_name("fuzz_plans.py")), "--json"]
    command += ["--count", "2000" if quick else "100000"]
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    return {**json.loads(result.stdout), "passed": result.returncode == 0}


PARTS: dict[str, Callable[[bool], dict[str, Any]]] = {
    "resume": resume,
    "planners": planners,
    "waits": waits,
    "million": million,
    "fuzz": fuzz,
}


# --- the table --------------------------------------------------------------------------------------------------------


def table(results: dict[str, dict[str, Any]], quick: bool) -> str:
    """Return the page."""
    import torch

    lines = [
        "# The data pipeline under stress",
        "",
        f"**Measured**, by `make data` on {date.today().isoformat()} ({platform.machine()}, {os.cpu_count()} cores, "
        f"torch {torch.__version__}){', a sample' if quick else ''}. Waiting is counted after the first plan; the "
        "loop's work and the slowness are sleeps. Memory is resident memory of the training process.",
        "",
        "| promise | measured | holds |",
        "| --- | --- | --- |",
    ]
    promises = {
        "resume": "killed with signal 9 at 20 random moments and resumed: samples and losses bitwise those of an "
        "undisturbed run",
        "planners": "planner processes killed with signal 9: no sample skipped or repeated",
        "waits": "planning 10 times slower than usual, within the look-ahead: the loop waits under 2 % of the time",
        "million": "1,000,000 lengths: first batch in under 3 s, flat memory over an epoch",
        "fuzz": "100,000 mutated plan files: no crash, no hang, no memory blow-up, no code run",
    }
    for name, found in results.items():
        shown = {k: v for k, v in found.items() if k != "passed"}
        text = "<br>".join(f"{key}: {_shown(key, value)}" for key, value in shown.items())
        lines.append(f"| {promises[name]} | {text} | {'yes' if found['passed'] else '**no**'} |")
    return "\n".join([*lines, ""])


def _shown(key: str, value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k} {_shown(k, v)}" for k, v in value.items())
    if key.endswith("share"):
        return f"{value:.2%}"
    return f"{value:,}" if isinstance(value, int) else f"{value}"


def main() -> int:
    """Run the parts, print the table and write it; returns 1 if a promise is broken."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", choices=PARTS, help="run one part here and print JSON")
    parser.add_argument("--quick", action="store_true", help="a sample of everything")
    parser.add_argument("--write", type=Path, help="file for the page")
    asked = parser.parse_args()
    if asked.part:
        print(json.dumps(PARTS[asked.part](asked.quick)))
        return 0
    results = {}
    for name in PARTS:
        print(f"{name} ...", file=sys.stderr, flush=True)
        command = [sys.executable, __file__, "--part", name, *(["--quick"] if asked.quick else [])]
        begin = time.monotonic()
        result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        results[name] = json.loads(result.stdout.splitlines()[-1])
        print(f"{name}: {results[name]} in {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)
    text = table(results, asked.quick)
    print(text)
    if asked.write:
        asked.write.write_text(text)
    return int(not all(r["passed"] for r in results.values()))


if __name__ == "__main__":
    sys.exit(main())

"""Planning times of two checkouts, in turns: ``python benchmarks/two_checkouts.py OLD NEW``.

One process a checkout keeps its loops compiled and plans what it is told to; the two are asked alternately, so that both see the same
machine. Only public names are used, so any two versions can be compared. A row is a batch and a strategy; its figures are medians over the
turns, and *ratio* is the median of the ratios of neighbouring turns, new over old. Plans must have equal hashes; rows in which they do not
say so.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

import flexcp

# (distribution, ranks, tokens a rank, mask) with the strategies asked for on each.
BATCHES = [
    ("web", 8, 8192, "causal"),
    ("web", 64, 8192, "causal"),
    ("libra256k", 32, 32_768, "causal"),
    ("libra256k", 64, 32_768, "lambda_"),
    ("libra256k", 256, 32_768, "causal"),
]
STRATEGIES = ["auto", "blocks", "groups", "zigzag", "minheap"]
CALLS = 5


def main() -> int:
    """Ask both checkouts in turns and print the table; 1 when a plan differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkouts", nargs="*", type=Path, metavar="OLD NEW")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.serve:
        _serve()
        return 0
    if len(asked.checkouts) != 2:
        parser.error("name two checkouts: the old one and the new one")
    table = Table("batch", "ranks", "mask", "strategy", "old ms", "new ms", "ratio", "plans")
    ratios, same = [], True
    with ExitStack() as stack:
        old, new = (stack.enter_context(_server(path)) for path in asked.checkouts)
        for case in track(list(_cases()), "planning in turns", console=Console(stderr=True)):
            turns = [(_ask(old, case), _ask(new, case)) for _ in range(asked.turns)]
            ratio = statistics.median(after["ms"] / before["ms"] for before, after in turns)
            equal = all(before["hash"] == after["hash"] for before, after in turns)
            ms = [statistics.median(turn[side]["ms"] for turn in turns) for side in (0, 1)]
            same &= equal
            ratios.append(ratio)
            labels = (case["distribution"], str(case["ranks"]), case["mask"], case["strategy"])
            table.add_row(*labels, f"{ms[0]:.2f}", f"{ms[1]:.2f}", f"{ratio:.3f}", "equal" if equal else "DIFFERENT")
    Console(width=120).print(table)
    print(f"median ratio {statistics.median(ratios):.3f}, worst {max(ratios):.3f}, over {len(ratios)} rows")
    return 0 if same else 1


def _cases() -> Iterator[dict[str, Any]]:
    from flexcp.data.lengths import draw_lengths

    for distribution, ranks, tokens, mask in BATCHES:
        lengths = [int(length) for length in draw_lengths(distribution, tokens * ranks, 0)]
        for strategy in STRATEGIES:
            yield {"distribution": distribution, "ranks": ranks, "mask": mask, "strategy": strategy, "lengths": lengths}


def _server(checkout: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str((checkout / "src").resolve())}
    command = [sys.executable, str(Path(__file__).resolve()), "--serve"]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)


def _ask(server: subprocess.Popen[str], case: dict[str, Any]) -> dict[str, Any]:
    assert server.stdin is not None and server.stdout is not None
    server.stdin.write(json.dumps(case) + "\n")
    server.stdin.flush()
    answer = server.stdout.readline()
    if not answer:
        raise SystemExit("a checkout's process ended; its error is above")
    found: dict[str, Any] = json.loads(answer)
    return found


def _serve() -> None:
    """Answer one case a line with the fastest of a few warm calls and the plan's hash."""
    for line in sys.stdin:
        case = json.loads(line)
        where = flexcp.cluster("h100", max(1, case["ranks"] // 8), 8)
        planner = flexcp.Planner(64, 8, 128, cluster=where, strategy=case["strategy"])
        mask = getattr(flexcp, case["mask"])()
        planner(case["lengths"], mask)
        times = []
        for _ in range(CALLS):
            begin = time.perf_counter()
            plan = planner(case["lengths"], mask)
            digest = str(plan.hash)
            times.append((time.perf_counter() - begin) * 1000)
        print(json.dumps({"ms": min(times), "hash": digest}), flush=True)


if __name__ == "__main__":
    raise SystemExit(main())

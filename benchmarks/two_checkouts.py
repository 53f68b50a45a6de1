"""Times of two checkouts, in turns: ``python benchmarks/two_checkouts.py OLD NEW`` for planning; with ``--kernels``, on
a GPU, for kernels.

Each checkout has one process that keeps what it compiled and runs what it is told; the two are asked alternately, so
that both see the same machine. Only public names are used, so any two versions can be compared. A row is a batch and a
strategy, or a workload, a kernel and a direction; its figures are medians over the turns, and *ratio* is the median of
the ratios of neighbouring turns, new over old. Plans must have equal hashes; a row says so if they do not.
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
from rich.table import Table

import flexcp
from lib.progress import tracked

# (distribution, ranks, tokens a rank, mask); each is planned with all strategies.
BATCHES = [
    ("web", 8, 8192, "causal"),
    ("web", 64, 8192, "causal"),
    ("libra256k", 32, 32_768, "causal"),
    ("libra256k", 64, 32_768, "lambda_"),
    ("libra256k", 256, 32_768, "causal"),
]
STRATEGIES = ["auto", "blocks", "groups", "zigzag", "minheap"]
CALLS = 5
KERNELS = ["hopper", "triton", "cute"]
TOKENS = 16_384
SPAN_MS = 40.0
"""Milliseconds of one measurement of a kernel."""


def main() -> int:
    """Ask both checkouts in turns and print the table; returns 1 if a plan differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkouts", nargs="*", type=Path, metavar="OLD NEW")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--kernels", action="store_true", help="time kernels on this GPU instead of planning")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.serve:
        _serve()
        return 0
    if len(asked.checkouts) != 2:
        parser.error("name two checkouts: the old one and the new one")
    cases = list(_kernel_cases() if asked.kernels else _planning_cases())
    table = Table("case", "old ms", "new ms", "ratio", *([] if asked.kernels else ["plans"]))
    ratios, same = [], True
    with ExitStack() as stack:
        old, new = (stack.enter_context(_server(path)) for path in asked.checkouts)
        for case in tracked(cases, "in turns"):
            turns = [(_ask(old, case), _ask(new, case)) for _ in range(asked.turns)]
            ratio = statistics.median(after["ms"] / before["ms"] for before, after in turns)
            equal = all(before.get("hash") == after.get("hash") for before, after in turns)
            ms = [statistics.median(turn[side]["ms"] for turn in turns) for side in (0, 1)]
            same &= equal
            ratios.append(ratio)
            same_plans = [] if asked.kernels else ["equal" if equal else "DIFFERENT"]
            table.add_row(case["label"], f"{ms[0]:.3f}", f"{ms[1]:.3f}", f"{ratio:.3f}", *same_plans)
    Console(width=120).print(table)
    print(f"median ratio {statistics.median(ratios):.3f}, worst {max(ratios):.3f}, over {len(ratios)} rows")
    return 0 if same else 1


def _planning_cases() -> Iterator[dict[str, Any]]:
    from flexcp.data.lengths import draw_lengths

    for distribution, ranks, tokens, mask in BATCHES:
        lengths = [int(length) for length in draw_lengths(distribution, tokens * ranks, 0)]
        for strategy in STRATEGIES:
            label = f"{distribution}, {ranks} ranks, {mask}, {strategy}"
            yield {"label": label, "ranks": ranks, "mask": mask, "strategy": strategy, "lengths": lengths}


def _kernel_cases() -> Iterator[dict[str, Any]]:
    sixteen = [TOKENS * part // 136 for part in range(1, 17)]
    sixteen[-1] += TOKENS - sum(sixteen)
    for name, lengths in (("one document", [TOKENS]), ("16 documents", sixteen)):
        for kernel in KERNELS:
            for backward in (False, True):
                label = f"causal, {name}, {kernel}, {'backward' if backward else 'forward'}"
                yield {"label": label, "kernel": kernel, "lengths": lengths, "backward": backward}


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
    """Answer one case per line."""
    for line in sys.stdin:
        case = json.loads(line)
        print(json.dumps(_timed_kernel(case) if "kernel" in case else _timed_planning(case)), flush=True)


def _timed_planning(case: dict[str, Any]) -> dict[str, Any]:
    """Return the fastest of a few warm calls and the plan's hash."""
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
    return {"ms": min(times), "hash": digest}


def _timed_kernel(case: dict[str, Any]) -> dict[str, Any]:
    """Return the milliseconds of a call, averaged over a span of consecutive calls."""
    import torch

    made = torch.Generator("cuda").manual_seed(0)
    shapes = [(TOKENS, heads, 128) for heads in (32, 8, 8, 32)]
    q, k, v, do = (torch.randn(shape, generator=made, device="cuda", dtype=torch.bfloat16) for shape in shapes)
    inputs = [x.requires_grad_(case["backward"]) for x in (q, k, v)]
    slices = flexcp.packed_slices(case["lengths"], flexcp.causal())
    out = flexcp.slice_attention(*inputs, slices, kernel=case["kernel"])

    def call() -> None:
        if case["backward"]:
            torch.autograd.grad(out, inputs, do, retain_graph=True)
        else:
            flexcp.slice_attention(*inputs, slices, kernel=case["kernel"])

    def milliseconds(calls: int) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(calls):
            call()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / calls

    milliseconds(2)
    return {"ms": milliseconds(max(3, round(SPAN_MS / milliseconds(3))))}


if __name__ == "__main__":
    raise SystemExit(main())

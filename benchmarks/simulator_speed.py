"""The time to simulate a plan, measured; ``make simulator-speed`` writes docs/results/simulator-speed.md.

There is one line for each plan of a batch with 32K tokens a rank: attention forward and backward of one layer,
:func:`simulate` alone with a finished plan and compiled loops. Strategies take turns. The page has the median wall time
over the turns, and the least CPU time: simulating uses one thread, so on a machine with other load CPU time is the
better measure. The page also states the load of the machine.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from datetime import date
from pathlib import Path

import flexcp
from flexcp.data.lengths import draw_lengths
from flexcp.plan.plan import Plan
from flexcp.simulator.training import simulate

A_RANK = 32_768
PLANS = (
    ("usp:8,4", 32),
    ("zigzag", 32),
    ("usp:8,8", 64),
    ("zigzag:8", 64),
    ("zigzag", 64),
    ("ring", 64),
    ("ulysses:8", 64),
    ("allgather", 64),
    ("blocks", 64),
    ("auto", 64),
)
TURNS = 15
IDLE_BELOW = 1.5
"""A machine with a load below this counts as idle; this process contributes 1."""


def planned(strategy: str, ranks: int, lengths: str = "libra256k") -> Plan:
    machine = flexcp.cluster("h100", ranks // 8, 8)
    return flexcp.Planner(32, 8, 128, cluster=machine, strategy=strategy)(draw_lengths(lengths, ranks * A_RANK, 0))


def measured(plans: list[Plan], turns: int) -> list[list[tuple[float, float]]]:
    """Return (CPU, wall) milliseconds of each plan in every turn; the first turn, which may compile, is left out."""
    found: list[list[tuple[float, float]]] = [[] for _ in plans]
    for turn in range(turns + 1):
        for plan, times in zip(plans, found, strict=True):
            begin = time.process_time(), time.perf_counter()
            simulate(plan)
            spent, passed = time.process_time() - begin[0], time.perf_counter() - begin[1]
            if turn:
                times.append((spent * 1e3, passed * 1e3))
    return found


def page(turns: int) -> str:
    plans = [planned(*one) for one in PLANS]
    found = measured(plans, turns)
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    state = "idle but for this" if load < IDLE_BELOW else "not idle"
    lines = [
        "# How long simulating takes",
        "",
        f"**Measured** on {date.today()} by `make simulator-speed` ({platform.machine()}, {turns} turns): "
        "milliseconds of",
        "`simulate(plan)`, one layer forward and backward, 32K tokens a rank of `libra256k`, 32 / 8 heads of 128, H100 "
        "nodes of 8.",
        "The plan is there and loops are compiled. Simulating is one thread: where the clock shows more than the "
        "processor spent,",
        f"the machine had other work. It was {state}: a load of {load:.1f} on {cores} cores over the last minute of "
        "it.",
        "",
        "| strategy | ranks | documents | regions | processor ms, least | clock ms, median |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for (strategy, ranks), plan, times in zip(PLANS, plans, found, strict=True):
        regions = len(plan.placement.regions[0])
        cells = (strategy, ranks, plan.batch.documents, f"{regions:,}")
        lines.append(
            f"| {' | '.join(map(str, cells))} | {min(times)[0]:.1f} | {statistics.median(t for _, t in times):.1f} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, help="the page to write")
    parser.add_argument("--turns", type=int, default=TURNS)
    arguments = parser.parse_args()
    text = page(arguments.turns)
    print(text)
    if arguments.write:
        arguments.write.write_text(text)

"""hypergraph and blocks, measured: bytes, balance and seconds.
``make hypergraph`` writes docs/results/planning-hypergraph.md.

The cases are the two batches of 131,072 tokens on which DCP's own planner was measured, four masks, 8 query / 2 KV
heads of 128, one node of 8 and four nodes. Both strategies have tolerances of 0.05, so they solve the same problem, and
imbalances are shown beside bytes. Seconds are CPU time, medians of warm planner calls with schedule and hash, in one
process on one thread.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from rich.console import Console

import flexcp
from flexcp.arrays.totals import imbalance
from flexcp.plan.plan import Plan
from lib.progress import tracked
from planning import BATCHES, MASKS

TOLERANCE = 0.05
"""The tolerance that hypergraph needs for its 128 blocks."""
REPEATS = 3
CASES = [(mask, batch, nodes) for mask in MASKS for batch in BATCHES for nodes in (1, 4)]


@dataclass(frozen=True)
class Row:
    """One case under one strategy."""

    megabytes: float
    compute: float
    tokens: float
    seconds: float
    blocks: int
    """Token blocks of the hypergraph; 0 for blocks."""


def measured(strategy: str, mask: str, batch: str, nodes: int, repeats: int = REPEATS) -> Row:
    """Plan a case, check the plan and count."""
    planner = flexcp.Planner(
        *(8, 2, 128),
        cluster=flexcp.cluster("a100", nodes, 8),
        strategy=strategy,
        compute_tolerance=TOLERANCE,
        token_tolerance=TOLERANCE,
    )
    plan = planner(BATCHES[batch], MASKS[mask])
    plan.check()
    times = []
    for _ in range(repeats):
        begin = time.process_time()
        _ = planner(BATCHES[batch], MASKS[mask]).hash
        times.append(time.process_time() - begin)
    return Row(
        plan.bytes().sum() / 1e6,
        imbalance(plan.work()),
        imbalance(plan.placement.tokens),
        statistics.median(times),
        _token_blocks(plan),
    )


def _token_blocks(plan: Plan) -> int:
    words = plan.placement.note.split()
    return int(words[words.index("token") - 1]) if "token" in words else 0


def table(cases: list[tuple[str, str, int]], repeats: int = REPEATS) -> list[str]:
    """Return the lines of the table, and a sentence on what it shows."""
    lines = [
        "| mask | batch | ranks | blocks MB | hypergraph MB | ratio | compute | tokens | token blocks | blocks s | "
        "hypergraph s |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    ratios, seconds = [], []
    for mask, batch, nodes in tracked(cases, "hypergraph"):
        b, h = (measured(strategy, mask, batch, nodes, repeats) for strategy in ("blocks", "hypergraph"))
        ratios.append(h.megabytes / b.megabytes)
        seconds.append(h.seconds)
        lines.append(
            f"| {mask} | {batch} | {nodes}x8 | {b.megabytes:.1f} | {h.megabytes:.1f} | {ratios[-1]:.3f} "
            f"| {b.compute:.3f} / {h.compute:.3f} | {b.tokens:.3f} / {h.tokens:.3f} | {h.blocks} | {b.seconds:.3f} | "
            f"{h.seconds:.2f} |"
        )
    worst = (
        f"at most {max(ratios):.3f} of blocks' bytes, {statistics.geometric_mean(ratios):.3f} in the (geometric) mean"
    )
    return [
        *lines,
        "",
        f"hypergraph moves {worst}; it takes {max(seconds):.2f} CPU seconds at most.",
    ]


def main() -> None:
    """Make the table and write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path)
    asked = parser.parse_args()
    lines = [
        "# hypergraph beside blocks",
        "",
        f"**Measured**, by `make hypergraph` on {date.today().isoformat()} ({platform.machine()}, one process); CPU "
        "seconds, first calls excluded.",
        "",
        "DCP's two batches of 131,072 tokens, 8 / 2 heads of 128; forward MB of one layer, both tolerances 0.05; "
        "imbalances are max / mean of blocks / hypergraph.",
        "",
        *table(CASES),
        "",
    ]
    text = "\n".join(lines)
    Console().print(text, markup=False)
    if asked.write:
        asked.write.write_text(text)


if __name__ == "__main__":
    main()

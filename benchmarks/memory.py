"""The memory that attention needs on a rank under each strategy, computed from plans.
``make memory`` writes docs/results/memory.md.

Shown is the rank with the largest arena, one layer, 131,072 tokens on 2 nodes of 4 H100, 32 heads and 8 KV heads of 128
in bfloat16, causal.
"""

from __future__ import annotations

import argparse
from datetime import date
from pathlib import Path

import flexcp
from flexcp.data.lengths import parse_lengths

CASES = [(name, 0) for name in ("ring", "zigzag", "allgather", "ulysses", "usp", "blocks", "groups")]
CASES += [("blocks", 1 << 40), ("groups", 1 << 40)]
BATCHES = {"one document": [131_072], "`web:131072:0`": parse_lengths("web:131072:0")}


def page() -> str:
    """Return the page."""
    lines = [
        "# Memory of attention, by strategy",
        "",
        f"**Computed from plans**, by `make memory` on {date.today().isoformat()}; a test compares such numbers with "
        "real allocations (tests/executor/exchange/test_arena.py). "
        "MB of the rank with the largest arena, one layer; 131,072 tokens on 2 nodes of 4 H100, 32 heads "
        "and 8 KV heads of 128 in bfloat16, causal. The last column is what all ranks together send in the backward.",
        "",
        "| batch | strategy | arena forward | arena backward | saved | kept keys | results | all ranks send backward |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for batch, lengths in BATCHES.items():
        for strategy, keep in CASES:
            where = flexcp.cluster("h100", 2, 4)
            plan = flexcp.Planner(32, 8, 128, cluster=where, strategy=strategy, keep_kv=keep)(lengths)
            memory = max((plan.memory(rank) for rank in range(plan.ranks)), key=lambda m: m.arena)
            parts = (memory.forward, memory.backward, memory.saved, memory.kept_keys, memory.results)
            numbers = " | ".join(f"{size / 1e6:,.0f}" for size in (*parts, int(plan.bytes(backward=True).sum())))
            lines.append(f"| {batch} | {strategy}{', keys kept' if keep else ''} | {numbers} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Print the page and write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path)
    asked = parser.parse_args()
    text = page()
    print(text)
    if asked.write:
        asked.write.write_text(text)


if __name__ == "__main__":
    main()

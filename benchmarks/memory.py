"""What attention needs of a rank's memory under each strategy, from the plan alone: the table of docs/memory.md.

    python benchmarks/memory.py

The rank with the largest arena, one layer, 131,072 tokens on 2 nodes of 4 H100, 32 heads and 8 KV heads of 128 in bfloat16, causal.
"""

from __future__ import annotations

import flexcp
from flexcp.data.lengths import parse_lengths

CASES = [(name, 0) for name in ("ring", "zigzag", "allgather", "ulysses", "usp", "blocks", "groups")]
CASES += [("blocks", 1 << 40), ("groups", 1 << 40)]
BATCHES = {"one document": [131_072], "`web:131072:0`": parse_lengths("web:131072:0")}


def main() -> None:
    print(
        "| batch | strategy | arena forward | arena backward | saved | kept keys | results | all ranks send backward |"
    )
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for batch, lengths in BATCHES.items():
        for strategy, keep in CASES:
            where = flexcp.cluster("h100", 2, 4)
            plan = flexcp.Planner(32, 8, 128, cluster=where, strategy=strategy, keep_kv=keep)(lengths)
            memory = max((plan.memory(rank) for rank in range(plan.ranks)), key=lambda m: m.arena)
            parts = (memory.forward, memory.backward, memory.saved, memory.kept_keys, memory.results)
            numbers = " | ".join(f"{size / 1e6:,.0f}" for size in (*parts, int(plan.bytes(backward=True).sum())))
            print(f"| {batch} | {strategy}{', keys kept' if keep else ''} | {numbers} |")


if __name__ == "__main__":
    main()

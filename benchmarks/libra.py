"""Libra's lengths, simulated.

Repeats: documents up to 256K and 1M tokens, end to end against Ulysses; published 1.79 and 2.54 times.

Differs: its model, cluster and batch are not known to us: llama3-8b on 8 nodes of 8 H100, 32K tokens a rank, FSDP. Ulysses is over the 8
ranks of a node, the largest degree its 8 KV heads allow without copies, data parallel outside.
"""

from __future__ import annotations

from flexcp.clusters import cluster
from flexcp.data.lengths import draw_lengths
from flexcp.models.find import find_model
from simulated import mean, row_of, step_of, table

PUBLISHED = {"libra256k": 1.79, "libra1m": 2.54}


def lengths_table(seeds: int = 3, nodes: int = 8, tokens: int = 32_768) -> list[str]:
    """Step time of Ulysses, the best static method and ours."""
    rows = []
    for name, published in PUBLISHED.items():
        where = step_of(find_model("llama3-8b"), cluster("h100", nodes, 8))
        cells = []
        for seed in range(seeds):
            found = where.compare(
                draw_lengths(name, tokens * nodes * 8, seed), ["ulysses:8", "usp", "zigzag", "blocks", "groups", "auto"]
            )
            static = found.best_static
            assert static is not None
            cells.append(
                [row_of(found, "ulysses").ns, static.ns, *(row_of(found, n).ns for n in ("blocks", "groups", "auto"))]
            )
        ulysses, best, blocks, groups, auto = (mean(column) for column in zip(*cells, strict=True))
        texts = [f"{x / 1e6:.0f}" for x in (ulysses, best, blocks, groups, auto)]
        rows.append([name, *texts, f"{ulysses / auto:.2f}", f"{published:.2f}", f"{best / auto:.2f}"])
    heads = ["lengths", "ulysses:8 ms", "best static", "blocks", "groups", "auto"]
    heads += ["ulysses / auto", "Libra over Ulysses, published", "best static / auto"]
    return table(heads, rows)


if __name__ == "__main__":
    print("\n".join(lengths_table()))

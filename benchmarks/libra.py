"""Libra's lengths, simulated.

Repeats: documents up to 256K and 1M tokens, end to end against Ulysses; published 1.79 and 2.54 times.

Differs: its model, cluster and batch are not known to us: llama3-8b on 8 nodes of 8 H100, 32K tokens a rank, FSDP. Ulysses is over the 8
ranks of a node, the largest degree its 8 KV heads allow without copies, data parallel outside.

The *bound* is Ulysses over a step that no plan is faster than: attention at the floor of its bounds (perfectly divided compute, or bytes
that must move) and all other layers divided evenly, with nothing exchanged and no gradients synchronised. Where it is below the published
ratio, no placement reaches that ratio in this setting.
"""

from __future__ import annotations

from flexcp.clusters import cluster
from flexcp.data.lengths import draw_lengths
from flexcp.models.find import find_model
from flexcp.simulator.training import Simulation
from simulated import mean, row_of, step_of, table

PUBLISHED = {"libra256k": 1.79, "libra1m": 2.54}
OTHER_LAYERS = 2
"""Their place among the parts of a step's time on a rank."""


def floor_ns(simulation: Simulation) -> float:
    """A step that no plan of the same batch is faster than."""
    assert simulation.step is not None
    attention = sum(simulation.bounds(way).floor for way in (False, True))
    return attention + float(simulation.step.ranks[OTHER_LAYERS].mean())


def lengths_table(seeds: int = 3, nodes: int = 8, tokens: int = 32_768) -> list[str]:
    """Step time of Ulysses, static methods and ours, and the bound."""
    rows = []
    for name, published in PUBLISHED.items():
        where = step_of(find_model("llama3-8b"), cluster("h100", nodes, 8))
        cells, methods = [], ["ulysses:8", "usp", "zigzag", "blocks", "groups", "auto"]
        for seed in range(seeds):
            found = where.compare(draw_lengths(name, tokens * nodes * 8, seed), methods)
            static, auto = found.best_static, row_of(found, "auto")
            assert static is not None and auto.simulation is not None
            times = [row_of(found, each).ns for each in ("blocks", "groups", "auto")]
            cells.append([row_of(found, "ulysses").ns, static.ns, *times, floor_ns(auto.simulation)])
        ulysses, best, blocks, groups, auto_ns, floor = (mean(column) for column in zip(*cells, strict=True))
        texts = [f"{x / 1e6:.0f}" for x in (ulysses, best, blocks, groups, auto_ns, floor)]
        ratios = [ulysses / auto_ns, ulysses / floor, published, best / auto_ns]
        rows.append([name, *texts, *(f"{ratio:.2f}" for ratio in ratios)])
    heads = [
        "lengths",
        "ulysses:8 ms",
        "best static of each batch",
        "blocks",
        "groups",
        "auto",
        "no plan is faster than",
    ]
    heads += ["ulysses / auto", "ulysses / that bound", "Libra over Ulysses, published", "best static / auto"]
    return table(heads, rows)


if __name__ == "__main__":
    print("\n".join(lengths_table()))

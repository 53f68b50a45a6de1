"""Libra's lengths, simulated.

Same as published: documents up to 256K and 1M tokens, end to end against Ulysses; published speed-ups are 1.79 and
2.54.

Different: its model, cluster and batch are not known to us; here llama3-8b on 8 nodes of 8 H100, 32K tokens a rank,
FSDP. Ulysses runs over the 8 ranks of a node, the largest degree its 8 KV heads allow without copies, with data
parallelism outside.

The *bound* is Ulysses over a lower bound for the step: attention at the floor of its bounds (perfectly divided compute,
or bytes that must move) and the rest of each layer divided evenly, with nothing exchanged and no gradients
synchronised. If it is below the published ratio, no placement reaches that ratio in this setting.
"""

from __future__ import annotations

from flexcp.clusters import cluster
from flexcp.data.lengths import draw_lengths
from flexcp.models.find import find_model
from flexcp.simulator.training import LINEAR, Simulation
from papers_runs import Runs, step_ns
from simulated import mean, step_of, table

PUBLISHED = {"libra256k": 1.79, "libra1m": 2.54}
ULYSSES = "ulysses:8"


def floor_ns(simulation: Simulation) -> float:
    """Return a lower bound for a step with the same batch."""
    assert simulation.step is not None
    attention = sum(simulation.bounds(way).floor for way in (False, True))
    return attention + float(simulation.step.ranks[LINEAR].mean())


def lengths_table(seeds: int = 3, nodes: int = 8, tokens: int = 32_768) -> list[str]:
    """Return a table of the step times of Ulysses and of ours, the bound, and ``auto`` over both static baselines."""
    rows, runs = [], Runs()
    where = step_of(find_model("llama3-8b"), cluster("h100", nodes, 8))
    for name, published in PUBLISHED.items():
        batches = [draw_lengths(name, tokens * nodes * 8, seed) for seed in range(seeds)]
        times = [
            runs.least(where, batches, [each], step_ns)[1] / seeds for each in (ULYSSES, "blocks", "groups", "auto")
        ]
        floor = mean(floor_ns(runs.run(where, lengths, "auto")) for lengths in batches)
        static = runs.over_static(where, batches, "auto", step_ns)
        texts = [f"{x / 1e6:.0f}" for x in (*times, floor)]
        ratios = [times[0] / times[-1], times[0] / floor, published, *static]
        rows.append([name, *texts, *(f"{ratio:.2f}" for ratio in ratios)])
    heads = ["lengths", f"{ULYSSES} ms", "blocks", "groups", "auto", "no plan is faster than", "ulysses / auto"]
    heads += [
        "ulysses / that bound",
        "Libra over Ulysses, published",
        "auto over static of each batch",
        "over one fixed",
    ]
    return table(heads, rows)


if __name__ == "__main__":
    print("\n".join(lengths_table()))

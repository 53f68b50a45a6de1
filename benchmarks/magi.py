"""MagiAttention's weak scaling, simulated.

Repeats: web documents cut at a quarter of the pack, causal, 8,192 tokens a GPU, 8 to 64 H100, 64 query and 8 KV
heads of 128; published 459 -> 239 TFLOP/s a GPU forward and 243-265 backward on 64.

Differs: MagiAttention's placement is ``minheap`` (its default dealing), its kernel is our cost model of an H100 (554 TFLOP/s beyond row
tiles where FFA reaches 546 on such lengths), its own group-cast is our exact point-to-point traffic. Packs are ours.
"""

from __future__ import annotations

from flexcp.clusters import cluster
from flexcp.data.lengths import draw_lengths
from flexcp.shape import Shape
from simulated import Experiment, mean, off, simulations, table

SHAPE = Shape(64, 8, 128, 128)
NODES = (1, 2, 4, 8)
PUBLISHED = {8: 459.0, 64: 239.0}
NAMES = ("minheap", "auto", "blocks")


def weak_scaling(seeds: int = 5, nodes: tuple[int, ...] = NODES, tokens: int = 8192) -> list[str]:
    """TFLOP/s a GPU of its dealing and of ours."""
    rows = []
    for count in nodes:
        ranks = 8 * count
        where = Experiment(cluster("h100", count, 8), SHAPE)
        cells = []
        for seed in range(seeds):
            found = simulations(where.compare(draw_lengths("web", tokens * ranks, seed), NAMES), NAMES)
            cells.append({(n, way): found[n].tflops(way) for n in NAMES for way in (False, True)})
        values = {key: mean(cell[key] for cell in cells) for key in cells[0]}
        known = PUBLISHED.get(ranks)
        texts = [f"{values[n, way]:.0f}" for way in (False, True) for n in NAMES]
        beside = f"{known:.0f} ({off(values['minheap', False], known)})" if known else ""
        rows.append(
            [str(ranks), texts[0], beside, *texts[1:], f"{values['auto', False] / values['minheap', False]:.2f}"]
        )
    heads = ["GPUs", "minheap forward", "published", "auto forward", "blocks forward"]
    heads += ["minheap backward", "auto backward", "blocks backward", "auto / minheap, forward"]
    return table(heads, rows)


if __name__ == "__main__":
    print("\n".join(weak_scaling()))

"""MagiAttention's weak scaling, simulated.

Same as published: web documents cut at a quarter of the pack, causal, 8,192 tokens a GPU, 8 to 64 H100, 64 query and 8
KV heads of 128; published are 459 -> 238 TFLOP/s a GPU forward.

Different: MagiAttention's placement is ``minheap`` (its default dealing), its kernel is our cost model of an H100 (554
TFLOP/s without row tiles, where FFA reaches 546 on such lengths), and its group-cast is our exact point-to-point
traffic. Packs are ours. ``published.py`` uses its native collectives (``minheap:2048,relay``), its kernel's measured
rate and measured links.

No speed-up over MagiAttention is stated anywhere until its dealing simulates within 10 % of its published rates at 16,
32 and 64 GPUs.
"""

from __future__ import annotations

from flexcp.clusters import cluster
from flexcp.data.lengths import draw_lengths
from flexcp.shape import Shape
from simulated import Experiment, mean, off, simulations, table

SHAPE = Shape(64, 8, 128, 128)
NODES = (1, 2, 4, 8)
PUBLISHED = {8: 459.0, 16: 427.0, 32: 315.0, 64: 238.0}
NAME = "minheap"


def weak_scaling(seeds: int = 5, nodes: tuple[int, ...] = NODES, tokens: int = 8192) -> list[str]:
    """Return a table of TFLOP/s a GPU with its dealing, beside the published forward."""
    rows = []
    for count in nodes:
        ranks = 8 * count
        where = Experiment(cluster("h100", count, 8), SHAPE)
        cells = []
        for seed in range(seeds):
            found = simulations(where.compare(draw_lengths("web", tokens * ranks, seed), [NAME]), [NAME])[NAME]
            cells.append([found.tflops(way) for way in (False, True)])
        forward, backward = (mean(column) for column in zip(*cells, strict=True))
        known = PUBLISHED[ranks]
        rows.append([str(ranks), f"{forward:.0f}", f"{known:.0f} ({off(forward, known)})", f"{backward:.0f}"])
    return table(["GPUs", "minheap forward", "published", "minheap backward"], rows)


if __name__ == "__main__":
    print("\n".join(weak_scaling()))

"""The ring and the ablation of block-level FCP, simulated, and its setting;
``papers_fcp.py`` has its figures with `fcp` and ``auto``.

Same as published: 64 query and 8 KV heads of 128, causal, 32K tokens a GPU, 16 to 256 GPUs; lengths lognormal (mean
16K), bimodal (16K and 64K) and equal; efficiency relative to one GPU; the ablation at 128 GPUs.

Different: the preset ``h20`` (8 a node, 25 GB/s a rank across) and the analytic cost model. The length of "equal"
documents is not published, so several are shown. In the ablation their placement (blocks of 4K dealt by area, equal
tokens) is ``minheap:4096``; pipelining is the overlap of stages; rounds and coalescing are this simulator's. Their last
step, the reshuffle, changes the layout outside attention and is left out. *Efficiency* is useful FLOPs over those of
the same kernels on one rank that has all of its documents whole.
"""

from __future__ import annotations

from flexcp.clusters import Cluster, cluster
from flexcp.cost import CostModel
from flexcp.data.lengths import draw_lengths
from flexcp.shape import Shape
from flexcp.simulator.passes import Rules
from flexcp.simulator.training import Simulation
from simulated import Experiment, off, simulations, table

SHAPE = Shape(64, 8, 128, 128)
COST = CostModel("h20", forward_efficiency=800, backward_efficiency=720)
"""An H20 has a low peak and reaches most of it: their MFU of 0.75 at an efficiency of 93 % means a kernel at 0.80."""
A_GPU = 32_768
COUNTS = (16, 32, 64, 128, 256)
RING = {16: 0.696, 256: 0.273}
ABLATION = (
    ("no pipeline, no rounds", 0.29, Rules(in_line=True, ahead=0)),
    ("pipeline", 0.48, Rules(in_line=True)),
    ("rounds, posted one by one", 0.62, Rules(rounds_per_call=1)),
    ("rounds, 16 together", 0.70, Rules(rounds_per_call=16)),
)


def machine(ranks: int) -> Cluster:
    """Return H20-like nodes of 8."""
    return cluster("h20", ranks // 8, 8)


def efficiency(s: Simulation, backward: bool | None = None) -> float:
    """Return the time of the batch on one such rank / (ranks x time); both include row tiles."""
    ways = (False, True) if backward is None else (backward,)
    return sum(s.bounds(way).compute for way in ways) / sum(s.pass_ns(way) for way in ways)


def ring_absolutes(counts: tuple[int, ...] = COUNTS) -> list[str]:
    """Return a table of a zig-zag ring over all ranks with equal lengths, beside the published efficiency."""
    rows = []
    for length in (32_768, 65_536, 131_072):
        texts = []
        for ranks in counts:
            where = Experiment(machine(ranks), SHAPE, COST)
            name = f"zigzag:{ranks}"
            found = simulations(where.compare([length] * (A_GPU * ranks // length), [name]), [name])
            value = efficiency(found[name])
            beside = f" (published {RING[ranks]:.1%}, {off(value, RING[ranks])})" if ranks in RING else ""
            texts.append(f"{value:.1%}{beside}")
        rows.append([f"{length:,}", *texts])
    return table(["documents of", *(f"{n} GPUs" for n in counts)], rows)


def ablation() -> list[str]:
    """Return a table of the forward MFU at 128 GPUs, with one rule added after the other."""
    rows = []
    for name in ("lognormal16k", "bimodal"):
        lengths = draw_lengths(name, 128 * A_GPU, 0)
        for words, published, rules in ABLATION:
            where = Experiment(machine(128), SHAPE, COST, rules)
            found = simulations(where.compare(lengths, ["minheap:4096"]), ["minheap:4096"])
            value = found["minheap:4096"].mfu(False)
            rows.append([name, words, f"{value:.2f}", f"{published:.2f}", off(value, published)])
    return table(["lengths", "rules", "MFU simulated", "published", "off by"], rows)


def sample() -> float:
    """Return one cell, for CI: efficiency of auto on 16 ranks with short batches."""
    where = Experiment(machine(16), SHAPE, COST)
    found = simulations(where.compare(draw_lengths("bimodal", 16 * 8192, 0), ["auto"]), ["auto"])
    return efficiency(found["auto"])


if __name__ == "__main__":
    print("\n".join([*ring_absolutes(), *ablation()]))

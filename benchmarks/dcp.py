"""DCP's static methods, simulated, with its setting and published numbers; ``papers_dcp.py`` has its figures.

Same as published: attention of one layer on 4 nodes x 8 A100, 4 x 100 Gb/s a node, 131,072 tokens, 8 query and 2 KV
heads of 128, lengths of LongAlign and LongDataCollections scaled by 0.5, 1, 2, 4.

Different: lengths are drawn from our own ``longalign`` and ``longtail`` (theirs are not published as numbers), so the
batches are others. Links, latencies and kernel efficiency are those of the a100 preset and the analytic cost model; two
ranks share a network card. Its static baselines are ring, zig-zag, LoongTrain and TransformerEngine: here ``ring``,
``zigzag``, ``usp:2,16`` (heads split by two, as LoongTrain could with two KV heads) and ``allgather``;
TransformerEngine's ring is ``zigzag``. The artifact runs them in groups (data parallelism outside), as many as the
largest power of two not above 131,072
longest document of the data set, but its files do not state that length; here they run over all 32 ranks. End to end,
tensor parallelism 4 is represented by a rank four times as fast, without its own collectives.
"""

from __future__ import annotations

from dataclasses import replace

import flexcp
from flexcp.clusters import cluster
from flexcp.data.lengths import draw_lengths
from flexcp.shape import Shape
from flexcp.simulator.passes import Rules
from flexcp.simulator.training import Simulation
from simulated import Experiment, mean, off, scaled_lengths, simulations, table

TOKENS = 131_072
SCALES = (0.5, 1.0, 2.0, 4.0)
SHARED = Rules(ranks_per_nic=2)
TENSOR_PARALLEL = 4
"""Number of GPUs that form one rank end to end."""
MICRO = Experiment(cluster("a100", 4, 8), Shape(8, 2, 128, 128), rules=SHARED)
THEIR_STATIC = ("ring:32", "zigzag:32", "usp:2,16", "allgather:32")
PUBLISHED = {
    "longalign": ((11.8, 7.9), (10.1, 9.4), (9.6, 11.0), (9.2, 13.3)),
    "longtail": ((19.4, 8.0), (14.9, 7.0), (13.1, 8.5), (10.4, 8.9)),
}
"""Published forward milliseconds of the best static method and of DCP, by scale;
``longtail`` stands for LongDataCollections.
"""
MASKS = {
    "causal": flexcp.causal(),
    "lambda": flexcp.masks.lambda_(),
    "shared question": flexcp.masks.shared_question(),
    "causal blockwise": flexcp.masks.causal_blockwise(),
}
CAPS = (16_384, 32_768, 65_536, 131_072)
MEGATRON = {
    "causal": ((1.32, 1.30), (1.44, 1.39), (1.86, 1.96), (2.79, 2.83)),
    "lambda": ((1.37, 1.24), (1.50, 1.23), (1.87, 1.42), (2.80, 1.92)),
}
"""Published iteration seconds of Megatron and DCP on LongAlign, by the longest sequence."""


def forward(s: Simulation) -> int:
    return s.pass_ns(False)


def absolutes(seeds: int = 3) -> list[str]:
    """Return a table of the static methods' milliseconds beside the published best of them."""
    rows = []
    for name, published in PUBLISHED.items():
        for scale, (static, _) in zip(SCALES, published, strict=True):
            ms: dict[str, list[float]] = {each: [] for each in THEIR_STATIC}
            for seed in range(seeds):
                batch = scaled_lengths(name, TOKENS, scale, seed)
                found = simulations(MICRO.compare(batch, THEIR_STATIC), THEIR_STATIC)
                for each in THEIR_STATIC:
                    ms[each].append(forward(found[each]) / 1e6)
            means = [mean(ms[each]) for each in THEIR_STATIC]
            least = min(means)
            texts = [f"{x:.1f}" for x in (*means, least, static)]
            rows.append([name, f"{scale:g}", *texts, off(least, static)])
    heads = ["lengths", "scale", "ring", "zig-zag", "LoongTrain-like", "all-gather"]
    return table([*heads, "best simulated", "best published", "off by"], rows)


def sample() -> float:
    """Return one cell, for CI: auto over their static method, forward."""
    lengths = draw_lengths("longtail", 16_384, 0)
    small = replace(MICRO, cluster=cluster("a100", 2, 4))
    ran = simulations(small.compare(lengths, ("auto", "zigzag:8")), ("auto", "zigzag:8"))
    return forward(ran["zigzag:8"]) / forward(ran["auto"])


if __name__ == "__main__":
    print("\n".join(absolutes()))

"""Clusters: nodes x ranks per node, how fast a rank computes and what its links carry.

Speeds are integers (GFLOP/s, MB/s, nanoseconds), because planners compare costs exactly. Ranks are numbered node by node.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Cluster:
    """A machine to plan for.

    ``gflops`` is a rank's dense bf16 peak; ``intra_mbps`` and ``inter_mbps`` are megabytes per second one rank can send (and at
    the same time receive) inside its node and across nodes; ``latency_ns`` is the start-up cost of one transfer.
    """

    name: str
    nodes: int
    ranks_per_node: int
    gflops: int
    intra_mbps: int
    inter_mbps: int
    latency_ns: int

    def __post_init__(self) -> None:
        for field in ("nodes", "ranks_per_node"):
            value = getattr(self, field)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"a cluster needs {field} of at least 1; got {value!r}")

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    def node_of(self, rank: int) -> int:
        """The node a rank runs on."""
        return rank // self.ranks_per_node

    def __str__(self) -> str:
        return f"{self.name}:{self.nodes}x{self.ranks_per_node}"


# name: (bf16 TFLOP/s dense, GB/s inside the node, GB/s a rank across nodes, microseconds per transfer)
_PRESETS: dict[str, tuple[float, float, float, float]] = {
    "a100": (312, 300, 6.25, 10),  # NVIDIA A100 data sheet; DCP's setting: 4 x 100 Gb/s shared by the 8 of a node
    "h100": (989, 450, 50, 10),  # NVIDIA H100 SXM data sheet; 400 Gb/s a GPU
    "h200": (989, 450, 50, 10),  # NVIDIA H200 data sheet; 400 Gb/s a GPU
    "cpu": (0.03, 1, 1, 50),  # one core and loopback sockets, the order of magnitude of a laptop
}


def cluster(name: str = "h100", nodes: int = 1, ranks_per_node: int = 8) -> Cluster:
    """A named cluster of the given shape, for example ``cluster("h100", nodes=4, ranks_per_node=8)``."""
    if name not in _PRESETS:
        close = difflib.get_close_matches(name, _PRESETS, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ValueError(f"unknown cluster {name!r}: {hint}known presets are {', '.join(_PRESETS)}")
    tflops, intra, inter, latency = _PRESETS[name]
    return Cluster(
        name, nodes, ranks_per_node, int(tflops * 1000), int(intra * 1000), int(inter * 1000), int(latency * 1000)
    )


def parse_cluster(text: str) -> Cluster:
    """``h100:4x8`` is 4 nodes of 8 ranks with the preset's speeds; ``h100`` alone is one node of 8."""
    name, _, shape = text.partition(":")
    base = cluster(name)
    if not shape:
        return base
    match = re.fullmatch(r"(\d+)x(\d+)", shape)
    if not match:
        raise ValueError(f"cluster {text!r}: after the colon comes NODESxRANKS, as in h100:4x8")
    return replace(base, nodes=int(match[1]), ranks_per_node=int(match[2]))

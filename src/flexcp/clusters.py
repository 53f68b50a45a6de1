"""Clusters: the nodes and ranks to plan for, how fast each rank computes and the bandwidth of its links.

Speeds are integers (GFLOP/s, MB/s, nanoseconds, per mille), because planners compare costs exactly. Ranks are numbered
node by node. Identical devices are not equally fast (Libra saw 7 % on the same input), so a rank may have a speed
factor of its own. A user writes factors as fractions of the preset's speed, ``speeds=[1.0, 0.93, ...]``; a
:class:`Cluster` stores them in per mille.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real

NOMINAL_SPEED = 1000
"""The speed of a rank that computes as fast as its preset, in per mille."""
FASTEST = 1000 * NOMINAL_SPEED
"""The highest speed of a rank; with any speed, products of speeds and work would not fit 64 bits."""


@dataclass(frozen=True)
class Cluster:
    """Nodes and ranks to plan for, and their speeds.

    ``gflops`` is a rank's dense bf16 peak; ``intra_mbps`` and ``inter_mbps`` are megabytes per second one rank can send
    (and at the same time receive) inside its node and across nodes; ``latency_ns`` is the start-up cost of one
    transfer. ``speeds`` is each rank's compute speed in per mille of ``gflops``, empty when all are nominal. Wrong
    values raise ValueError.
    """

    name: str
    nodes: int
    ranks_per_node: int
    gflops: int
    intra_mbps: int
    inter_mbps: int
    latency_ns: int
    speeds: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for field, least in (
            ("nodes", 1),
            ("ranks_per_node", 1),
            ("gflops", 1),
            ("intra_mbps", 1),
            ("inter_mbps", 1),
            ("latency_ns", 0),
        ):
            value = getattr(self, field)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(
                    f"a cluster needs {field} of at least {least}; got {value!r} ({self.nodes} nodes of "
                    f"{self.ranks_per_node} ranks)"
                )
        if self.speeds and len(self.speeds) != self.ranks:
            raise ValueError(
                f"{len(self.speeds)} speed factors for {self.nodes} nodes x {self.ranks_per_node} ranks = {self.ranks} "
                "ranks; give one per rank, or none"
            )
        for rank, speed in enumerate(self.speeds):
            if not isinstance(speed, int) or not 1 <= speed <= FASTEST:
                raise ValueError(
                    f"rank {rank} has speed {speed!r}; it is a whole number of per mille from 1 to {FASTEST:,}"
                )

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def rank_speeds(self) -> tuple[int, ...]:
        """The compute speed of every rank, in per mille of ``gflops``."""
        return self.speeds or (NOMINAL_SPEED,) * self.ranks

    @property
    def memory_mbps(self) -> int:
        """Memory bandwidth of a rank in megabytes per second.

        It is the bandwidth of the preset with the cluster's ``name``. A cluster with another name is given the
        bandwidth per FLOP of an H100, but at least that of a CPU rank. This is no field of the cluster because only the
        simulator uses it, for copies.
        """
        preset = _PRESETS.get(self.name)
        if preset is None:
            preset = _PRESETS["h100"]
            return max(round(_PRESETS["cpu"].memory * 1000), round(self.gflops * preset.memory / preset.tflops))
        return round(preset.memory * 1000)

    @property
    def writes_results_once(self) -> bool:
        """Whether attention on such a rank writes each complete row of its output once, in the model's dtype.

        The fast kernel on Hopper does (:mod:`flexcp.executor.run.finished_rows`); with other kernels outputs are
        accumulated in memory that is cleared before, and rounded at the end. False if not a preset. Only the simulator
        uses this, for copies.
        """
        return self.name in _PRESETS and _PRESETS[self.name].hopper

    @property
    def node_spans_hosts(self) -> bool:
        """Whether a node consists of several hosts joined by fast links, as in a GB200 rack; False if not a preset."""
        return self.name in _PRESETS and _PRESETS[self.name].spans_hosts

    def node_of(self, rank: int) -> int:
        """Return the node of a rank."""
        return rank // self.ranks_per_node

    def __str__(self) -> str:
        return f"{self.name}:{self.nodes}x{self.ranks_per_node}"


@dataclass(frozen=True)
class _Preset:
    """The speeds of one rank, and the usual size of a node.

    ``tflops`` is dense bf16 TFLOP/s, ``intra`` and ``inter`` are GB/s in one direction inside a node and across nodes,
    ``latency`` is microseconds per transfer, ``memory`` is the memory bandwidth in GB/s. ``spans_hosts`` says that a
    node consists of several hosts, ``hopper`` that the fast kernel for NVIDIA's Hopper chips runs.
    """

    tflops: float
    intra: float
    inter: float
    latency: float
    memory: float
    ranks_per_node: int = 8
    spans_hosts: bool = False
    hopper: bool = False


# Latencies are our own estimate of a grouped point-to-point call, not a published figure.
_PRESETS: dict[str, _Preset] = {
    # NVIDIA A100 80GB SXM data sheet: 312 TFLOP/s, memory 2,039 GB/s, NVLink 600 GB/s both ways. The network is that of
    # the DCP paper: 4 x 100 Gb/s shared by the 8 GPUs of a node.
    "a100": _Preset(312, 300, 6.25, 10, 2039),
    # NVIDIA H100 SXM data sheet: 989 TFLOP/s, memory 3,350 GB/s, NVLink 900 GB/s both ways. DGX H100: one 400 Gb/s
    # ConnectX-7 a GPU.
    "h100": _Preset(989, 450, 50, 10, 3350, hopper=True),
    # NVIDIA H200 SXM data sheet: compute and links of an H100, memory 4,800 GB/s.
    "h200": _Preset(989, 450, 50, 10, 4800, hopper=True),
    # NVIDIA H20 data sheet: 148 TFLOP/s, memory 4,000 GB/s, NVLink 900 GB/s both ways. The network,
    # 200 Gb/s a GPU, is our assumption.
    "h20": _Preset(148, 450, 25, 10, 4000, hopper=True),
    # NVIDIA GB200 NVL72 data sheet: 180 PFLOP/s dense bf16, 576 TB/s of memory and 130 TB/s of NVLink (both ways) for
    # 72 GPUs; 400 Gb/s a GPU between racks. Here a node is one NVLink domain, of 18 hosts.
    "gb200": _Preset(2500, 900, 50, 10, 8000, ranks_per_node=72, spans_hosts=True),
    # Huawei's Ascend 910B as in the paper on flexible groups (there is no public data sheet): about 320 TFLOP/s fp16,
    # 1,600 GB/s of memory, seven HCCS links of 56 GB/s both ways inside the node of 8, one 200 Gb/s RoCE port each.
    "ascend910b": _Preset(320, 196, 25, 15, 1600),
    # One core of a laptop with its share of the memory bandwidth, linked by loopback sockets: orders of magnitude.
    "cpu": _Preset(0.03, 1, 1, 50, 5),
}


def cluster(
    name: str = "h100",
    nodes: int = 1,
    ranks_per_node: int | None = None,
    speeds: Sequence[float] | None = None,
) -> Cluster:
    """Return a preset cluster of the given shape, for example ``cluster("h100", nodes=4, ranks_per_node=8)``.

    ``cluster("h100:4x8")`` is short for the same. The name may be in upper or lower case. ``ranks_per_node`` is 8 by
    default, and 72 for ``gb200``, whose node is a rack. ``speeds`` is one factor per rank; 1.0 is the preset's speed.
    Raise ValueError for an unknown name or a wrong shape.
    """
    if not isinstance(name, str):
        raise ValueError(f"a cluster has a preset's name, one of {', '.join(_PRESETS)}; got {name!r}")
    name, colon, shape = name.strip().lower().partition(":")
    if colon:
        if nodes != 1 or ranks_per_node is not None:
            raise ValueError(f"cluster {name}:{shape} already gives the shape; drop nodes= and ranks_per_node=")
        match = re.fullmatch(r"(\d+)x(\d+)", shape)
        if not match:
            raise ValueError(f"cluster {name + colon + shape!r}: after the colon comes NODESxRANKS, as in h100:4x8")
        nodes, ranks_per_node = int(match[1]), int(match[2])
    if name not in _PRESETS:
        parts = re.fullmatch(r"(\w+)\W+(\d+x\d+)", name)  # a shape after anything but a colon
        shaped = [f"{parts[1]}:{parts[2]}"] if parts and parts[1] in _PRESETS else []
        close = shaped or difflib.get_close_matches(name, _PRESETS, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ValueError(f"unknown cluster {name!r}: {hint}known presets are {', '.join(_PRESETS)}")
    preset = _PRESETS[name]
    return Cluster(
        name,
        nodes,
        preset.ranks_per_node if ranks_per_node is None else ranks_per_node,
        gflops=round(preset.tflops * 1000),
        intra_mbps=round(preset.intra * 1000),
        inter_mbps=round(preset.inter * 1000),
        latency_ns=round(preset.latency * 1000),
        speeds=() if speeds is None else _per_mille(speeds),
    )


def _per_mille(speeds: Sequence[float]) -> tuple[int, ...]:
    """Convert speed factors to per mille; raise ValueError if one is not a number from 0.001 to 1,000."""
    if isinstance(speeds, Mapping) or not hasattr(speeds, "__len__"):
        raise ValueError(f"speeds= is one factor per rank, as in [1.0, 0.93]; got {speeds!r}")
    found: list[int] = []
    for rank, factor in enumerate(speeds):
        finite = isinstance(factor, Real) and math.isfinite(factor)
        if not finite or not 1 <= round(factor * NOMINAL_SPEED) <= FASTEST:
            raise ValueError(
                f"speed factor of rank {rank} is {factor!r}; it must be a number from 0.001 to 1,000, where 1.0 is the "
                "preset's speed"
            )
        found.append(round(factor * NOMINAL_SPEED))
    if not found:
        raise ValueError("speeds= is empty; give one factor per rank, or leave it out")
    return tuple(found)

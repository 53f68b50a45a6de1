"""Parameters of published settings: links and kernels as measured by others, each with its source.

A figure that ``published.py`` counts is never a source. Links have the speed that NCCL reaches between processes, so
their cost models lose nothing more to protocols. A kernel is a rate measured on one GPU; its efficiency is the one with
which the cost model, including row tiles, gives that rate on the same lengths. Backward rates are measured too, or
their ratio to the forward is taken from another measurement.

========================  ============================================================================================
rate                      source
========================  ============================================================================================
A100 NVLink, 230 GB/s     NVIDIA/nccl-tests issue 149, comment of a maintainer, for 8 A100
H100 NVLink, 370 GB/s     NVIDIA/nccl-tests issue 212, the same
H800 NVLink, 160 GB/s     deepseek-ai/DeepSeek-V3 issue 28: measured one way
400 Gb/s card, 47 GB/s    NVIDIA/nccl-tests issue 290: 46 to 48 GB/s a card
EC2 p4d node, 29.6 GB/s   NVIDIA/nccl issue 527: all_reduce of 1 GB over 4 instances (4 x 100 Gb/s a node),
                          bus bandwidth
100 Gb/s card, 9.4 GB/s   NVIDIA/nccl issue 495: 600 of 800 Gb/s between 2 nodes of 8 A100
across nodes, 31 us       NVIDIA/nccl-tests issue 214: sendrecv of up to 8 KB between 2 nodes
inside a node             the presets' own latency, an estimate
========================  ============================================================================================

Kernels: FlashAttention-2 on one H800 and one A100 are the columns "theoretic flash_attn" of ring-flash-attention's
README (one GPU, 8,192 tokens, without context parallelism). FlashAttention-3 and FFA on varlen lengths are
MagiAttention's kernel charts (H100, 32K tokens). FlashAttention-3 on an H20 is Dao-AILab/flash-attention issue 1310.
torchtitan's attention is FlashAttention-2 as measured on one H200 here; its linear layers have the efficiency that
follows from its table 2 without context parallelism (FSDP 8, CP 1), a row that is not counted.

The work of ring-flash-attention between its kernels is counted from its code, in ``published_merges.py``.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

import dcp
from flexcp.clusters import Cluster, cluster
from flexcp.cost import CostModel
from flexcp.data.lengths import draw_lengths
from flexcp.models.find import find_model
from flexcp.simulator.copies import copy_mbps
from flexcp.simulator.passes import Rules

ACROSS_NS = 31_000
FLOPS = 4  # a pair of one head and one number of its size, forward: two products of two operations
BACKWARD = 2.5


OTHERS = Rules(copies_messages_only=True)
"""Other systems copy q, k, v and outputs into and out of the buffers of their calls;
the other copies of our executor are its own.
"""


@dataclass(frozen=True)
class Machine:
    """A preset with measured links: MB/s of a rank inside its node and across,
    and how many ranks share a network card.
    """

    preset: str
    intra_mbps: int
    inter_mbps: int
    ranks_per_nic: int = 1
    ranks_in_one: int = 1
    """The number of GPUs that count as one rank: tensor parallelism, without its own collectives."""

    def cluster(self, name: str, nodes: int, ranks_per_node: int) -> Cluster:
        """Return a cluster of these nodes; across nodes a transfer starts later than inside one."""
        found = cluster(self.preset, nodes, ranks_per_node)
        latency = found.latency_ns if nodes == 1 else ACROSS_NS
        return replace(
            found,
            name=name,
            gflops=found.gflops * self.ranks_in_one,
            intra_mbps=self.intra_mbps,
            inter_mbps=self.inter_mbps * self.ranks_in_one,
            latency_ns=latency,
        )

    def rules(self) -> Rules:
        """Return the simulator's rules: shared network cards, and copies as fast as the preset's memory."""
        memory = copy_mbps(cluster(self.preset)) * self.ranks_in_one
        return replace(OTHERS, ranks_per_nic=self.ranks_per_nic, copy_mbps=memory)


P4D_NODE = 29_600
MACHINES = {
    "a100-nccl": Machine("a100", 230_000, P4D_NODE // 8),
    "h800": Machine("h100", 160_000, 47_000),
    "h100-nccl": Machine("h100", 370_000, 47_000),
    "p4de": Machine("a100", 230_000, P4D_NODE // 8, ranks_per_nic=dcp.SHARED.ranks_per_nic),
    "p4de-tp4": Machine("a100", 230_000, P4D_NODE // 8, ranks_in_one=dcp.TENSOR_PARALLEL),
    "a100-one-card": Machine("a100", 230_000, 9_400 // 4, ranks_per_nic=4),
}


@dataclass(frozen=True)
class Measured:
    """TFLOP/s of a kernel on one GPU, forward and backward, and the causal (or full) batches it ran on."""

    batches: Sequence[Sequence[int]]
    forward: float
    backward: float
    full: bool = False

    def efficiency(self, rate: float, gflops: int) -> float:
        """Return the share of the peak at which the cost model, including row tiles, takes as long."""
        paid = [self._area(b) + int(CostModel().row_tiles_work(np.array(b, np.int64)).sum()) for b in self.batches]
        return rate * 1000 / gflops * sum(paid) / sum(self._area(b) for b in self.batches)

    def _area(self, lengths: Sequence[int]) -> int:
        return sum(n * n if self.full else n * (n + 1) // 2 for n in lengths)


def _cost(name: str, preset: str, points: Sequence[Measured], linear: int | None = None) -> CostModel:
    """Return a cost model with the mean efficiency of the measurements."""
    gflops = cluster(preset).gflops
    found = [statistics.mean(p.efficiency(getattr(p, way), gflops) for p in points) for way in ("forward", "backward")]
    cost = CostModel(name, forward_efficiency=round(1000 * found[0]), backward_efficiency=round(1000 * found[1]))
    return cost if linear is None else replace(cost, linear_efficiency=linear)


# --- FlashAttention-2 by ring-flash-attention's README ----------------------------------------------------------------

ONE = ((8192,),)
PACKED = ((8192,), (256, 7392, 544), (4096, 4096), (3104, 3200, 1600, 160, 128))
"""The batches that the README's benchmark takes in turn."""


def _iterations(batches: Sequence[Sequence[int]], forward: float, both: float) -> Measured:
    """Return the rates of 32 heads of 128, from iterations a second of the forward alone and with the backward."""
    flops = FLOPS * 128 * 32 * statistics.mean(sum(n * (n + 1) // 2 for n in b) for b in batches)
    return Measured(batches, flops * forward / 1e12, BACKWARD * flops / (1 / both - 1 / forward) / 1e12)


# --- torchtitan -------------------------------------------------------------------------------------------------------

TORCHTITAN_FA2 = Measured(((65_536,),), 348.0, 320.0)
ALONE = (32_768, 3_890.0)
"""Tokens of a GPU, and its tokens a second without context parallelism."""


def _torchtitan() -> CostModel:
    """Return a cost model whose linear layers have the efficiency that follows from table 2's row without context
    parallelism: forward, again, and backward.
    """
    preset, machine = find_model("llama3-8b"), cluster("h100")
    cost = _cost("torchtitan-float8-h100", "h100", [TORCHTITAN_FA2])
    tokens, speed = ALONE
    pairs = (
        np.array([tokens * (tokens + 1) // 2 + int(cost.row_tiles_work(np.array([tokens]))[0])]) * preset.shape.heads
    )
    once, back = (int(cost.attention_ns(pairs, preset.shape, machine, way)[0]) for way in (False, True))
    left = tokens / speed * 1e9 - preset.model.layers * (2 * once + back)
    flops = (
        preset.model.layers * 4 * preset.model.linear_flops_per_token(preset.shape) + 3 * preset.head_flops_per_token
    )
    return replace(cost, linear_efficiency=round(1000 * tokens * flops / left / machine.gflops))


# --- lookup by name ---------------------------------------------------------------------------------------------------

WEB = tuple(tuple(draw_lengths("web", 32_768, seed)) for seed in range(5))
FA3_BACKWARD = 586 / 684
"""Backward over forward of FlashAttention-3 on an H100, causal, 32K, from MagiAttention's kernel charts;
the issue has no backward of an H20.
"""
H20 = (Measured(((2048,),), 107.8, 107.8 * FA3_BACKWARD), Measured(((2048,),), 126.2, 126.2 * FA3_BACKWARD, full=True))

KERNELS: dict[str, Callable[[], CostModel]] = {
    "fa2-h800": lambda: _cost("fa2-h800", "h100", [_iterations(ONE, 591.5, 154.7)]),
    "fa2-varlen-h800": lambda: _cost("fa2-varlen-h800", "h100", [_iterations(PACKED, 852.4, 225.4)]),
    "fa2-a100": lambda: _cost("fa2-a100", "a100", [_iterations(ONE, 373.4, 94.7)]),
    "fa2-varlen-a100": lambda: _cost("fa2-varlen-a100", "a100", [_iterations(PACKED, 532.3, 133.8)]),
    "ffa-h100": lambda: _cost("ffa-h100", "h100", [Measured(WEB, 546.0, 419.0)]),
    "fa3-varlen-h100": lambda: _cost("fa3-varlen-h100", "h100", [Measured(WEB, 584.0, 426.0)]),
    "fa3-h20": lambda: _cost("fa3-h20", "h20", H20),
    "torchtitan-float8-h100": _torchtitan,
}


def place(text: str, kernel: str | None) -> tuple[Cluster, Rules, CostModel]:
    """Return the cluster that a figure names, the simulator's rules for it, and the cost model of its kernel and links.

    A name that is not in ``MACHINES`` is that of a preset; without a kernel the cost model is the analytic one.
    """
    if kernel is not None and kernel not in KERNELS:
        raise ValueError(
            f"unknown kernel {kernel!r}; measured ones are {', '.join(KERNELS)}; "
            "leave it out for the analytic cost model"
        )
    cost = CostModel() if kernel is None else KERNELS[kernel]()
    name, _, shape = text.partition(":")
    if name not in MACHINES:
        try:
            return cluster(text), OTHERS, cost
        except ValueError as error:
            raise ValueError(f"{error}; measured machines are {', '.join(MACHINES)}") from None
    sizes = cluster(f"h100:{shape}") if shape else cluster(MACHINES[name].preset)
    machine = MACHINES[name]
    found = machine.cluster(name, sizes.nodes, sizes.ranks_per_node)
    return found, machine.rules(), replace(cost, link_efficiency=1000)


def show() -> list[str]:
    """Return the measured machines and kernels, one per line."""
    lines = []
    for name, machine in MACHINES.items():
        lines.append(
            f"{name}: {machine.intra_mbps / 1000:g} GB/s inside, {machine.inter_mbps / 1000:g} across, "
            f"{machine.ranks_per_nic} a card"
        )
    for name, make in KERNELS.items():
        cost = make()
        lines.append(
            f"{name}: {cost.forward_efficiency} / {cost.backward_efficiency} per mille, linear {cost.linear_efficiency}"
        )
    return lines


if __name__ == "__main__":
    print("\n".join(show()))

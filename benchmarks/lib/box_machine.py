"""The simulated machines of the box, and the predicted time of a step on them.

For each batch every rank is a device whose speed is chosen so that attention, perfectly divided, takes a given time
forward and backward. The speed of the network ports is chosen so that the *load* is a given number: the time that the
busiest port of the median strategy is busy, over the compute time of its slowest rank. Ports inside a node are
``INSIDE`` times as fast. Plans are made for the measured speed of the ports.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from flexcp.clusters import Cluster
from flexcp.compare.compare import ATTENTION_ONLY
from flexcp.cost import NO_CONTENTION, PEAK_PERMILLE, CostModel
from flexcp.masks import causal
from flexcp.plan.plan import Plan
from flexcp.planner import Planner
from flexcp.shape import Shape
from flexcp.simulator.passes import Rules
from flexcp.simulator.slot_work import slot_ns, slot_work
from flexcp.simulator.training import simulate
from lib.box_calibration import Host, Port, host_ns

SHAPE = Shape(4, 2, 64, 64, "float32")
INSIDE = 4
"""How much faster ports inside a node are than those across nodes. An H100 has 9 to 1,
but here the sockets of many ranks share two cores.
"""
LINK_EFFICIENCY = 10
"""Per mille. This small value lets the cluster's whole megabytes a second express speeds in steps of 0.01 MB/s."""
FLOPS = 7 * (SHAPE.head_dim + SHAPE.v_head_dim)
"""FLOPs of a pair and a query head, forward and backward."""
WAYS = (False, True)


@dataclass(frozen=True)
class Machine:
    """A cluster with its cost model, as planners see it, and the work of its hosts."""

    cluster: Cluster
    cost: CostModel
    host: Host

    @property
    def gflops(self) -> float:
        """GFLOP/s of a paced device in the dtype that is run."""
        return self.cluster.gflops * PEAK_PERMILLE[SHAPE.dtype] / 1000

    def plans(self, lengths: Sequence[int], strategies: Sequence[str]) -> dict[str, Plan]:
        """Return a plan for each strategy; strategies that move and compute the same share one entry."""
        names: dict[bytes, list[str]] = {}
        found: dict[bytes, Plan] = {}
        for strategy in strategies:
            sizes = (SHAPE.heads, SHAPE.kv_heads, SHAPE.head_dim)
            planner = Planner(*sizes, dtype=SHAPE.dtype, cluster=self.cluster, cost=self.cost, strategy=strategy)
            plan = planner(lengths, causal())
            key = _what_happens(plan)
            names.setdefault(key, []).append(strategy)
            found.setdefault(key, plan)
        return {" = ".join(names[key]): plan for key, plan in found.items()}

    def predicted_ms(self, plan: Plan) -> float:
        """Return the simulated milliseconds of attention, forward and backward."""
        # A copy is no paced kernel; the host's price of a piece includes starting it.
        copies = replace(self.cost, kernel_ns=0)
        rules = Rules(copy_mbps=self.host.copy_mbps)
        return simulate(plan, copies, rules, measured=partial(self._busy_ns, plan)).attention_ns / 1e6

    def _busy_ns(self, plan: Plan, mask: int, backward: bool) -> NDArray[np.int64]:
        paced = slot_ns(slot_work(plan, mask, backward), plan, self.cost, backward)
        return np.asarray(paced + host_ns(self.host, plan, backward))


def _what_happens(plan: Plan) -> bytes:
    """Return bytes that identify everything that a plan moves and computes."""
    columns = [plan.work().tobytes()]
    for program in plan.programs[0]:
        columns += [getattr(program.transfers, name).tobytes() for name in program.transfers.names()]
    return b"".join(columns)


def paced_machine(
    nodes: int, ranks: int, lengths: Sequence[int], seconds: float, ports: tuple[Port, Port], host: Host
) -> Machine:
    """Return a machine whose devices take ``seconds`` for a perfectly divided batch;
    ``ports`` are the measured ports (inside, across).
    """
    pairs = sum(n * (n + 1) // 2 for n in lengths)
    gflops = pairs * SHAPE.heads * FLOPS / (nodes * ranks) / seconds / 1e9
    inside, across = ports
    peak = max(1, round(gflops * 1000 / PEAK_PERMILLE[SHAPE.dtype]))
    inside_mbps, across_mbps = (max(1, round(port.mbps * 1000 / LINK_EFFICIENCY)) for port in (inside, across))
    cluster = Cluster("box", nodes, ranks, peak, inside_mbps, across_mbps, across.latency_ns)
    cost = CostModel(
        "box",
        1000,
        1000,
        1000,
        link_efficiency=LINK_EFFICIENCY,
        row_tile_pairs=0,
        kernel_ns=host.kernel_ns,
        message_ns=0,
        model=ATTENTION_ONLY,
        contention=NO_CONTENTION,
    )
    return Machine(cluster, cost, host)


def port_bytes(plan: Plan) -> float:
    """Return the bytes of the busiest network port, forward and backward.

    If a port inside a node is busy for longer, its bytes count in proportion to the speeds.
    """
    node = np.arange(plan.ranks) // plan.cluster.ranks_per_node
    crosses = node[:, None] != node[None, :]
    found = 0.0
    for way in WAYS:
        levels = ((plan.bytes(way) * crosses, 1), (plan.bytes(way) * ~crosses, INSIDE))
        found += max(max(sent.sum(0).max(), sent.sum(1).max()) / speed for sent, speed in levels)
    return found


def communication_share(plan: Plan, machine: Machine) -> float:
    """Return the time that the busiest port is busy over the compute time of the slowest rank."""
    mbps = machine.cluster.inter_mbps * LINK_EFFICIENCY / 1000
    return port_bytes(plan) / mbps / 1e6 / compute_seconds(plan, machine)


def compute_seconds(plan: Plan, machine: Machine) -> float:
    """Return the compute time of the slowest rank, forward and backward."""
    return float(plan.work().max()) * FLOPS / machine.gflops / 1e9


def mbit_for(load: float, plans: Mapping[str, Plan], machine: Machine) -> int:
    """Return the speed of a network port, in megabits a second, at which the median plan's communication share is
    ``load``.
    Plans without communication (dp) are not counted.
    """
    needs = [port_bytes(plan) / compute_seconds(plan, machine) for plan in plans.values()]
    return max(1, round(statistics.median(n for n in needs if n) / 125_000 / load))

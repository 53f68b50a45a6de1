"""The machines that the box is paced to be, and what is predicted of a step on them.

For a batch every rank is a device so fast that its attention, perfectly divided, takes a stated time forward and
backward. Network ports are so fast that the *load* is a stated number: of the strategies that are run, the median one's
busiest port is busy for so much of the time for which its slowest rank computes. Ports inside a node are ``INSIDE``
times as fast. A plan is made for the ports that were measured.
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
"""How much faster ports inside a node are than those across nodes; an H100's are 9 to 1, but sockets of many ranks
share two cores here.
"""
LINK_EFFICIENCY = 10
"""Per mille of what the cluster says of its ports, so that whole megabytes a second are a hundredth of one."""
FLOPS = 7 * (SHAPE.head_dim + SHAPE.v_head_dim)
"""Of a pair and a query head, forward and backward."""
WAYS = (False, True)


@dataclass(frozen=True)
class Machine:
    """A cluster and its cost model, as planners see them."""

    cluster: Cluster
    cost: CostModel
    host: Host

    @property
    def gflops(self) -> float:
        """Of a paced device, in the dtype that is run."""
        return self.cluster.gflops * PEAK_PERMILLE[SHAPE.dtype] / 1000

    def plans(self, lengths: Sequence[int], strategies: Sequence[str]) -> dict[str, Plan]:
        """A plan for each strategy; those that move and compute the same share a row."""
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
        """Simulated milliseconds of attention forward and backward."""
        copies = replace(
            self.cost, kernel_ns=0
        )  # a copy is no paced kernel: what starting it takes is the host's price of a piece
        rules = Rules(copy_mbps=self.host.copy_mbps)
        return simulate(plan, copies, rules, measured=partial(self._busy_ns, plan)).attention_ns / 1e6

    def _busy_ns(self, plan: Plan, mask: int, backward: bool) -> NDArray[np.int64]:
        paced = slot_ns(slot_work(plan, mask, backward), plan, self.cost, backward)
        return np.asarray(paced + host_ns(self.host, plan, backward))


def _what_happens(plan: Plan) -> bytes:
    """All that is moved and computed."""
    columns = [plan.work().tobytes()]
    for program in plan.programs[0]:
        columns += [getattr(program.transfers, name).tobytes() for name in program.transfers.names()]
    return b"".join(columns)


def paced_machine(
    nodes: int, ranks: int, lengths: Sequence[int], seconds: float, ports: tuple[Port, Port], host: Host
) -> Machine:
    """Devices that need ``seconds`` for a batch perfectly divided, behind ports that were measured,
    (inside, across).
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
    """Bytes of the busiest network port, forward and backward,
    or as many as keep it busy as long as the busiest inside a node is.
    """
    node = np.arange(plan.ranks) // plan.cluster.ranks_per_node
    crosses = node[:, None] != node[None, :]
    found = 0.0
    for way in WAYS:
        levels = ((plan.bytes(way) * crosses, 1), (plan.bytes(way) * ~crosses, INSIDE))
        found += max(max(sent.sum(0).max(), sent.sum(1).max()) / speed for sent, speed in levels)
    return found


def communication_share(plan: Plan, machine: Machine) -> float:
    """Time for which the busiest port is busy over that for which the slowest rank computes."""
    mbps = machine.cluster.inter_mbps * LINK_EFFICIENCY / 1000
    return port_bytes(plan) / mbps / 1e6 / compute_seconds(plan, machine)


def compute_seconds(plan: Plan, machine: Machine) -> float:
    """Of the slowest rank, forward and backward."""
    return float(plan.work().max()) * FLOPS / machine.gflops / 1e9


def mbit_for(load: float, plans: Mapping[str, Plan], machine: Machine) -> int:
    """Megabits a second of a network port under which the median plan's communication is ``load`` of its compute; dp,
    which has none, is not counted.
    """
    needs = [port_bytes(plan) / compute_seconds(plan, machine) for plan in plans.values()]
    return max(1, round(statistics.median(n for n in needs if n) / 125_000 / load))

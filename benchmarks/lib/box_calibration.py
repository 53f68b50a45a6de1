"""Calibration of the box: its ports, the time of a paced kernel beyond its pace,
and the host's work around kernels and messages.

All ranks measure at once, because they share the machine's cores in the predicted steps too, and with other messages
and batches than those of the steps. :func:`measure_ports` depends on the network's setting, :func:`measure_host` on the
box alone:

- *ports*: messages of growing size between ranks of one node and between nodes, both ways at once, fitted to a latency
  and a bandwidth.
- *kernels*: how much longer a sleep takes than requested.
- *hosts*: passes with kernels that do nothing and messages that are never sent, fitted to nanoseconds per slot, per
  piece at either end, and per byte copied by packing and unpacking (:mod:`flexcp.simulator.copies` counts the bytes).
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from flexcp.calibration import Errors
from flexcp.measure.calibrate.fit import errors, split
from flexcp.plan.plan import Plan
from flexcp.plan.program import Program
from flexcp.simulator.copies import find_copies
from lib.box import Box
from lib.step_time import time_steps

Ints = NDArray[np.int64]
MESSAGE_MS = (20, 40, 60, 80, 120, 160, 240)
"""Durations of the measured messages at the port's set speed, in milliseconds:
far more bytes than its token bucket lets through at once.
"""
SLEEP_MS = (1, 3, 10)
NS_A_BYTE = 1000
"""The ``mbps`` at which one byte takes one nanosecond."""


Held = tuple[tuple[float, ...], tuple[float, ...]]
"""Nanoseconds of samples that were not fitted: predicted by the fit, and measured."""


class Port(NamedTuple):
    """Ports of one level: megabytes a second, and the nanoseconds before a message flows."""

    mbps: float
    latency_ns: int
    held: Held

    @property
    def off(self) -> Errors:
        """Errors of the fit on messages that were not fitted."""
        return errors(*self.held)


class Host(NamedTuple):
    """Nanoseconds of a slot, of a piece that is sent or received, and of a kernel beyond its pace;
    megabytes a second of copies.
    """

    slot_ns: int
    piece_ns: int
    kernel_ns: int
    copy_mbps: int
    held: Held

    @property
    def off(self) -> Errors:
        """Errors of the fit on passes that were not fitted."""
        return errors(*self.held)


def measure_ports(box: Box, across: bool, mbit: int, repeats: int = 3) -> Port:
    """Measure the ports of a level, which are set to ``mbit``."""
    sizes = [max(1, round(mbit * 125 * ms)) for ms in MESSAGE_MS]
    samples = list(zip(sizes, box.run(_exchanges, box.network.ranks_per_node, across, sizes, repeats)[0], strict=True))
    fitted, held = split(samples)
    ns = np.array([ns for _, ns in fitted])
    columns = np.array([[1.0, size] for size, _ in fitted])
    start, each = np.linalg.lstsq(columns / ns[:, None], np.ones(len(ns)), rcond=None)[0]
    # A fitted latency below 0 comes from the bucket's burst, which a busy port does not have.
    latency = max(0.0, float(start))
    expected = tuple(latency + size * float(each) for size, _ in held)
    return Port(1000 / float(each), round(latency), (expected, tuple(ns for _, ns in held)))


def _exchanges(
    group: dist.ProcessGroup, ranks_per_node: int, across: bool, sizes: Sequence[int], repeats: int
) -> list[float]:
    """Return the nanoseconds of sending a message of each size to the next rank (of the node, or of the next node)
    while receiving from the previous one; collective.
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    first = rank - rank % ranks_per_node
    to, back = ((rank + d * ranks_per_node) % ranks if across else first + (rank + d) % ranks_per_node for d in (1, -1))
    found = []
    for size in sizes:
        out, into = torch.zeros(size, dtype=torch.uint8), torch.empty(size, dtype=torch.uint8)
        samples = []
        for _ in range(repeats + 1):
            dist.barrier(group)
            begin = time.perf_counter_ns()
            works = [dist.irecv(into, group=group, group_src=back), dist.isend(out, group=group, group_dst=to)]
            for work in works:
                assert work is not None
                work.wait()
            took = torch.tensor([float(time.perf_counter_ns() - begin)], dtype=torch.float64)
            dist.all_reduce(took, op=dist.ReduceOp.MAX, group=group)
            samples.append(float(took))
        found.append(min(samples[1:]))
    return found


def measure_host(box: Box, plans: Sequence[Plan], repeats: int = 3) -> Host:
    """Measure the host's work in passes of these plans."""
    rows: list[list[float]] = []
    times: list[float] = []
    for plan in plans:
        ranks = box.run(time_steps, plan, "compute", repeats, math.inf)
        for way in (False, True):
            program = plan.programs[0][way]
            counts = np.stack([np.full(plan.ranks, program.stages), _pieces(program, plan.ranks).sum(1)])
            copies = find_copies(plan, 0, way, NS_A_BYTE, 0)
            copied = (copies.pack + copies.take_in).sum(1)
            rows += np.stack([*counts, copied], axis=1).astype(float).tolist()
            times += [1e9 * min(each[way] for each in timed.seconds) for timed in ranks]
    samples = sorted(zip(times, rows, strict=True))
    fitted, held = split(samples)
    prices = _not_negative(np.array([row for _, row in fitted]), np.array([ns for ns, _ in fitted]))
    expected = tuple(float(np.dot(prices, row)) for _, row in held)
    kernel = statistics.median(ns for each in box.run(_sleeps) for ns in each)
    slot, piece, byte = prices
    return Host(
        round(slot),
        round(piece),
        round(kernel),
        max(1, round(NS_A_BYTE / max(byte, 1e-6))),
        (expected, tuple(ns for ns, _ in held)),
    )


def host_ns(host: Host, plan: Plan, backward: bool) -> Ints:
    """Return as ``[rank, slot]`` the nanoseconds of the host's work besides copying bytes."""
    program = plan.programs[0][backward]
    return host.slot_ns + host.piece_ns * _pieces(program, plan.ranks)


def _pieces(program: Program, ranks: int) -> Ints:
    """Return as ``[rank, slot]`` the number of pieces that are unpacked and packed there."""
    t, found = program.transfers, np.zeros((ranks, program.stages), np.int64)
    np.add.at(found, (t.target, t.stage), 1)
    moves = t.source != t.target
    np.add.at(found, (t.source[moves], program.execution.posted[t.stage[moves]]), 1)
    return found


def _sleeps(group: dist.ProcessGroup) -> list[float]:
    """Return by how many nanoseconds sleeps took longer than requested."""
    found = []
    for ms in SLEEP_MS * 5:
        dist.barrier(group)
        begin = time.perf_counter_ns()
        time.sleep(ms / 1000)
        found.append(time.perf_counter_ns() - begin - ms * 1e6)
    return found


def _not_negative(a: NDArray[np.float64], y: NDArray[np.float64]) -> NDArray[np.float64]:
    """Solve least squares of relative errors; a column that would get a negative price gets 0."""
    prices = np.zeros(a.shape[1])
    kept = np.flatnonzero(a.any(axis=0))
    while len(kept):
        found = np.linalg.lstsq(a[:, kept] / y[:, None], np.ones(len(y)), rcond=None)[0]
        if found.min() >= 0:
            prices[kept] = found
            break
        kept = kept[found > 0]
    return prices

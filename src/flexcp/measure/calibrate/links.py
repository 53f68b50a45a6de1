"""Link times for calibration: messages of growing size between neighbours, both ways at once, as in real steps.

Every rank sends to the next and receives from the previous one, so that all ports are busy. Sending to several peers at
once gives the cost of one more message. The same calls run on gloo and on NCCL (the latter not yet run by calibration
on several GPUs).
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from flexcp.executor.exchange.grouped_calls import start_together

SIZES = (1 << 12, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24)
"""The measured message sizes in bytes."""


@dataclass(frozen=True)
class LinkTimes:
    """Nanoseconds of exchanges on the slowest rank: ``ns`` for a message of each ``size`` in bytes to one peer.

    ``all_peers_ns`` is the time of the smallest message to each of ``peers`` peers at once.
    """

    size: tuple[int, ...]
    ns: tuple[float, ...]
    peers: int
    all_peers_ns: float


def link_times(group: dist.ProcessGroup, device: str = "cpu", repeats: int = 7, distance: int = 1) -> LinkTimes:
    """Time exchanges with the ranks ``distance`` places away, then with all; collective.

    Each time is the median of ``repeats``. Raise ValueError for a group of one rank.
    """
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    if ranks < 2:
        raise ValueError("links need at least 2 ranks")
    near = [((rank + distance) % ranks, (rank - distance) % ranks)]
    every = [((rank + d) % ranks, (rank - d) % ranks) for d in range(1, ranks)]
    times = [_exchange_ns(group, near, size, device, repeats) for size in SIZES]
    return LinkTimes(SIZES, tuple(times), ranks - 1, _exchange_ns(group, every, SIZES[0], device, repeats))


def _exchange_ns(group: dist.ProcessGroup, peers: list[tuple[int, int]], size: int, device: str, repeats: int) -> float:
    """Return the slowest rank's nanoseconds of an exchange, the median over repeats; see :func:`exchange_samples`."""
    mine = exchange_samples(group, peers, size, device, repeats)
    slowest = torch.tensor(mine, dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=group)
    return float(statistics.median(slowest.tolist()))


def exchange_samples(
    group: dist.ProcessGroup, peers: list[tuple[int, int]], size: int, device: str, repeats: int
) -> list[float]:
    """Return this rank's nanoseconds of an exchange, one for each of ``repeats``; collective.

    The rank sends ``size`` bytes to the first rank of each pair of ``peers`` and receives as many from the second. All
    ranks start each repeat together. One more repeat before these, in which connections are made, is dropped. A rank
    without peers takes part only in the barriers.
    """
    out = torch.zeros(size, dtype=torch.uint8, device=device)
    into = [torch.empty_like(out) for _ in peers]
    samples = []
    for _ in range(repeats + 1):
        receives = [(x, peer) for x, (_, peer) in zip(into, peers, strict=True)]
        dist.barrier(group)
        begin = time.perf_counter_ns()
        for work in start_together(group, receives, [(out, to) for to, _ in peers]):
            work.wait()
        if device == "cuda":
            torch.cuda.synchronize()
        samples.append(float(time.perf_counter_ns() - begin))
    return samples[1:]

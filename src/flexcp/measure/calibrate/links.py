"""Link times for calibration: messages of growing size between neighbours, both ways at once,
as the executor posts them.

Every rank sends to the next and receives from the one before, so that all ports are busy. One message to each of
several peers tells what one more message costs. The same calls run on gloo and, on GPUs, on NCCL (there unrun).
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

SIZES = (1 << 12, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24)


@dataclass(frozen=True)
class LinkTimes:
    """Nanoseconds of the slowest rank: of a message of each size to one peer, and of the smallest to every peer."""

    size: tuple[int, ...]
    ns: tuple[float, ...]
    peers: int
    all_peers_ns: float


def link_times(group: dist.ProcessGroup, device: str = "cpu", repeats: int = 7, distance: int = 1) -> LinkTimes:
    """Collective: exchange with the rank ``distance`` further, then with all."""
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    if ranks < 2:
        raise ValueError("links need at least 2 ranks")
    near = [((rank + distance) % ranks, (rank - distance) % ranks)]
    every = [((rank + d) % ranks, (rank - d) % ranks) for d in range(1, ranks)]
    times = [_exchange_ns(group, near, size, device, repeats) for size in SIZES]
    return LinkTimes(SIZES, tuple(times), ranks - 1, _exchange_ns(group, every, SIZES[0], device, repeats))


def _exchange_ns(group: dist.ProcessGroup, peers: list[tuple[int, int]], size: int, device: str, repeats: int) -> float:
    """The median over repeats of the slowest rank."""
    mine = exchange_samples(group, peers, size, device, repeats)
    slowest = torch.tensor(mine, dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=group)
    return float(statistics.median(slowest.tolist()))


def exchange_samples(
    group: dist.ProcessGroup, peers: list[tuple[int, int]], size: int, device: str, repeats: int
) -> list[float]:
    """Collective: nanoseconds this rank took to send ``size`` bytes to the first of each pair and
    to receive as many from the second.

    All ranks begin together, one repeat after the other; the first, in which connections are made, is not among them. A
    rank without peers only begins.
    """
    out = torch.zeros(size, dtype=torch.uint8, device=device)
    into = [torch.empty_like(out) for _ in peers]
    samples = []
    for _ in range(repeats + 1):
        operations = [
            dist.P2POp(dist.irecv, x, group=group, group_peer=p) for x, (_, p) in zip(into, peers, strict=True)
        ]
        operations += [dist.P2POp(dist.isend, out, group=group, group_peer=to) for to, _ in peers]
        dist.barrier(group)
        begin = time.perf_counter_ns()
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()
        if device == "cuda":
            torch.cuda.synchronize()
        samples.append(float(time.perf_counter_ns() - begin))
    return samples[1:]

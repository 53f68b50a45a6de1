"""What a rank does for ``benchmarks/soak.py``: steps of changing batches, and a look at what it holds."""

from __future__ import annotations

import ctypes
import gc
import os
import random
import threading
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

import flexcp
from flexcp.plan.plan import Plan

SETTLED = 500
"""Steps after which a process has loaded, compiled and cached what it ever will."""
STRATEGIES = ("blocks", "zigzag", "allgather", "ring", "groups", "dp")
MASKS = (flexcp.causal(), flexcp.full(), flexcp.window(16, 0), flexcp.lambda_(4, 32), flexcp.shared_question(3, 0.3))


@dataclass(frozen=True)
class Held:
    """What a process holds; bytes and counts."""

    resident: int
    threads: int
    files: int
    sockets: int
    shared: int


@dataclass(frozen=True)
class Soaked:
    """What a rank held after the steps in which it settled, and at the end;
    whether a fixed batch gave the same bits.
    """

    before: Held
    after: Held
    same: bool


def held() -> Held:
    """Of this process, garbage collected and the allocator's free memory given back."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    links = [
        os.readlink(f"/proc/self/fd/{fd}")
        for fd in os.listdir("/proc/self/fd")
        if os.path.islink(f"/proc/self/fd/{fd}")
    ]
    sockets = sum(link.startswith("socket:") for link in links)
    shared = len(list(Path("/dev/shm").iterdir())) if Path("/dev/shm").is_dir() else 0
    return Held(pages * os.sysconf("SC_PAGE_SIZE"), threading.active_count(), len(links) - sockets, sockets, shared)


def soak(group: dist.ProcessGroup, steps: int, settled: int, seed: int) -> Generator[str, None, Soaked]:
    """On every rank: that many steps; says how far it is."""
    rng, ranks = random.Random(seed), dist.get_world_size(group)
    first = _fixed(group, ranks)
    before = held()
    for number in range(steps):
        if number == settled:
            before = held()
        if number % 50 == 0:
            yield f"step {number} of {steps}"
        _step(flexcp.bind(_drawn(rng, ranks), group), number)
    same = all(torch.equal(a, b) for a, b in zip(first, _fixed(group, ranks), strict=True))
    return Soaked(before, held(), same)


def _drawn(rng: random.Random, ranks: int) -> Plan:
    lengths = [rng.randrange(1, rng.choice((8, 60, 300))) for _ in range(rng.randrange(1, 8))]
    planner = flexcp.Planner(
        4,
        2,
        16,
        dtype="float32",
        cluster=flexcp.cluster("cpu", 1, ranks),
        strategy=rng.choice(STRATEGIES),
        keep_kv=rng.choice((0, 1 << 30)),
    )
    return planner(lengths, rng.choice(MASKS))


def _step(step: flexcp.Step, seed: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed * 1000 + step.rank)
    assert len(step.indices) == step.local_tokens  # asked for, as a training loop does: otherwise attention warns

    def rows(heads: int) -> torch.Tensor:
        return torch.randn(step.local_tokens, heads, 16, generator=generator).requires_grad_()

    q, k, v = rows(4), rows(2), rows(2)
    out = flexcp.attention(q, k, v, step)
    assert isinstance(out, torch.Tensor)
    out.square().sum().backward()
    assert q.grad is not None and k.grad is not None and v.grad is not None
    return out.detach(), q.grad, k.grad, v.grad


def _fixed(group: dist.ProcessGroup, ranks: int) -> tuple[torch.Tensor, ...]:
    planner = flexcp.Planner(4, 2, 16, dtype="float32", cluster=flexcp.cluster("cpu", 1, ranks), strategy="blocks")
    return _step(flexcp.bind(planner([200, 31, 1, 77]), group), 0)

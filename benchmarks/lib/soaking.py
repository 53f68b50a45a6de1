"""The ranks' part of ``benchmarks/soak.py`` and ``benchmarks/trust_gpu.py``: steps with changing batches,
and a count of what a process holds.
"""

from __future__ import annotations

import ctypes
import gc
import os
import random
import sys
import time
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import flexcp
from flexcp.executor.kernels.choose import choose_kernel
from flexcp.measure.verify import Options, verify_on
from flexcp.plan.plan import Plan

SETTLED = 500
"""The number of steps after which a process has loaded, compiled and cached everything."""
LOOK_EVERY = 500
"""Steps between two counts of what a rank holds."""
CHECK_EVERY = 250
"""Steps between two batches whose results are compared with dense attention."""
STRATEGIES = ("blocks", "zigzag", "allgather", "ring", "groups", "dp")
MASKS = (
    flexcp.causal(),
    flexcp.full(),
    flexcp.window(16, 0),
    flexcp.masks.lambda_(4, 32),
    flexcp.masks.shared_question(3, 0.3),
)


@dataclass(frozen=True)
class Held:
    """Resources of a process, in bytes and counts;
    ``allocated`` and ``reserved`` are of CUDA's allocator, 0 on a CPU.
    """

    resident: int
    threads: int
    files: int
    sockets: int
    shared: int
    allocated: int = 0
    reserved: int = 0


@dataclass(frozen=True)
class Soaked:
    """A rank's resources after ``settled`` steps and at the end, after ``steps``; ``looks`` has those in between too,
    by the number of steps.

    ``same`` says whether a fixed batch gave the same bits at the beginning and at the end. Rank 0 compared ``checked``
    of the drawn batches with dense attention; ``wrong`` has a line for each that differed.
    """

    before: Held
    after: Held
    same: bool
    settled: int
    steps: int
    looks: dict[int, Held]
    checked: int
    wrong: tuple[str, ...]
    kernel: str


def held(device: str = "cpu") -> Held:
    """Return the resources of this process, after collecting garbage and returning free memory."""
    gc.collect()
    on_gpu = (0, 0)
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        on_gpu = (torch.cuda.memory_allocated(), torch.cuda.memory_reserved())
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    links = [
        os.readlink(f"/proc/self/fd/{fd}")
        for fd in os.listdir("/proc/self/fd")
        if os.path.islink(f"/proc/self/fd/{fd}")
    ]
    sockets = sum(link.startswith("socket:") for link in links)
    shared = len(list(Path("/dev/shm").iterdir())) if Path("/dev/shm").is_dir() else 0
    resident = pages * os.sysconf("SC_PAGE_SIZE")
    threads = len(os.listdir("/proc/self/task"))
    return Held(resident, threads, len(links) - sockets, sockets, shared, *on_gpu)


def soak(
    group: dist.ProcessGroup,
    steps: int,
    settled: int,
    seed: int,
    device: str = "cpu",
    seconds: float | None = None,
    check_every: int = CHECK_EVERY,
) -> Generator[str, None, Soaked]:
    """Run ``steps`` steps on this rank, or as many as fit into ``seconds``; yields progress messages."""
    rng, ranks, begin = random.Random(seed), dist.get_world_size(group), time.monotonic()
    first = _fixed(group, ranks, device)
    looks, checked, wrong = {0: held(device)}, 0, list[str]()
    for number in range(steps):
        # If time runs out early, the last of these counts before the middle is compared with the end.
        early = seconds is not None and number in (50, 100, 200)
        if number == settled or (number and number % LOOK_EVERY == 0) or early:
            looks[number] = held(device)
        if number % 50 == 0:
            if seconds is not None and _over(group, device, time.monotonic() - begin > seconds):
                steps = number
                break
            last = looks[max(looks)]
            yield (
                f"step {number:,} of {steps:,} after {time.monotonic() - begin:.0f} s; at the last count "
                f"{last.resident / 1e6:.1f} MB resident, {last.allocated / 1e6:.1f} MB of CUDA memory"
            )
        plan = _drawn(rng, ranks, device)
        _step(flexcp.bind(plan, group), number, device)
        if number % check_every == check_every - 1:
            checked += 1
            wrong += _compared(group, plan, number, device)
    same = all(torch.equal(a, b) for a, b in zip(first, _fixed(group, ranks, device), strict=True))
    settled = max(number for number in looks if number <= max(settled, 1) and 2 * number <= steps)
    looks[steps] = held(device)
    return Soaked(
        looks[settled], looks[steps], same, settled, steps, looks, checked, tuple(wrong), _kernel(ranks, device)
    )


def soaked(group: dist.ProcessGroup, *asked: Any) -> Soaked:
    """Run :func:`soak` for callers that take no progress messages; rank 0 prints them."""
    running = soak(group, *asked)
    while True:
        try:
            said = next(running)
        except StopIteration as end:
            found: Soaked = end.value
            return found
        if dist.get_rank(group) == 0:
            print(f"soak: {said}", file=sys.stderr, flush=True)


def _over(group: dist.ProcessGroup, device: str, mine: bool) -> bool:
    """Return whether any rank's time is over, so that all ranks stop at the same step."""
    if dist.get_world_size(group) == 1:
        return mine
    votes = torch.tensor([int(mine)], device=device)
    dist.all_reduce(votes, group=group)
    return bool(votes.item())


def _compared(group: dist.ProcessGroup, plan: Plan, number: int, device: str) -> list[str]:
    """Run the plan of step ``number`` on other numbers and compare all results with dense float64 attention, by the
    rule of ``flexcp verify``. Returns a line if they differ, on rank 0.
    """
    verdict = verify_on(group, plan, Options(seed=number, kernel=None, device=device))
    if verdict is None or verdict.passed:
        return []
    return [f"step {number}: errors {verdict.errors}, allowed {verdict.allowed}, bytes match: {verdict.bytes_match}"]


def _kernel(ranks: int, device: str) -> str:
    """Return the name of the kernel that the steps run on."""
    shape = _planner(ranks, device, "blocks").shape
    return choose_kernel(device, getattr(torch, shape.dtype), shape.head_dim, shape.v_head_dim).kernel


def _drawn(rng: random.Random, ranks: int, device: str) -> Plan:
    longest = (8, 60, 300) if device == "cpu" else (64, 500, 2000)
    lengths = [rng.randrange(1, rng.choice(longest)) for _ in range(rng.randrange(1, 8))]
    planner = _planner(ranks, device, rng.choice(STRATEGIES), rng.choice((0, 1 << 30)))
    return planner(lengths, rng.choice(MASKS))


def _planner(ranks: int, device: str, strategy: str, keep: int = 0) -> flexcp.Planner:
    size, dtype = (16, "float64") if device == "cpu" else (64, "bfloat16")
    where = flexcp.cluster("cpu" if device == "cpu" else "h200", 1, ranks)
    return flexcp.Planner(4, 2, size, dtype=dtype, cluster=where, strategy=strategy, keep_kv=keep)


def _step(step: flexcp.Step, seed: int, device: str) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator(device).manual_seed(seed * 1000 + step.rank)
    shape, dtype = step.plan.shape, getattr(torch, step.plan.shape.dtype)
    assert len(step.indices) == step.local_tokens  # unread indices would make attention warn

    def rows(heads: int) -> torch.Tensor:
        made = torch.randn(step.local_tokens, heads, shape.head_dim, generator=generator, device=device)
        return made.to(dtype).requires_grad_()

    q, k, v = rows(4), rows(2), rows(2)
    out = flexcp.attention(q, k, v, step, deterministic=True)
    assert isinstance(out, torch.Tensor)
    out.square().sum().backward()
    assert q.grad is not None and k.grad is not None and v.grad is not None
    return out.detach(), q.grad, k.grad, v.grad


def _fixed(group: dist.ProcessGroup, ranks: int, device: str) -> tuple[torch.Tensor, ...]:
    return _step(flexcp.bind(_planner(ranks, device, "blocks")([200, 31, 1, 77]), group), 0, device)

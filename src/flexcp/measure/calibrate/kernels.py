"""Kernel times for calibration: many masks and sizes in both directions, with the kernel chosen for the device.

CPU ranks all measure at once, because ranks that share cores will also run at once. On a GPU times are taken between
two events, with enough work queued before them to keep the host ahead: a launch takes the host 100 to 200 us, longer
than small kernels run.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from flexcp.cost import TILE_ROWS
from flexcp.executor.kernels import Settings, accumulator_dtype, find_kernel
from flexcp.executor.kernels.choose import choose_kernel
from flexcp.measure.calibrate.fit import Sample
from flexcp.measure.kernels.work import Workload, workload
from flexcp.shape import Shape

CPU_TOKENS, GPU_TOKENS = (256, 512, 1024, 2048), (2048, 4096, 8192, 16_384)
LONG = 2048
"""On CPUs, kernels of this many tokens or more are timed only once."""
GPU_CALLS = 5
"""How many calls are timed together on a GPU."""
WORK = ("causal", "full", "docs4", "question", "docs16", "blockwise", "lambda")
GPU_WORK = (*WORK, "window", "docs64")


@dataclass(frozen=True)
class KernelTask:
    """What to measure: the attention shape (with its dtype) on a device.

    ``tokens`` are lengths of streams and ``names`` workloads (:func:`flexcp.measure.kernels.work.workload`); every
    combination is measured ``repeats`` times.
    """

    shape: Shape
    device: str = "cpu"
    tokens: tuple[int, ...] = CPU_TOKENS
    names: tuple[str, ...] = WORK
    repeats: int = 3


def kernel_samples(group: dist.ProcessGroup | None, task: KernelTask) -> list[Sample]:
    """Measure every workload of the task, forward and backward; return a sample of each.

    If there is a group, this is collective, and all ranks start together.
    """
    found = []
    for tokens in task.tokens:
        for name in task.names:
            work = workload(name, tokens)
            for backward, call in enumerate(_calls(work, task)):
                ns = _timed(call, _repeats(tokens, task), task.device, group)
                found.append(sample_of(name, tokens, task.shape, bool(backward), ns))
    return found


def sample_of(name: str, tokens: int, shape: Shape, backward: bool, ns: float) -> Sample:
    """Make a calibration sample: the workload ``name`` with ``tokens`` tokens took ``ns`` nanoseconds in one direction.

    It counts the (query, key) pairs and the row tiles of the workload, both for all query heads of ``shape``.
    """
    work = workload(name, tokens)
    tiles = int(np.sum(-(-np.array(work.lengths) // TILE_ROWS)))
    short = tokens < TILE_ROWS * len(work.lengths)
    return Sample(f"{name} {tokens}", work.pairs() * shape.heads, tiles * shape.heads, backward, ns, short)


def matrix_gflops(group: dist.ProcessGroup | None, task: KernelTask, size: int) -> float:
    """Return the GFLOP/s of a product of ``size`` x ``size`` matrices in the task's dtype.

    This is collective if there is a group.
    """
    dtype = getattr(torch, task.shape.dtype)
    a = torch.ones(size, size, dtype=dtype, device=task.device)
    return 2 * size**3 / _timed(lambda: a @ a, task.repeats, task.device, group)


def _calls(work: Workload, task: KernelTask) -> Iterator[Callable[[], Any]]:
    """Yield the forward call of the chosen kernel on a workload, then the backward call."""
    shape, device = task.shape, torch.empty(0, device=task.device).device  # with its index
    dtype = getattr(torch, shape.dtype)
    kernel = find_kernel(choose_kernel(device, dtype, shape.head_dim, shape.v_head_dim).kernel)
    sizes = [(shape.heads, shape.head_dim), (shape.kv_heads, shape.head_dim), (shape.kv_heads, shape.v_head_dim)]
    n = work.tokens
    q, k, v = (torch.randn(n, *size, device=device).to(dtype) for size in sizes)
    do = torch.randn(n, shape.heads, shape.v_head_dim, device=device).to(dtype)
    dims = (shape.heads, shape.kv_heads, shape.head_dim, shape.v_head_dim)
    slices = kernel.prepare(work.slices(), *dims, device)
    settings = Settings(shape.head_dim**-0.5)
    more = accumulator_dtype(dtype)
    out = torch.zeros(n, shape.heads, shape.v_head_dim, dtype=more, device=device)
    lse = torch.full((n, shape.heads), -torch.inf, dtype=more, device=device)

    def forward() -> None:
        lse.fill_(-torch.inf)  # as in a first stage; the fill, some microseconds on a GPU, is part of the time
        kernel.forward(q, k, v, slices, settings, out, lse)

    yield forward
    grads = [torch.zeros(x.shape, dtype=more, device=device) for x in (q, k, v)]
    delta, finite = (torch.zeros(n, shape.heads, dtype=more, device=device) for _ in range(2))
    yield lambda: kernel.backward(q, k, v, do, finite, delta, slices, settings, *grads)


def _repeats(tokens: int, task: KernelTask) -> int:
    """Return how often a kernel is timed.

    On CPUs the longest kernels take seconds and are timed once, because calibration should last two minutes at most.
    """
    return 1 if task.device == "cpu" and tokens >= LONG else task.repeats


def _timed(call: Callable[[], Any], repeats: int, device: str, group: dist.ProcessGroup | None) -> float:
    """Return the median nanoseconds of ``repeats`` calls after one to warm up, or of a single call without warm-up.

    All ranks of the group start together.
    """
    if repeats > 1:
        call()
    samples = []
    for _ in range(repeats):
        if group is not None:
            dist.barrier(group)
        samples.append(_cuda_ns(call) if device == "cuda" else _cpu_ns(call))
    return statistics.median(samples)


def _cpu_ns(call: Callable[[], Any]) -> float:
    begin = time.perf_counter_ns()
    call()
    return float(time.perf_counter_ns() - begin)


def keep_busy() -> None:
    """Queue some milliseconds of work on the GPU, so that the next kernels wait for the device and not for the host.

    The matrices are random, because the power that a product draws depends on its numbers, and the clock of the
    kernels after it on that power: after products of zeros, attention took 12 % less time on an H200.
    """
    a = torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda")
    for _ in range(3):
        torch.mm(a, a, out=torch.empty_like(a))


def _cuda_ns(call: Callable[[], Any]) -> float:
    """Return the mean nanoseconds of ``GPU_CALLS`` calls, between two events on the GPU."""
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    keep_busy()
    first.record()
    for _ in range(GPU_CALLS):
        call()
    last.record()
    torch.cuda.synchronize()
    return float(first.elapsed_time(last)) * 1e6 / GPU_CALLS

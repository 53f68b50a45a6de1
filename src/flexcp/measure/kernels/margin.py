"""What attention and a transfer cost each other on one GPU.

A transfer looks to the chip like a copy by a fixed number of blocks of 512 threads that stay until it is done. It is started first, on a
stream of high priority, as the executor does with real ones; attention follows and takes every multiprocessor or leaves a margin. Two
kinds: *inside* a node, 16 blocks, what NCCL starts for peers on NVLink, and *across* nodes, 4 blocks, what it starts for peers behind a
network card. Measured of each: attention alone, beside a copy that outlasts it and beside one that it outlasts, and that copy alone and
beside attention.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexcp.executor.kernels import Settings
from flexcp.executor.kernels.choose import choose_kernel
from flexcp.measure.calibrate.kernels import keep_busy
from flexcp.measure.kernels.bench import Heads, random_tensors
from flexcp.measure.kernels.work import workload

BLOCK = 8192
CHANNELS = {"inside": 16, "across": 4}
"""Blocks of a copy, by where its peer is."""
BYTES = 1 << 28
HEAD_START = 10_000
"""Cycles by which a copy begins before attention."""
OUTLASTS, FITS = 1.5, 0.4
"""How long a copy takes of attention's time where it outlasts attention, and where attention outlasts it."""


@triton.jit(do_not_specialize=["n", "times"])
def copy_kernel(source, target, n, times, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Copy n elements so many times, by as many blocks as were launched."""
    for _ in range(times):
        for at in range(tl.program_id(0) * BLOCK, n, tl.num_programs(0) * BLOCK):
            i = at + tl.arange(0, BLOCK)
            tl.store(target + i, tl.load(source + i, mask=i < n), mask=i < n)


def margin_table(margins: tuple[int, ...] = (0, 4, 8, 16, 24), tokens: int = 16_384) -> list[dict[str, Any]]:
    """One row per kind of transfer, direction and margin."""
    heads, device = Heads(), torch.device("cuda", torch.cuda.current_device())
    chosen = choose_kernel(device, heads.dtype, heads.head_dim).kernel
    # What runs beside a transfer adds to results, which FlashAttention-4 cannot.
    kernel = "cute" if chosen == "fa4" else chosen
    source = torch.ones(BYTES // 4, device=device)
    target = torch.empty_like(source)
    beside = torch.cuda.Stream(priority=-1)
    rows = []
    for margin in margins:
        for way, attention in _calls(kernel, tokens, heads, device, margin).items():
            alone = median_ms(partial(timed_together, attention, None, beside))[0]
            for where, channels in CHANNELS.items():
                once = median_ms(
                    partial(timed_together, None, partial(copy_by_blocks, source, target, channels, 1), beside)
                )[1]
                longer, shorter = (
                    partial(copy_by_blocks, source, target, channels, max(1, round(share * alone / once)))
                    for share in (OUTLASTS, FITS)
                )
                copy_alone = median_ms(partial(timed_together, None, shorter, beside))[1]
                slowed = median_ms(partial(timed_together, attention, longer, beside))[0]
                delayed, copied = median_ms(partial(timed_together, attention, shorter, beside))
                rows.append(
                    {
                        "kernel": kernel, "way": way, "where": where, "margin": margin, "channels": channels,
                        "attention alone ms": alone, "attention with copy ms": slowed, "slowdown": slowed / alone,
                        "attention with short copy ms": delayed,
                        "copy alone ms": copy_alone, "copy with attention ms": copied, "link": copy_alone / copied,
                        "copy GB/s alone": 2 * BYTES / once / 1e6,
                    }
                )  # fmt: skip
    return rows


def copy_by_blocks(source: Tensor, target: Tensor, channels: int, times: int) -> None:
    """Copy a tensor so many times by so many blocks, on the current stream."""
    copy_kernel[(channels,)](source, target, source.numel(), times, BLOCK=BLOCK, num_warps=16)


def _calls(kernel: str, tokens: int, heads: Heads, device: torch.device, margin: int) -> dict[str, Callable[[], Any]]:
    from flexcp.measure.kernels.bench import our_calls

    settings = Settings(heads.head_dim**-0.5, sm_margin=margin)
    work = workload("causal", tokens)
    calls = our_calls(kernel, work.slices(), random_tensors(tokens, heads, device), heads, settings)
    return {"forward": calls.forward, "backward": calls.backward}


def timed_together(
    attention: Callable[[], Any] | None, copy: Callable[[], Any] | None, beside: torch.cuda.Stream
) -> tuple[float, float]:
    """Milliseconds of attention and of the copy, which is started first.

    Both are queued behind other work, so that the host's launches are over before the first of them begins.
    """
    events = [torch.cuda.Event(enable_timing=True) for _ in range(4)]
    torch.cuda.synchronize()
    keep_busy()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        events[2].record()
        if copy is not None:
            copy()
        events[3].record()
    torch.cuda._sleep(HEAD_START)
    events[0].record()
    if attention is not None:
        attention()
    events[1].record()
    torch.cuda.synchronize()
    return events[0].elapsed_time(events[1]), events[2].elapsed_time(events[3])


def median_ms(measure: Callable[[], tuple[float, float]], rounds: int = 7) -> tuple[float, float]:
    """Medians of both times over so many rounds, after one that does not count."""
    measure()
    samples = [measure() for _ in range(rounds)]
    return statistics.median(s[0] for s in samples), statistics.median(s[1] for s in samples)

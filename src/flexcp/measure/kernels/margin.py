"""What attention and a transfer cost each other on one GPU.

Beside attention, on another stream, runs a copy of a fixed number of blocks of 512 threads each that stay until it is done: what a
collective's kernel looks like to the chip. Attention takes every multiprocessor or leaves a margin. Measured: attention alone and with
the copy, the copy alone and with attention.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexcp.executor.kernels import Settings
from flexcp.executor.kernels.choose import choose_kernel
from flexcp.measure.kernels.bench import Heads, random_tensors
from flexcp.measure.kernels.work import workload

BLOCK = 8192
CHANNELS = 16
BYTES = 1 << 30


@triton.jit(do_not_specialize=["n"])
def copy_kernel(source, target, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Copy n elements by as many blocks as were launched."""
    for at in range(tl.program_id(0) * BLOCK, n, tl.num_programs(0) * BLOCK):
        i = at + tl.arange(0, BLOCK)
        tl.store(target + i, tl.load(source + i, mask=i < n), mask=i < n)


def margin_table(margins: tuple[int, ...] = (0, 4, 8, 16, 24), tokens: int = 16_384) -> list[dict[str, Any]]:
    """One row per direction and margin."""
    heads, device = Heads(), torch.device("cuda", torch.cuda.current_device())
    kernel = choose_kernel(device, heads.dtype, heads.head_dim).kernel
    source = torch.ones(BYTES // 4, device=device)
    target = torch.empty_like(source)
    beside = torch.cuda.Stream()
    rows = []
    for margin in margins:
        for way, attention in _calls(kernel, tokens, heads, device, margin).items():
            alone = _median(lambda call=attention: _both(call, None, beside))[0]  # type: ignore[misc]
            copy_alone = _median(lambda: _both(None, (source, target), beside))[1]
            together = _median(lambda call=attention: _both(call, (source, target), beside))  # type: ignore[misc]
            rows.append(
                {
                    "kernel": kernel, "way": way, "margin": margin, "channels": CHANNELS, "attention alone ms": alone,
                    "attention with copy ms": together[0], "slowdown": together[0] / alone, "copy alone ms": copy_alone,
                    "copy with attention ms": together[1], "copy GB/s with attention": 2 * BYTES / together[1] / 1e6,
                }
            )  # fmt: skip
    return rows


def _calls(kernel: str, tokens: int, heads: Heads, device: torch.device, margin: int) -> dict[str, Callable[[], Any]]:
    from flexcp.measure.kernels.bench import our_calls

    settings = Settings(heads.head_dim**-0.5, fresh=True, sm_margin=margin)
    work = workload("causal", tokens)
    calls = our_calls(kernel, work.slices(), random_tensors(tokens, heads, device), heads, settings)
    return {"forward": calls.forward, "backward": calls.backward}


def _both(
    attention: Callable[[], Any] | None, copy: tuple[Tensor, Tensor] | None, beside: torch.cuda.Stream
) -> tuple[float, float]:
    """Milliseconds of attention and of the copy, started together."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(4)]
    torch.cuda.synchronize()
    events[0].record()
    if attention is not None:
        attention()
    events[1].record()
    with torch.cuda.stream(beside):
        events[2].record()
        if copy is not None:
            copy_kernel[(CHANNELS,)](*copy, copy[0].numel(), BLOCK=BLOCK, num_warps=16)
        events[3].record()
    torch.cuda.synchronize()
    return events[0].elapsed_time(events[1]), events[2].elapsed_time(events[3])


def _median(measure: Callable[[], tuple[float, float]], rounds: int = 7) -> tuple[float, float]:
    measure()
    samples = [measure() for _ in range(rounds)]
    return statistics.median(s[0] for s in samples), statistics.median(s[1] for s in samples)

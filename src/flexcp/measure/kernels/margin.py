"""What attention and a transfer cost each other on one GPU.

A transfer looks to the chip like a copy by a fixed number of blocks of 512 threads that stay until it is done. It is
started first, on a stream of high priority, as the executor does with real ones; attention follows and takes every
multiprocessor or leaves a margin. Two kinds: *inside* a node, 16 blocks, what NCCL starts for peers on NVLink, and
*across* nodes, 4 blocks, what it starts for peers behind a network card. Measured of each: attention alone, beside a
copy that outlasts it and beside one that it outlasts, and that copy alone and beside attention.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexcp import masks
from flexcp.executor.kernels import Settings
from flexcp.executor.kernels.choose import choose_kernel
from flexcp.masks.slices import K1
from flexcp.measure.calibrate.kernels import keep_busy
from flexcp.measure.kernels.bench import Heads, random_tensors

BLOCK = 8192
CHANNELS = {"inside": 16, "across": 4}
"""Blocks of a copy, by where its peer is."""
BYTES = 1 << 26
ROWS, KEYS = 8192, 5000
"""Attention that is measured: all of so many rows over so many keys,
as large as a slot of a plan with 8,192 tokens a rank.
"""
HEAD_START = 10_000
"""Cycles by which a copy begins before attention."""
OUTLASTS, FITS = 1.5, 0.4
"""How long a copy takes of attention's time where it outlasts attention, and where attention outlasts it."""

Pair = tuple[Callable[[], Any] | None, Callable[[], Any] | None]
"""Attention and a copy that is started before it."""


@triton.jit(do_not_specialize=["n", "times"])
def copy_kernel(source, target, n, times, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Copy n elements so many times, by as many blocks as were launched."""
    for _ in range(times):
        for at in range(tl.program_id(0) * BLOCK, n, tl.num_programs(0) * BLOCK):
            i = at + tl.arange(0, BLOCK)
            tl.store(target + i, tl.load(source + i, mask=i < n), mask=i < n)


def margin_table(
    margins: tuple[int, ...] = (0, 4, 8, 16, 24), rows: int = ROWS, keys: int = KEYS
) -> list[dict[str, Any]]:
    """One row per kind of transfer, direction and margin."""
    heads, device = Heads(), torch.device("cuda", torch.cuda.current_device())
    chosen = choose_kernel(device, heads.dtype, heads.head_dim).kernel
    # What runs beside a transfer adds to results, which FlashAttention-4 cannot.
    kernel = "cute" if chosen == "fa4" else chosen
    source = torch.ones(BYTES // 4, device=device)
    target = torch.empty_like(source)
    beside = torch.cuda.Stream(priority=-1)
    attentions = {margin: _calls(kernel, rows, keys, heads, device, margin) for margin in margins}
    found = []
    for way in ("forward", "backward"):
        for where, channels in CHANNELS.items():
            copy = partial(copy_by_blocks, source, target, channels)
            (whole, _), (_, once) = in_turns([(attentions[0][way], None), (None, partial(copy, 1))], beside)
            longer, shorter = (partial(copy, max(1, round(share * whole / once))) for share in (OUTLASTS, FITS))
            # All margins in one run of turns: how fast the chip clocks differs more from minute to minute than what is
            # measured here.
            calls = [attentions[margin][way] for margin in margins]
            pairs = [(call, other) for call in calls for other in (None, longer, shorter)]
            (_, copy_alone), *times = in_turns([(None, shorter), *pairs], beside)
            for margin, at in zip(margins, range(0, len(times), 3), strict=True):
                (alone, _), (slowed, _), (delayed, copied) = times[at : at + 3]
                found.append(
                    {
                        "kernel": kernel,
                        "way": way,
                        "where": where,
                        "margin": margin,
                        "channels": channels,
                        "rows": rows,
                        "keys": keys,
                        "attention alone ms": alone,
                        "attention with copy ms": slowed,
                        "slowdown": slowed / alone,
                        "attention with short copy ms": delayed,
                        "copy alone ms": copy_alone,
                        "copy with attention ms": copied,
                        "link": copy_alone / copied,
                        "copy GB/s alone": 2 * BYTES / once / 1e6,
                    }
                )
    return found


def copy_by_blocks(source: Tensor, target: Tensor, channels: int, times: int) -> None:
    """Copy a tensor so many times by so many blocks, on the current stream."""
    copy_kernel[(channels,)](source, target, source.numel(), times, BLOCK=BLOCK, num_warps=16)


def _calls(
    kernel: str, rows: int, keys: int, heads: Heads, device: torch.device, margin: int
) -> dict[str, Callable[[], Any]]:
    from flexcp.measure.kernels.bench import our_calls

    settings = Settings(heads.head_dim**-0.5, sm_margin=margin)
    rectangle = masks.full().slices(rows).copy()
    rectangle[:, K1] = keys
    calls = our_calls(kernel, rectangle, random_tensors(max(rows, keys), heads, device), heads, settings)
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


def in_turns(
    pairs: Sequence[Pair], beside: torch.cuda.Stream, rounds: int = 9, warm_s: float = 0.12
) -> list[tuple[float, float]]:
    """Median milliseconds of attention and of the copy for each of several pairs of them,
    either of which may be missing.

    The pairs are timed in turns, after all of them ran for a while: a chip that has just done lighter work clocks
    higher for a tenth of a second, and what was timed then would not compare with the others.
    """
    begin = time.perf_counter()
    while time.perf_counter() - begin < warm_s:
        for pair in pairs:
            timed_together(*pair, beside)
    samples = [[timed_together(*pair, beside) for pair in pairs] for _ in range(rounds)]
    return [
        (statistics.median(s[i][0] for s in samples), statistics.median(s[i][1] for s in samples))
        for i in range(len(pairs))
    ]

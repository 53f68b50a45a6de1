"""The mutual slowdown of attention and a transfer on one GPU.

To the chip a transfer looks like a copy by a fixed number of blocks of 512 threads that stay until it is done. The copy
is started first, on a stream of high priority, as the executor does with real transfers. Attention follows and takes
every multiprocessor, or leaves a *margin* of them free. There are two kinds of transfers: *inside* a node with 16
blocks, which is what NCCL starts for peers on NVLink, and *across* nodes with 4 blocks, for peers behind a network
card. For each kind these are timed: attention alone, attention beside a longer copy, attention beside a shorter copy,
and the shorter copy alone and beside attention.
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
"""Elements that a block of the copy kernel copies at once."""
CHANNELS = {"inside": 16, "across": 4}
"""Number of blocks of a copy, by where the peer is."""
BYTES = 1 << 26
"""Bytes of the copied tensor."""
ROWS, KEYS = 8192, 5000
"""Rows and keys of the measured attention, a full rectangle.

It is as large as a slot of a plan with 8,192 tokens a rank.
"""
MARGINS = (0, 4, 8, 16, 24)
"""How many multiprocessors attention leaves free."""
HEAD_START = 10_000
"""Clock cycles by which a copy begins before attention."""
OUTLASTS, FITS = 1.5, 0.4
"""Duration of the longer and of the shorter copy, as a multiple of attention's time."""

Pair = tuple[Callable[[], Any] | None, Callable[[], Any] | None]
"""Attention, and a copy that is started before it; either may be missing."""


@triton.jit(do_not_specialize=["n", "times"])
def copy_kernel(source, target, n, times, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Copy ``n`` elements ``times`` times, using all launched blocks of threads."""
    for _ in range(times):
        for at in range(tl.program_id(0) * BLOCK, n, tl.num_programs(0) * BLOCK):
            i = at + tl.arange(0, BLOCK)
            tl.store(target + i, tl.load(source + i, mask=i < n), mask=i < n)


def margin_table() -> list[dict[str, Any]]:
    """Measure attention beside a copy; return one row for each direction, kind of transfer and margin."""
    heads, device = Heads(), torch.device("cuda", torch.cuda.current_device())
    chosen = choose_kernel(device, heads.dtype, heads.head_dim).kernel
    # Attention beside a transfer adds to existing results, which FlashAttention-4 cannot do.
    kernel = "cute" if chosen == "fa4" else chosen
    source = torch.ones(BYTES // 4, device=device)
    target = torch.empty_like(source)
    beside = torch.cuda.Stream(priority=-1)
    attentions = {margin: _calls(kernel, heads, device, margin) for margin in MARGINS}
    found = []
    for way in ("forward", "backward"):
        for where, channels in CHANNELS.items():
            copy = partial(copy_by_blocks, source, target, channels)
            (whole, _), (_, once) = in_turns([(attentions[0][way], None), (None, partial(copy, 1))], beside)
            longer, shorter = (partial(copy, max(1, round(share * whole / once))) for share in (OUTLASTS, FITS))
            # All margins take turns in one run, because the chip's clock changes more from minute to minute than the
            # differences measured here.
            calls = [attentions[margin][way] for margin in MARGINS]
            pairs = [(call, other) for call in calls for other in (None, longer, shorter)]
            (_, copy_alone), *times = in_turns([(None, shorter), *pairs], beside)
            for margin, at in zip(MARGINS, range(0, len(times), 3), strict=True):
                (alone, _), (slowed, _), (delayed, copied) = times[at : at + 3]
                found.append(
                    {
                        "kernel": kernel,
                        "way": way,
                        "where": where,
                        "margin": margin,
                        "channels": channels,
                        "rows": ROWS,
                        "keys": KEYS,
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
    """Copy a tensor ``times`` times with ``channels`` blocks of threads, on the current stream."""
    copy_kernel[(channels,)](source, target, source.numel(), times, BLOCK=BLOCK, num_warps=16)


def _calls(kernel: str, heads: Heads, device: torch.device, margin: int) -> dict[str, Callable[[], Any]]:
    """Return the forward and the backward call of attention that leaves ``margin`` multiprocessors free."""
    from flexcp.measure.kernels.bench import our_calls

    settings = Settings(heads.head_dim**-0.5, sm_margin=margin)
    rectangle = masks.full().slices(ROWS).copy()
    rectangle[:, K1] = KEYS
    calls = our_calls(kernel, rectangle, random_tensors(max(ROWS, KEYS), heads, device), heads, settings)
    return {"forward": calls.forward, "backward": calls.backward}


def timed_together(
    attention: Callable[[], Any] | None, copy: Callable[[], Any] | None, beside: torch.cuda.Stream
) -> tuple[float, float]:
    """Return the milliseconds of attention and of the copy, which is started first on the stream ``beside``.

    Both are queued behind other work, so that the host has launched both before the first begins. A missing call takes
    about 0.
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
    """Return the median milliseconds (of attention, of the copy) for each pair; copies run on the stream ``beside``.

    The pairs are timed in turns for ``rounds`` rounds, after all of them ran for ``warm_s`` seconds: after lighter work
    a chip clocks higher for a tenth of a second, and times from that period would not be comparable.
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

"""Timestamps: record the time at points of a pass, without waiting for the device.

On the CPU a stamp is the host's clock. On a GPU the host only queues work, so a stamp is a CUDA event, whose time is
read later, once the device has reached it.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from time import perf_counter_ns

import torch

Stamp = int | torch.cuda.Event


def stamper(device: torch.device) -> Callable[[], Stamp]:
    """Return the function that takes stamps of work on ``device``: CUDA events, or the host's clock in nanoseconds."""
    return _event if device.type == "cuda" else perf_counter_ns


def _event() -> torch.cuda.Event:
    """Record a CUDA event in the current stream."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def passed(stamps: list[Stamp]) -> int:
    """Return how many of the stamps, which are in order, the device has reached, without waiting for it."""
    count = len(stamps)
    while count and not _reached(stamps[count - 1]):
        count -= 1
    return count


def _reached(stamp: Stamp) -> bool:
    """Return whether the device has reached a stamp."""
    return isinstance(stamp, int) or stamp.query()


def gaps(stamps: list[Stamp]) -> list[int]:
    """Return the nanoseconds between neighbouring stamps; the device must have reached all of them."""
    return [_gap(a, b) for a, b in pairwise(stamps)]


def _gap(a: Stamp, b: Stamp) -> int:
    """Return the nanoseconds from one stamp to another."""
    if isinstance(a, int) and isinstance(b, int):
        return b - a
    return int(a.elapsed_time(b) * 1e6)  # type: ignore[union-attr, arg-type]


def host_times(stamps: list[Stamp]) -> list[int]:
    """Return the times of stamps on the host's clock, in nanoseconds.

    This waits for the device, so do not call it in the training loop.
    """
    if not stamps or isinstance(stamps[0], int):
        return [s for s in stamps if isinstance(s, int)]
    anchor = _event()
    anchor.synchronize()
    now = perf_counter_ns()
    return [now - int(s.elapsed_time(anchor) * 1e6) for s in stamps if not isinstance(s, int)]

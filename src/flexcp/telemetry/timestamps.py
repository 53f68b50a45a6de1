"""Timestamps: a moment of a pass, taken without waiting for anything.

On the CPU a stamp is the host's clock. On a GPU the host only queues work, so a stamp is an event in stream order, and
what it says is read later, when the device has passed it.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from time import perf_counter_ns

import torch

Stamp = int | torch.cuda.Event


def stamper(device: torch.device) -> Callable[[], Stamp]:
    """What takes stamps of work on ``device``."""
    return _event if device.type == "cuda" else perf_counter_ns


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def passed(stamps: list[Stamp]) -> int:
    """How many of these stamps, which are in order, the device has reached. Asks, and does not wait."""
    count = len(stamps)
    while count and not isinstance(stamps[count - 1], int) and not stamps[count - 1].query():  # type: ignore[union-attr]
        count -= 1
    return count


def gaps(stamps: list[Stamp]) -> list[int]:
    """Nanoseconds between each stamp and the next; all must have passed."""
    return [
        b - a if isinstance(a, int) and isinstance(b, int) else int(a.elapsed_time(b) * 1e6)  # type: ignore[union-attr, arg-type]
        for a, b in pairwise(stamps)
    ]


def host_times(stamps: list[Stamp]) -> list[int]:
    """The stamps on the host's clock, in nanoseconds. Waits for the device: not for the training loop."""
    if not stamps or isinstance(stamps[0], int):
        return [s for s in stamps if isinstance(s, int)]
    anchor = _event()
    anchor.synchronize()
    now = perf_counter_ns()
    return [now - int(s.elapsed_time(anchor) * 1e6) for s in stamps if not isinstance(s, int)]

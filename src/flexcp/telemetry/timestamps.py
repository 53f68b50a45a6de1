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
    while count and not _reached(stamps[count - 1]):
        count -= 1
    return count


def _reached(stamp: Stamp) -> bool:
    return isinstance(stamp, int) or stamp.query()


def gaps(stamps: list[Stamp]) -> list[int]:
    """Nanoseconds between each stamp and the next; all must have passed."""
    return [_gap(a, b) for a, b in pairwise(stamps)]


def _gap(a: Stamp, b: Stamp) -> int:
    if isinstance(a, int) and isinstance(b, int):
        return b - a
    return int(a.elapsed_time(b) * 1e6)  # type: ignore[union-attr, arg-type]


def host_times(stamps: list[Stamp]) -> list[int]:
    """The stamps on the host's clock, in nanoseconds. Waits for the device: not for the training loop."""
    if not stamps or isinstance(stamps[0], int):
        return [s for s in stamps if isinstance(s, int)]
    anchor = _event()
    anchor.synchronize()
    now = perf_counter_ns()
    return [now - int(s.elapsed_time(anchor) * 1e6) for s in stamps if not isinstance(s, int)]

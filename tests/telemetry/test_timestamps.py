"""Tests of how time stamps are read, from the host's clock and from the events of a simulated device that lags behind
the host.

No GPU is needed. Reading must never wait for an event that the device has not passed.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flexcp.telemetry import timestamps
from flexcp.telemetry.records import PassRecord, Times


class Device:
    """A simulated device. Its events are at 0, 1, 2, ... ms, and it has passed the first ``at`` of them."""

    def __init__(self) -> None:
        self.queued, self.at = 0, 0

    def event(self) -> Any:
        self.queued += 1
        return Event(self, self.queued - 1)


class Event:
    def __init__(self, device: Device, number: int) -> None:
        self.device, self.number = device, number

    def query(self) -> bool:
        return self.number < self.device.at

    def synchronize(self) -> None:
        self.device.at = max(self.device.at, self.number + 1)

    def elapsed_time(self, later: Event) -> float:
        assert self.query() and later.query(), "asked before the device was there"
        return float(later.number - self.number)


def on_device(device: Device, slots: int) -> PassRecord:
    """Return a pass all of whose work the host has queued on the device."""
    found = PassRecord("full", True, 3, slots, device.event, lambda p, e: None)
    with found.running():
        for _ in range(3 * slots):
            found.mark()
    return found


def test_a_queued_pass_is_where_the_device_is() -> None:
    device = Device()
    p = on_device(device, 2)
    assert p.done and not p.finished()
    assert (p.reached(), p.times()) == ("not begun", Times(0, 0, 0))
    device.at = 5
    assert (p.reached(), p.times()) == ("packs what leaves for stage 2", Times(2_000_000, 1_000_000, 1_000_000))
    device.at = 8
    assert p.finished() and p.reached() == "done"
    assert p.times() == Times(3_000_000, 2_000_000, 2_000_000)


def test_events_are_put_on_the_hosts_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device()
    p = on_device(device, 1)
    monkeypatch.setattr(timestamps, "_event", device.event)
    monkeypatch.setattr(timestamps, "perf_counter_ns", lambda: 50_000_000)
    assert timestamps.host_times(p.stamps) == [45_000_000, 46_000_000, 47_000_000, 48_000_000, 49_000_000]


def test_the_host_has_its_clock() -> None:
    take = timestamps.stamper(torch.device("cpu"))
    taken = [take(), take(), take()]
    assert timestamps.passed(taken) == 3
    assert timestamps.host_times(taken) == taken
    assert timestamps.gaps(taken) == [taken[1] - taken[0], taken[2] - taken[1]]  # type: ignore[operator]
    assert timestamps.host_times([]) == []

"""Proves that a step finds all of its device tables, and that another CUDA stream uses them only after waiting for the
stream that made them. The streams here only record what is asked of them.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import flexcp
from flexcp.executor.run.device_tables import TableStreams, tables_in
from flexcp.executor.torch_operators import on_their_device


class Stream:
    """A stream that records what it waits for."""

    def __init__(self) -> None:
        self.waited: list[Stream] = []

    def wait_stream(self, other: Stream) -> None:
        self.waited.append(other)


def test_a_change_of_stream_waits_and_tells_the_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two, told = Stream(), Stream(), list[Any]()
    table: Any = SimpleNamespace(is_cuda=True, record_stream=told.append)
    streams, device = TableStreams(), torch.device("cuda", 0)
    for current in (one, one, two, two, one):
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device, current=current: current)
        streams.use(device, lambda: [table])
    assert two.waited == [one] and one.waited == [two]
    assert told == [two, one]
    streams.use(torch.device("cpu"), lambda: 1 / 0)  # type: ignore[arg-type, return-value]


def test_all_tables_of_a_step_are_found() -> None:
    planner = flexcp.Planner(4, 2, 16, dtype="float32", cluster=flexcp.cluster("cpu", 1, 1), strategy="blocks")
    step = flexcp.bind(planner([9, 4], layout=[[*range(12, -1, -1)]]))
    assert step.tables.tensors() == []
    step.prepare("cpu")
    order = step.tables.order_on(torch.device("cpu"))
    assert any(x is order for x in step.tables.tensors())
    first, second = torch.zeros(3), torch.zeros(2)
    assert len(tables_in({"a": [first, (second, first)]}, None, 3)) == 2


def test_kernels_run_with_the_device_of_their_tensors_as_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[Any] = []

    class Device:
        def __init__(self, device: torch.device) -> None:
            self.device = device

        def __enter__(self) -> None:
            entered.append(self.device)

        def __exit__(self, *_: object) -> None:
            entered.append(None)

    monkeypatch.setattr(torch.cuda, "device", Device)
    q = SimpleNamespace(device=torch.device("cuda", 1))
    assert on_their_device(lambda x, y: (list(entered), y))((q,), 5) == ([torch.device("cuda", 1)], 5)
    assert entered == [torch.device("cuda", 1), None]
    on_their_device(lambda x: None)((torch.zeros(1),))
    assert len(entered) == 2

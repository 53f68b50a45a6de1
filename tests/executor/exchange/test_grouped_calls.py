"""Proves that messages are started in one call of a group where its backend has such calls, receives first."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from flexcp.executor.exchange.grouped_calls import start_together


class RecordingGroup:
    """A process group that records what is called; sends and receives return their own handle."""

    def __init__(self, supports_coalescing: bool) -> None:
        self.supports_coalescing = supports_coalescing
        self.calls: list[tuple[Any, ...]] = []

    def _get_backend(self, device: torch.device) -> Any:
        return SimpleNamespace(supports_coalescing=self.supports_coalescing)

    def _start_coalescing(self, device: torch.device) -> None:
        self.calls.append(("begin", device.type))

    def _end_coalescing(self, device: torch.device) -> str:
        self.calls.append(("end", device.type))
        return "handle of the call"

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> str:
        self.calls.append(("receive", peer, tensors[0].numel(), tag))
        return f"receive from {peer}"

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> str:
        self.calls.append(("send", peer, tensors[0].numel(), tag))
        return f"send to {peer}"


@pytest.mark.parametrize("together", [True, False])
def test_messages_are_started_receives_first_and_as_one_call_if_possible(
    together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "ProcessGroup", RecordingGroup)
    group: Any = RecordingGroup(together)
    receives, sends = [(torch.zeros(3), 2), (torch.zeros(1), 1)], [(torch.zeros(5), 1)]
    handles = start_together(group, receives, sends)
    messages = [("receive", 2, 3, 0), ("receive", 1, 1, 0), ("send", 1, 5, 0)]
    if together:
        assert group.calls == [("begin", "cpu"), *messages, ("end", "cpu")]
        assert handles == ["handle of the call"]
    else:
        assert group.calls == messages
        assert handles == ["receive from 2", "receive from 1", "send to 1"]


def test_groups_of_other_kinds_are_asked_for_no_backend() -> None:
    group: Any = RecordingGroup(True)  # as a subclass of torch's group in Python, with methods of its own
    assert start_together(group, [], [(torch.zeros(1), 0)]) == ["send to 0"]


def test_nothing_is_started_without_messages() -> None:
    group: Any = RecordingGroup(True)
    assert start_together(group, [], []) == group.calls == []

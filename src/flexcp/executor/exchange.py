"""Exchange: messages between ranks, as bytes. What is in them is :mod:`flexcp.executor.packing`'s job.

Receives and sends of a stage are posted together and never wait for each other, so no order of arrival can deadlock. Receives come first:
on gloo two ranks that send to each other get only half of a link otherwise (measured, benchmarks/box.py). On NCCL nothing
here waits on the host: a handle's ``wait()`` only orders the current stream after the transfer (with a time limit it would block), and
memory is kept until then, so the allocator may reuse it in stream order.
"""

from __future__ import annotations

from datetime import timedelta
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

ALIGNMENT = 16


def aligned_starts(sizes: list[int]) -> list[int]:
    """Where messages of these bytes begin when they lie side by side, and where the last one ends."""
    return [0, *accumulate(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)]


class Buffers:
    """The messages of a stage side by side in one allocation; ``sizes`` are (peer, bytes)."""

    def __init__(self, sizes: list[tuple[int, int]], device: torch.device) -> None:
        starts = aligned_starts([size for _, size in sizes])
        self.memory = torch.empty(starts[-1], dtype=torch.uint8, device=device)
        self.messages = [(peer, self.memory[at : at + size]) for (peer, size), at in zip(sizes, starts, strict=False)]


class Exchange:
    """Point-to-point messages of one pass over one process group; without a group there is nobody to talk to."""

    def __init__(
        self, group: dist.ProcessGroup | None, device: torch.device, sent: list[int], timeout: timedelta
    ) -> None:
        self.group, self.sent = group, sent
        self._limit = timeout if device.type == "cpu" else None
        self._sending: list[tuple[dist.Work, Tensor]] = []
        self._receiving: list[dist.Work] = []
        self._arriving: Buffers | None = None

    def post(self, stage: int, sends: Buffers, receives: Buffers) -> None:
        """Start all transfers of a stage."""
        operations = [
            dist.P2POp(dist.irecv, message, group=self.group, tag=stage, group_peer=peer)
            for peer, message in receives.messages
        ]
        for peer, message in sends.messages:
            self.sent[peer] += message.numel()
            operations.append(dist.P2POp(dist.isend, message, group=self.group, tag=stage, group_peer=peer))
        self._arriving = receives
        if operations:
            works = dist.batch_isend_irecv(operations)
            # NCCL answers a whole batch with one handle, gloo with one for each operation.
            each, first = len(works) == len(operations), len(receives.messages)
            self._receiving = works[:first] if each else works
            self._sending += [(work, sends.memory) for work in (works[first:] if each else works)]

    def arrived(self) -> Buffers | None:
        """Wait for the stage posted last; its messages, peer by peer in a fixed order."""
        for work in self._receiving:
            self._wait(work)
        arrived, self._receiving, self._arriving = self._arriving, [], None
        return arrived

    def finish(self) -> None:
        """Wait until everything sent has left."""
        for work, _ in self._sending:
            self._wait(work)
        self._sending = []

    def _wait(self, work: dist.Work) -> None:
        if self._limit is None:
            work.wait()
        else:
            work.wait(self._limit)

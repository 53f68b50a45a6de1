"""Arena: the one buffer in which a step's passes work, laid out by :mod:`flexcp.plan.memory`.

A pass leases the arena, works in views of it, and gives it back; the next layer, mask or direction takes the same
bytes. It is as large as the largest of them needs, allocated once, and may be handed from step to step
(``bind(..., arena=step.arena)``), growing when a plan needs more. What a pass returns to its caller never lies in it.

Why bytes may be used again, inside a pass and by the next one:

- On a CPU everything is done when the call returns, but for messages. :meth:`Exchange.arrived` waits for what a stage
  brings, and until what was sent in the stage before has left; only then is anything else laid in those bytes. That is
  how the layout counts their lives, and ``finish`` waits for the last ones before the pass gives the arena back.
- On a GPU the same sentences hold in stream order. All copies and kernels of a pass are queued on the current stream;
  the exchange starts after what is queued there, and ``arrived`` makes the current stream wait for it. So whatever is
  queued later on that stream finds the bytes free. A lease on another stream first waits, on the device, for the event
  that the last lease left behind.
- Two passes never share bytes at one time: a pass that finds the arena taken (another thread, another model with the
  same arena) works in an allocation of its own.
- After an error a message may still be on its way into the arena. Its bytes are given up then, not used again: whoever
  still writes into them holds them alive.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from threading import Lock

import torch
from torch import Tensor

from flexcp.plan.memory import aligned_starts


class Arena:
    """Bytes on a device that passes lease one after the other."""

    def __init__(self) -> None:
        self._least = 0
        self._memory: Tensor | None = None
        self._left: torch.cuda.Event | None = None
        self._lock = Lock()

    @property
    def size(self) -> int:
        """Bytes allocated now."""
        return 0 if self._memory is None else self._memory.numel()

    def reserve(self, size: int) -> None:
        """Allocate at least this much when memory is next needed."""
        self._least = max(self._least, size)

    @contextmanager
    def lease(self, size: int, device: torch.device) -> Iterator[Tensor]:
        """``size`` bytes for one pass, uint8; whoever comes meanwhile gets others."""
        if size == 0 or not self._lock.acquire(blocking=False):
            yield _allocated(size, device)
            return
        try:
            memory = self._ready(size, device)
            yield memory[:size]
            if device.type == "cuda":
                self._left = torch.cuda.Event()
                self._left.record(torch.cuda.current_stream(device))
        except BaseException:
            self._memory = self._left = None
            raise
        finally:
            self._lock.release()

    def _ready(self, size: int, device: torch.device) -> Tensor:
        memory = self._memory
        if memory is None or memory.numel() < size or memory.device != device:
            # The old bytes go first: the two need not fit side by side.
            self._memory = self._left = memory = None
            self._memory = memory = _allocated(max(size, self._least), device)
        elif self._left is not None:
            stream = torch.cuda.current_stream(device)
            stream.wait_event(self._left)
            memory.record_stream(stream)
        return memory


class Buffers:
    """The messages of a stage side by side in ``memory``; ``sizes`` are (peer, bytes)."""

    def __init__(self, sizes: list[tuple[int, int]], memory: Tensor) -> None:
        starts = aligned_starts([size for _, size in sizes])
        self.memory = memory[: starts[-1]]
        self.messages = [(peer, self.memory[at : at + size]) for (peer, size), at in zip(sizes, starts, strict=False)]

    @classmethod
    def holding(cls, messages: Mapping[int, Tensor]) -> Buffers:
        """Contiguous tensors as they are, each a message to or from a peer."""
        found = cls([], torch.empty(0, dtype=torch.uint8))
        found.messages = [(peer, x.detach().view(-1).view(torch.uint8)) for peer, x in messages.items()]
        return found

    @classmethod
    def alone(cls, sizes: list[tuple[int, int]], device: torch.device) -> Buffers:
        """In memory of their own."""
        return cls(sizes, _allocated(aligned_starts([size for _, size in sizes])[-1], device))


def _allocated(size: int, device: torch.device) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, device=device)

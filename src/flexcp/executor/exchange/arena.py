"""Arena: the one buffer in which the passes of a step work, laid out by :mod:`flexcp.plan.memory`.

A pass (one direction of one attention layer) leases the arena, works in views of it, and gives it back; the next layer,
mask or direction uses the same bytes. The arena is as large as the largest of them needs, is allocated once, and may be
passed from step to step (``bind(..., arena=step.arena)``); it grows when a plan needs more. Tensors that a pass returns
never lie in the arena.

Why it is safe to use the bytes again, within a pass and by the next one:

- On a CPU all work but messages is complete when a call returns. :meth:`Exchange.arrived` waits until the messages of a
  stage have arrived and those that this rank sends in it have left; only then are their bytes used for something else.
  The layout assumes this, and ``finish`` waits for the last messages before the pass gives the arena back.
- On a GPU the same holds in the order of the CUDA stream. All copies and kernels of a pass are queued on the current
  stream, the exchange starts after them, and ``arrived`` makes the current stream wait for the exchange. So work that
  is queued later on that stream finds the bytes free. A lease on another stream first waits, on the device, for the
  event that the last lease recorded.
- Two passes never use the bytes at the same time: a pass that finds the arena leased (by another thread, or by another
  model with the same arena) works in an allocation of its own.
- After an error a message may still be arriving in the arena. The arena then drops its memory and never uses it again;
  the transport keeps it alive while it writes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from threading import Lock
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from flexcp.executor.kernels import lasting
from flexcp.plan.memory import aligned_starts

Made = TypeVar("Made")


class Arena:
    """A buffer on a device that passes lease one after the other."""

    def __init__(self) -> None:
        self._least = 0
        self._memory: Tensor | None = None
        self._kept: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
        """What was made of the memory, by what it was made for; forgotten with either."""
        self._left: torch.cuda.Event | None = None
        self._lock = Lock()

    @property
    def size(self) -> int:
        """The bytes that are allocated now."""
        return 0 if self._memory is None else self._memory.numel()

    def reserve(self, size: int) -> None:
        """Make the next allocation at least ``size`` bytes large; nothing is allocated now."""
        self._least = max(self._least, size)

    @contextmanager
    def lease(self, size: int, device: torch.device) -> Iterator[Tensor]:
        """Lend ``size`` bytes to one pass inside the ``with`` block; yields them as a uint8 tensor.

        While they are lent, another lease gets memory of its own. If the block raises, the arena drops its memory.
        """
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
            self._kept.clear()
            raise
        finally:
            self._lock.release()

    def kept(self, owner: object, memory: Tensor, make: Callable[[Tensor], Made]) -> Made:
        """Return ``make(memory)``, made once for an owner and the arena's own bytes.

        ``memory`` is what a lease yields; an owner always leases the same size. What is made must not refer to its
        owner, with which it is forgotten. Of memory that a second lease got for itself, nothing is kept.
        """
        own = self._memory
        if own is None or memory.data_ptr() != own.data_ptr():
            return make(memory)
        found: Made | None = self._kept.get(owner)
        if found is None:
            found = self._kept[owner] = make(memory)
        return found

    def _ready(self, size: int, device: torch.device) -> Tensor:
        """Return memory of at least ``size`` bytes that the last lease no longer uses; allocate it if needed."""
        memory = self._memory
        if memory is None or memory.numel() < size or memory.device != device:
            # Free the old memory first, so that both need not fit on the device together.
            self._kept.clear()
            self._memory = self._left = memory = None
            self._memory = memory = _allocated(max(size, self._least), device)
        elif self._left is not None:
            stream = torch.cuda.current_stream(device)
            stream.wait_event(self._left)
            memory.record_stream(stream)
        return memory


class Buffers:
    """The messages of a stage, side by side in ``memory`` (bytes); ``sizes`` has (peer, bytes) of each message.

    Each peer has at most one message. Messages begin at aligned offsets, so there may be gaps between them.
    """

    def __init__(self, sizes: list[tuple[int, int]], memory: Tensor) -> None:
        starts = aligned_starts([size for _, size in sizes])
        self.memory = memory[: starts[-1]]
        self._places = {peer: (self.memory, at, size) for (peer, size), at in zip(sizes, starts, strict=False)}
        self._parts: dict[tuple[int, int, int], Tensor] = {}
        assert len(self._places) == len(sizes), f"two messages of one peer: {sizes}"

    @property
    def messages(self) -> list[tuple[int, Tensor]]:
        """(Peer, tensor of bytes) of each message."""
        return [(peer, self.part(peer, 0, size)) for peer, (_, _, size) in self._places.items()]

    def part(self, peer: int, start: int, stop: int) -> Tensor:
        """Return bytes ``start`` to ``stop`` (exclusive) of the message of a peer, as a view that is made once."""
        found = self._parts.get((peer, start, stop))
        if found is None:
            memory, at, _ = self._places[peer]
            found = self._parts[peer, start, stop] = memory[at + start : at + stop]
        return found

    @classmethod
    def holding(cls, messages: Mapping[int, Tensor]) -> Buffers:
        """Use existing contiguous tensors, given by peer, as the messages, without a copy."""
        found = cls([], torch.empty(0, dtype=torch.uint8, device="cpu"))
        for peer, x in messages.items():
            memory = x.detach().view(-1).view(torch.uint8)
            found._places[peer] = (memory, 0, len(memory))
        return found

    @classmethod
    def alone(cls, sizes: list[tuple[int, int]], device: torch.device) -> Buffers:
        """Allocate new memory for messages; ``sizes`` has (peer, bytes) of each."""
        return cls(sizes, _allocated(aligned_starts([size for _, size in sizes])[-1], device))


def _allocated(size: int, device: torch.device) -> Tensor:
    """Return ``size`` uninitialised bytes on a device."""
    with lasting():
        return torch.empty(size, dtype=torch.uint8, device=device)

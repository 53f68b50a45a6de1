"""Device tables: the index maps and work lists that a step keeps on its device, and on which stream they may be used.

They are made where they are first needed, by a copy queued on the stream of that moment: in ``step.prepare`` or in a
pass. A pass on another stream waits, on the device, for all that is queued on the stream of the last one, so it finds
them whole; and the allocator is told that it reads them, so that their memory is not given away while it does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

HOLDERS = ("flexcp.executor.run.", "flexcp.executor.kernels.")
"""Modules whose objects hold tables."""


def tables_in(*prepared: Any) -> list[Tensor]:
    """Every tensor in what was prepared, each once."""
    return list(_tensors(prepared, set()))


def _tensors(x: Any, seen: set[int]) -> Iterator[Tensor]:
    if id(x) in seen:
        return
    seen.add(id(x))
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, dict):
        for value in list(x.values()):
            yield from _tensors(value, seen)
    elif isinstance(x, list | tuple):
        for value in x:
            yield from _tensors(value, seen)
    elif type(x).__module__.startswith(HOLDERS) and hasattr(x, "__dict__"):
        yield from _tensors(vars(x), seen)


class TableStreams:
    """The stream of each device that used a step's tables last."""

    def __init__(self) -> None:
        self._last: dict[torch.device, torch.cuda.Stream] = {}

    def use(self, device: torch.device, tables: Callable[[], list[Tensor]]) -> None:
        """Before tables are made or read on the current stream of ``device``."""
        if device.type != "cuda":
            return
        current, last = torch.cuda.current_stream(device), self._last.get(device)
        if last is not None and last != current:
            current.wait_stream(last)
            for table in tables():
                if table.is_cuda:
                    table.record_stream(current)
        self._last[device] = current

"""Device tables: make the index maps and work lists of a step safe to use on several CUDA streams.

The tables are copied to the device when they are first needed, in ``step.prepare`` or in a pass, on the stream that is
current then. If a later pass runs on another stream, that stream waits, on the device, for everything queued on the
last one, so the pass finds complete tables. The allocator is told that the new stream reads them, so that it does not
reuse their memory too early.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

HOLDERS = ("flexcp.executor.run.", "flexcp.executor.kernels.")
"""Prefixes of the modules whose objects may hold tables."""


def tables_in(*prepared: Any) -> list[Tensor]:
    """Return every tensor inside prepared programs, work lists and containers of them, each once."""
    return list(_tensors(prepared, set()))


def _tensors(x: Any, seen: set[int]) -> Iterator[Tensor]:
    """Yield the tensors inside an object; skip objects whose ids are in ``seen``, and add the ids of visited ones.

    Dicts, lists, tuples and objects of the modules in :data:`HOLDERS` are searched.
    """
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
    """Remembers, for each device, the CUDA stream that last used a step's tables."""

    def __init__(self) -> None:
        self._last: dict[torch.device, torch.cuda.Stream] = {}

    def use(self, device: torch.device, tables: Callable[[], list[Tensor]]) -> None:
        """Make the current stream of ``device`` safe for the tables; call it before they are made or read there.

        ``tables`` returns the tables; it is called only if another stream used them last. A CPU needs nothing.
        """
        if device.type != "cuda":
            return
        current, last = torch.cuda.current_stream(device), self._last.get(device)
        if last is not None and last != current:
            current.wait_stream(last)
            for table in tables():
                if table.is_cuda:
                    table.record_stream(current)
        self._last[device] = current

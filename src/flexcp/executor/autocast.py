"""Autocast: kernels run without it; a user's function that a backward runs again gets that of the forward."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import torch


def without_autocast(device_type: str) -> AbstractContextManager[Any]:
    """Return a context without autocast on this type of device; it does nothing where autocast is off, to save time."""
    return torch.autocast(device_type, enabled=False) if torch.is_autocast_enabled(device_type) else nullcontext()


@dataclass(frozen=True)
class Casts:
    """Whether and how autocast was on around a call: on the device of its tensors, and on the CPU."""

    states: tuple[tuple[str, bool, torch.dtype], ...]
    cached: bool

    @classmethod
    def around(cls, device_type: str) -> Casts:
        """Return what is on now, for tensors on this type of device."""
        kinds = dict.fromkeys((device_type, "cpu"))
        states = tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds)
        return cls(states, torch.is_autocast_cache_enabled())

    @property
    def on(self) -> bool:
        """Whether autocast was on for the tensors of the call."""
        return self.states[0][1]

    def again(self) -> ExitStack:
        """Return a context in which autocast is as it was."""
        stack = ExitStack()
        for kind, enabled, dtype in self.states:
            if enabled or torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, dtype, enabled, self.cached))
        return stack

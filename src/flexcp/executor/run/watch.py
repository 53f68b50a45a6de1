"""Watch: what the executor tells whoever watches it. Nobody does unless a step was bound with ``telemetry``.

A pass calls ``mark`` at fixed places: where it starts, then in every slot once the stage's transfers are in, once the next stage's are
packed and posted, and once the slot's work is queued, and at its end. A mark must not wait for the device. The room that watches is
:mod:`flexcp.telemetry`; the executor knows only these shapes of it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from flexcp.executor.kernels import Settings
    from flexcp.executor.step import Step
    from flexcp.plan.plan import Plan


class Watch(Protocol):
    """Follows one pass."""

    def running(self) -> AbstractContextManager[None]:
        """Around the whole pass; sees the error that ends it."""

    def mark(self) -> None:
        """The pass reached its next mark."""


class Watcher(Protocol):
    """Follows the steps it is bound to."""

    def planning(self) -> AbstractContextManager[None]:
        """Around the wait for the next step's plan."""

    def binding(self, plan: Plan) -> AbstractContextManager[None]:
        """Around a bind, which begins a step."""

    def watch(self, step: Step, mask: int, backward: bool, device: torch.device) -> Watch:
        """What follows the pass that comes next."""

    def after_forward(
        self, step: Step, mask: int, settings: Settings, qkv: tuple[Tensor, Tensor, Tensor], sinks: Tensor | None, out: Tensor, lse: Tensor
    ) -> None:  # fmt: skip
        """Look at the result of a forward, local rows in local order. Every rank of the step comes here in the same call."""

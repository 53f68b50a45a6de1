"""Step watcher: the interface by which a step reports to telemetry. It is used only by steps that were bound with
``telemetry``.

:mod:`flexcp.telemetry` implements the interface; the executor knows nothing else of that package.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from flexcp.executor.kernels import Settings
from flexcp.executor.run.pass_watch import Watch
from flexcp.plan.plan import Plan

if TYPE_CHECKING:
    from flexcp.executor.step import Step


class Watcher(Protocol):
    """Watches the steps that were bound with it."""

    def planning(self) -> AbstractContextManager[None]:
        """Return a context that surrounds the wait for the next step's plan."""

    def binding(self, plan: Plan) -> AbstractContextManager[None]:
        """Return a context that surrounds a ``bind``, which begins a step."""

    def watch(self, step: Step, mask: int, backward: bool, device: torch.device) -> Watch:
        """Return the watch of the step's next pass."""

    def after_forward(
        self,
        step: Step,
        mask: int,
        settings: Settings,
        qkv: tuple[Tensor, Tensor, Tensor],
        sinks: Tensor | None,
        out: Tensor,
        lse: Tensor,
    ) -> None:
        """Look at the inputs and results of a forward; all tensors hold this rank's rows in local order. Every rank of
        the step calls this in the same attention call.
        """

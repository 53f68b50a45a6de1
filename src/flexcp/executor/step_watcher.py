"""Step watcher: the interface by which a step reports to telemetry.

Only steps that were bound with ``telemetry`` use it. :mod:`flexcp.telemetry` implements the interface; the executor
knows nothing else of that package.
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
        """Return a context for the code that waits for the plan of the next step."""

    def binding(self, plan: Plan) -> AbstractContextManager[None]:
        """Return a context for the code that binds ``plan``, which begins a new step."""

    def watch(self, step: Step, mask: int, backward: bool, device: torch.device) -> Watch:
        """Return the watch of the step's next pass; ``mask`` is the index of the pass's mask in the plan's batch."""

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
        """Look at the inputs and results of a forward; all tensors but ``sinks`` hold this rank's rows in local order.

        ``mask`` is the index of the mask in the plan's batch. Every rank of the step calls this in the same attention
        call, so implementations may communicate.
        """

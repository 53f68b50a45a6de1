"""Step watcher: what a step tells whoever watches it. Nobody does unless a step was bound with ``telemetry``.

The room that watches is :mod:`flexcp.telemetry`; the executor knows only these shapes of it.
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
    """Follows the steps it is bound to."""

    def planning(self) -> AbstractContextManager[None]:
        """Around the wait for the next step's plan."""

    def binding(self, plan: Plan) -> AbstractContextManager[None]:
        """Around a bind, which begins a step."""

    def watch(self, step: Step, mask: int, backward: bool, device: torch.device) -> Watch:
        """What follows the pass that comes next."""

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
        """Look at the result of a forward, local rows in local order.
        Every rank of the step comes here in the same call.
        """

"""Loss watch: how a step's losses are divided and its gradients reduced, as far as it was said or a call saw it.

Whoever makes a share of the batch's loss says so (:meth:`LossWatch.say`), and what it was made for
(:meth:`LossWatch.check_reduction`). Attention tells which modules it runs in and when a backward reaches it. From both
follow one refusal, of shares made for another treatment of gradients than the modules give them, and one warning, of
averaged gradients of a loss that nobody spoke for. What modules show, and the words of both, are in
:mod:`flexcp.executor.losses.averaging`.
"""

from __future__ import annotations

import warnings

import torch
import torch.distributed as dist
from torch import Tensor

from flexcp.executor.losses.averaging import (
    FsdpModule,
    Gradients,
    reduction_of,
    running_average,
    running_fsdp_modules,
    uneven,
    unsaid_loss,
    wrong_factor,
)
from flexcp.executor.step_handles import live_steps
from flexcp.plan.placement import Placement


class LossWatch:
    """What one step knows of its losses."""

    def __init__(self, placement: Placement, group: dist.ProcessGroup | None) -> None:
        self._placement, self._group = placement, group
        self.averaged_by: str | None = None
        self.summed_by: str | None = None
        """Who averages or sums gradients over the step's ranks, where a call saw it."""
        self.said = False
        """Whether somebody says how the loss that the step's gradients come from is divided and reduced."""
        self.in_backward = False
        """Whether the backward that is running began at a loss that was said of the step."""
        self._fsdp_modules: list[FsdpModule] = []
        self._shares_for: Gradients | None = None
        """The modules of FSDP2 that attention ran in, and what the loss was made for until a backward has looked
        whether they do it.
        """

    def say(self, loss: Tensor) -> Tensor:
        """Note that ``loss``, or a loss of this tensor, is divided and reduced as it should be,
        once gradients come from it.

        A loss that is only looked at says nothing of the one that is trained on. What is compiled takes no hook, and is
        believed at once.
        """
        if loss.requires_grad and torch.compiler.is_compiling():
            self.said = True
        elif loss.requires_grad:
            loss.register_hook(self._enter)
        return loss

    def _enter(self, gradient: Tensor) -> None:
        self.said = self.in_backward = True
        # A backward that checkpointing runs inside this one is another to autograd, so the end of this one is what
        # counts.
        torch.autograd.Variable._execution_engine.queue_callback(self._leave)

    def _leave(self) -> None:
        self.in_backward = False

    def check_reduction(self, gradients: Gradients) -> None:
        """Raise for shares made for one treatment of gradients where the step's attention saw the other."""
        self._shares_for = gradients
        self._refuse(gradients, self.averaged_by, self.summed_by)

    def note_call(self, first: bool) -> None:
        """See inside which modules an attention call runs, the first of the step or another."""
        if first:
            self._fsdp_modules = running_fsdp_modules()
            averaged, summed = reduction_of(self._fsdp_modules, self._group)
            self.averaged_by, self.summed_by = self.averaged_by or averaged, self.summed_by or summed
        self.averaged_by = self.averaged_by or running_average(self._group)

    def note_backward(self) -> None:
        """Raise where FSDP2 was told after the loss to reduce gradients otherwise than the loss was made for:
        once a loss.

        Warn where gradients are averaged over uneven ranks, and nobody said of this loss how it was divided: once a
        step. One of several steps of a model (an encoder's) has no loss of its own, so that of another step in the same
        backward is enough.
        """
        if self._shares_for is not None:
            made_for, self._shares_for = self._shares_for, None
            self._refuse(made_for, *reduction_of(self._fsdp_modules, self._group), late=True)
        if self.averaged_by is None or self.said or any(step.losses.in_backward for step in live_steps()):
            return
        self.said = True
        counts = uneven(self._placement)
        if counts is not None:
            warnings.warn(unsaid_loss(self.averaged_by, *counts), stacklevel=2)

    def _refuse(self, gradients: Gradients, averaged_by: str | None, summed_by: str | None, late: bool = False) -> None:
        who = averaged_by if gradients == "summed" else summed_by
        if who is not None:
            raise ValueError(wrong_factor(who, gradients, self._placement.ranks, late))

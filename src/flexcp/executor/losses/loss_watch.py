"""Loss watch: check that a step's loss is divided in the way in which its gradients are reduced over ranks.

A *share* is this rank's part of the batch's loss, made for gradients that are summed or for gradients that are averaged
over ranks. ``step.loss`` and ``step.share`` report a share that they made (:meth:`LossWatch.report`), and what it was
made for (:meth:`LossWatch.check_reduction`). Attention reports the modules it runs in, and when a backward reaches it.
From both follow an error, if the modules reduce gradients otherwise than the share was made for, and a warning, if
gradients are averaged and no share was reported, or reduced over more or fewer ranks than those of the step.
:mod:`flexcp.executor.losses.averaging` and :mod:`flexcp.executor.losses.apart` inspect the modules and have the texts
of both.
"""

from __future__ import annotations

import warnings

import torch
import torch.distributed as dist
from torch import Tensor

from flexcp.executor.losses.apart import ranks_apart, unwrapped_parameters
from flexcp.executor.losses.averaging import (
    MIXED,
    FsdpModule,
    Gradients,
    calling_modules,
    reduction_of,
    running_average,
    running_fsdp_modules,
    uneven,
    unsaid_loss,
    wrong_factor,
    wrong_replicas,
)
from flexcp.executor.step_handles import live_steps
from flexcp.plan.placement import Placement


class LossWatch:
    """What one step knows about its losses and the reduction of their gradients."""

    def __init__(self, placement: Placement, group: dist.ProcessGroup | None) -> None:
        self._placement, self._group = placement, group
        self.averaged_by: str | None = None
        self.summed_by: str | None = None
        """Names of what averages, and of what sums, gradients over the step's ranks, if attention ran inside any."""
        self.settled = False
        """Whether no warning about an unreported loss is due: one was reported, or the check was made."""
        self.replicas_settled = False
        """Whether no warning about replicas is due: a framework divides losses by all labels, or the check was made."""
        self.in_backward = False
        """Whether a backward is running that began at a reported loss of this step."""
        self._fsdp_modules: list[FsdpModule] = []
        """The FSDP2 modules of the models that attention ran in."""
        self._apart: list[str] = []
        """Warnings that are due if modules around attention reduce gradients over too few ranks, or of a part only."""
        self._shares_for: Gradients | None = None
        """What the last loss was made for, until a backward has checked that the FSDP2 modules do that."""

    def report(self, loss: Tensor) -> Tensor:
        """Report that ``loss``, or a loss computed from this tensor, is divided as it should be; returns the tensor.

        The report counts once a gradient reaches the tensor: a loss that is only logged says nothing about the loss
        that is trained on. Compiled code takes no hooks, so there the report counts at once.
        """
        if loss.requires_grad and torch.compiler.is_compiling():
            self.settled = True
        elif loss.requires_grad:
            loss.register_hook(self._enter)
        return loss

    def _enter(self, gradient: Tensor) -> None:
        """Note that a backward began at a reported loss."""
        self.settled = self.in_backward = True
        # Checkpointing may run other backwards inside this one; the callback runs when this one ends.
        torch.autograd.Variable._execution_engine.queue_callback(self._leave)

    def _leave(self) -> None:
        """Note that the backward that began at a reported loss has ended."""
        self.in_backward = False

    def check_reduction(self, gradients: Gradients) -> None:
        """Note what the last loss was made for: gradients that are ``"summed"`` or ``"averaged"`` over ranks.

        Raise ValueError if attention ran inside a module that reduces gradients otherwise.
        """
        self._shares_for = gradients
        self._refuse(gradients, self.averaged_by, self.summed_by)

    def note_call(self, first: bool, first_step: bool) -> None:
        """Look for DDP and FSDP2 modules around a running attention call.

        ``first`` says that it is the step's first call; FSDP2 modules, and the ranks that all modules reduce over, are
        looked for only then. ``first_step`` says that it is the first step of its group; parameters outside of the
        modules are looked for only then, because that visits every module of the model.
        """
        if first:
            self._fsdp_modules = running_fsdp_modules()
            averaged, summed = reduction_of(self._fsdp_modules, self._group)
            self.averaged_by, self.summed_by = self.averaged_by or averaged, self.summed_by or summed
            self._apart = [found] if (found := ranks_apart(self._fsdp_modules, self._group)) else []
            if first_step and (found := unwrapped_parameters(list(calling_modules()), self._group)):
                self._apart.append(found)
        self.averaged_by = self.averaged_by or running_average(self._group)

    def note_backward(self) -> None:
        """Check the reduction when a backward reaches attention.

        Raise ValueError if FSDP2 was told, after the loss was made, to reduce gradients otherwise than the loss was
        made for; checked once for each loss. Warn once per step if gradients are averaged over ranks with different
        token counts and no share was reported. If a model has several steps (one for an encoder), some have no loss of
        their own; a reported loss of any step in the same backward is enough. Warn once per step if FSDP2 sums
        gradients over replicas too, if no wrapper reduces them over all ranks of the step, and if trained parameters
        are outside of all wrappers.
        """
        if self._shares_for is not None:
            made_for, self._shares_for = self._shares_for, None
            self._refuse(made_for, *reduction_of(self._fsdp_modules, self._group), late=True)
        self._warn_of_replicas()
        due, self._apart = self._apart, []
        for warning in due:
            warnings.warn(warning, stacklevel=2)
        if self.averaged_by is None or self.settled or any(step.losses.in_backward for step in live_steps()):
            return
        self.settled = True
        counts = uneven(self._placement)
        if counts is not None:
            warnings.warn(unsaid_loss(self.averaged_by, *counts), stacklevel=2)

    def _warn_of_replicas(self) -> None:
        """Warn once if FSDP2 sums gradients over more ranks than those of this step, and ``sum_gradients`` was not told
        how many replicas these are, or was told a wrong number.
        """
        if self.replicas_settled or not self._fsdp_modules:
            return
        self.replicas_settled = True
        wrong = wrong_replicas(self._fsdp_modules, self._group)
        if wrong is not None:
            warnings.warn(wrong, stacklevel=3)

    def _refuse(self, gradients: Gradients, averaged_by: str | None, summed_by: str | None, late: bool = False) -> None:
        """Raise ValueError if a module reduces gradients otherwise than a loss was made for.

        ``gradients`` is what the loss was made for, ``averaged_by`` and ``summed_by`` are the names of what averages
        and of what sums. ``late`` says that FSDP2's setting may have changed since the loss was computed.
        """
        who = averaged_by if gradients == "summed" else summed_by
        if who is not None and None not in reduction_of(self._fsdp_modules, self._group):
            raise ValueError(MIXED)
        if who is not None:
            raise ValueError(wrong_factor(who, gradients, self._placement.ranks, late))

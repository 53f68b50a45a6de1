"""The update after a forward, for loops in which every rank holds the whole model and a share of one loss.

Gradients and losses are summed over ranks, never averaged. ``group`` is None for a single process. The framework of a
sharded model sums gradients itself (:func:`flexcp.frameworks.fsdp.sum_gradients`).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn


def update(optimizer: torch.optim.Optimizer, loss: Tensor, group: dist.ProcessGroup | None) -> None:
    """Run the backward, sum gradients over ranks, and make one step of the optimizer; then clear the gradients."""
    loss.backward()
    sum_gradients((p for part in optimizer.param_groups for p in part["params"]), group)
    optimizer.step()
    optimizer.zero_grad()


def sum_gradients(parameters: Iterable[nn.Parameter], group: dist.ProcessGroup | None) -> None:
    """Replace each parameter's gradient by its sum over all ranks.

    A rank that did not use a parameter takes part with zeros.
    """
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        if group is not None:
            dist.all_reduce(parameter.grad, group=group)


def total_loss(loss: Tensor, group: dist.ProcessGroup | None) -> float:
    """Return the loss of the batch: the sum of all ranks' shares."""
    total = loss.detach().clone()
    if group is not None:
        dist.all_reduce(total, group=group)
    return float(total)

"""Update: what a loop does after its forward where every rank holds the whole model and its share of one loss.

Shares are summed over ranks, never averaged, gradients and loss alike. ``group`` is None for a process alone. A sharded
model's framework sums gradients itself (:func:`flexcp.frameworks.fsdp.sum_gradients`).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn


def update(optimizer: torch.optim.Optimizer, loss: Tensor, group: dist.ProcessGroup | None) -> None:
    """Backward, gradients summed over ranks, one step of the optimizer; gradients are gone after it."""
    loss.backward()
    sum_gradients((p for part in optimizer.param_groups for p in part["params"]), group)
    optimizer.step()
    optimizer.zero_grad()


def sum_gradients(parameters: Iterable[nn.Parameter], group: dist.ProcessGroup | None) -> None:
    """Each parameter's gradient becomes the sum of all ranks'; zero from a rank that did not use it, which must take
    part all the same.
    """
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        if group is not None:
            dist.all_reduce(parameter.grad, group=group)


def total_loss(loss: Tensor, group: dist.ProcessGroup | None) -> float:
    """The batch's loss, of which every rank holds a share."""
    total = loss.detach().clone()
    if group is not None:
        dist.all_reduce(total, group=group)
    return float(total)

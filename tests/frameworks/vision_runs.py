"""Functions that the tests of vision-language models share: some training steps, with gradients kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

Arrays = dict[str, np.ndarray]


def trained(vlm: Any, backward: Callable[[], float], steps: int) -> tuple[list[float], Arrays]:
    """Train some steps (``backward`` leaves gradients and returns the loss); return losses and first gradients."""
    optimizer, losses, gradients = torch.optim.AdamW(vlm.parameters(), lr=3e-3, eps=1e-6), [], {}
    for _ in range(steps):
        losses.append(backward())
        gradients = gradients or {n: p.grad.numpy().copy() for n, p in vlm.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
    return losses, gradients


def summed_backward(vlm: Any, loss: Tensor, group: dist.ProcessGroup) -> float:
    """Run the backward, sum gradients over ranks in place, and return the loss summed over ranks."""
    loss.backward()
    total = loss.detach().clone()
    dist.all_reduce(total, group=group)
    for parameter in vlm.parameters():
        dist.all_reduce(parameter.grad, group=group)
    return float(total)

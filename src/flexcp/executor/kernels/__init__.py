"""Kernels: attention of a work list on one device.

Every kernel has the same two functions, over *slices* in the rows of its arguments (T tokens, H query heads, G KV heads, D and V
head sizes; the H / G query heads of a KV head are neighbours):

    forward(q_THD, k_TGD, v_TGV, slices, settings, out_THV, lse_TH)
        adds the slices' attention to a running output and LSE (accumulator dtype; start with zeros and -inf)
    backward(q_THD, k_TGD, v_TGV, do_THV, lse_TH, delta_TH, slices, settings, dq_THD, dk_TGD, dv_TGV)
        adds the slices' gradients, from the complete LSE and delta = rowsum(do * out) - dlse
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Settings:
    """The scalars of an attention call: logits are ``softcap(scale * q.k)``."""

    scale: float
    softcap: float | None = None


class Kernel(Protocol):
    """A module with the two functions described above."""

    forward: Callable[..., None]
    backward: Callable[..., None]


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """What partial results are kept in: float32, or float64 for float64 inputs."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def merge(out: Tensor, lse: Tensor, more_out: Tensor, more_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Two partial attentions of the same rows as one. Rows that neither has seen (LSE -inf) stay zero."""
    total = torch.logaddexp(lse, more_lse)
    seen = torch.where(total == -torch.inf, 0.0, total)
    weight, more_weight = torch.exp(lse - seen), torch.exp(more_lse - seen)
    return out * weight[..., None] + more_out * more_weight[..., None], total


def find_kernel(name: str) -> Any:
    """The kernel module of that name: ``"cpu"`` (tiled) or ``"reference"`` (dense)."""
    from flexcp.executor.kernels import cpu, reference

    kernels = {"cpu": cpu, "reference": reference}
    if name not in kernels:
        raise ValueError(f"unknown kernel {name!r}; known kernels are {', '.join(kernels)}")
    return kernels[name]

"""Kernels: attention of a work list on one device.

Every kernel is a module with the same functions, over *slices* in the rows of its arguments (T tokens, H query heads, G
KV heads, D and V head sizes; the H / G query heads of a KV head are neighbours):

    prepare(slices, heads, kv_heads, head_dim, v_head_dim, device) -> work
        the slices ``[n, 6]`` as the kernel's own work list, on the device: made once, used by every layer and both
        directions
    forward(q_THD, k_TGD, v_TGV, work, settings, out_THV, lse_TH)
        adds the slices' attention to a running output and LSE (accumulator dtype; start with zeros and -inf)
    backward(q_THD, k_TGD, v_TGV, do_THV, lse_TH, delta_TH, work, settings, dq_THD, dk_TGD, dv_TGV)
        adds the slices' gradients, from the complete LSE and delta = rowsum(do * out) - dlse
    supports(device, dtype, head_dim, v_head_dim) -> str | None
        why the kernel cannot run such tensors, naming what it can run; None when it can

Arguments may be views of some heads of larger tensors. A module whose ``FRESH`` is True also takes ``settings.fresh``:
``out`` and ``lse`` of the forward and ``dq`` of the backward are then empty memory to be written, not added to, and may
be in the model's dtype (``lse`` not).

A module whose ``FINISHES`` is True takes more arguments, for rows that a list is the first or the last to add to:

    prepare(..., begins=rows, finishes=rows)
        runs of rows ``[n, 2]``, ascending, that this list begins and finishes
    forward(..., finished_THV=rounded)
        writes the rows that the list finishes, with all that was added to them before, to ``rounded``, in the model's
        dtype, and not to ``out``; ``out`` and ``lse`` may hold anything in the rows that it begins. Without it both
        begin as everywhere else, and rows stay in ``out``

A module may have a function for a dq that several lists add to one after the other, and nobody else:

    close_dq(dq_THD, settings)
        with ``settings.open_dq`` a backward may leave ``dq`` in an order and scale of its own, which is the same for
        every list of a model and for views of some heads; this turns it into the gradient, in place, once, before
        anybody else reads it or adds to it; with ``finished_THD`` (a module whose ``FINISHES`` is True) it writes it
        there, in the model's dtype

And one for a list whose rows nobody else adds to, each of which sees a key:

    backward_alone(q_THD, k_TGD, v_TGV, lse_TH, back, work, settings) -> dq, dk, dv in the model's dtype
        from the gradient of the output (:class:`flexcp.executor.kernels.sinks_and_delta.OutputGradient`), delta
        included
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Ints = NDArray[np.int64]
NO_ROWS: Ints = np.zeros((0, 2), np.int64)
"""What a list begins and finishes unless it is said."""

HOMES = {
    "cpu": "cpu",
    "reference": "reference",
    "triton": "triton.kernel",
    "hopper": "hopper.kernel",
    "cute": "cute.kernel",
    "fa4": "fa4",
    "stock": "stock",
}
"""Kernels by name, and the module of this package each lives in."""


@dataclass(frozen=True)
class Settings:
    """The scalars of an attention call: logits are ``softcap(scale * q.k)``."""

    scale: float
    softcap: float | None = None
    deterministic: bool = False
    """Bitwise the same gradients in every run."""
    sm_margin: int = 0
    """Multiprocessors left to others (communication kernels) by kernels that would otherwise take all."""
    fresh: bool = False
    """Results of queries (output, LSE, dq) are empty memory, and the slices touch every row of them. Write, do not add.
    """
    open_dq: bool = False
    """dq may be left to the kernel's ``close_dq`` to finish."""


class Kernel(Protocol):
    """A module with the functions described above."""

    prepare: Callable[..., Any]
    forward: Callable[..., None]
    backward: Callable[..., None]
    supports: Callable[..., str | None]


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """What partial results are kept in: float32, or float64 for float64 inputs."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def merge(out: Tensor, lse: Tensor, more_out: Tensor, more_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Two partial attentions of the same rows as one. Rows that neither has seen (LSE -inf) stay zero."""
    total = torch.logaddexp(lse, more_lse)
    seen = torch.where(total == -torch.inf, 0.0, total)
    weight, more_weight = torch.exp(lse - seen), torch.exp(more_lse - seen)
    return out * weight[..., None] + more_out * more_weight[..., None], total


def merge_into(out: Tensor, lse: Tensor, more_out: Tensor, more_lse: Tensor) -> None:
    """Add a partial attention of the same rows to ``out`` and ``lse``, in their dtypes."""
    total_out, total_lse = merge(out, lse, more_out, more_lse)
    out.copy_(total_out)
    lse.copy_(total_lse)


def uploaded(array: NDArray[Any], device: torch.device) -> Tensor:
    """An array on the device; to a GPU through pinned memory, so that the host does not wait."""
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """With ``device`` as the current one: Triton launches on the current device and its stream, wherever its arguments
    are.
    """
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@cache
def has_triton() -> bool:
    """Whether Triton is installed here."""
    return importlib.util.find_spec("triton") is not None


def find_kernel(name: str) -> Any:
    """The kernel module of that name."""
    if name not in HOMES:
        raise ValueError(f"unknown kernel {name!r}; known kernels are {', '.join(HOMES)}")
    return importlib.import_module(f"flexcp.executor.kernels.{HOMES[name]}")

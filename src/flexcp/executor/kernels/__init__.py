"""Kernels: compute the attention of a work list on one device.

Every kernel is a module with the same functions. A *slice* refers to rows of the arguments; a *work list* (or *list*)
is what a kernel makes of the slices of one call. Shape letters: T tokens, H query heads, G KV heads, D and V head sizes
of keys and values. The H / G query heads that share a KV head are adjacent.

    prepare(slices, heads, kv_heads, head_dim, v_head_dim, device) -> work
        Make the work list of the slices ``[n, 6]`` on the device. It is made once and used by every layer and both
        directions.
    forward(q_THD, k_TGD, v_TGV, work, settings, out_THV, lse_TH)
        Add the attention of the slices to a running output and LSE (accumulator dtype; they start at zero and -inf).
    backward(q_THD, k_TGD, v_TGV, do_THV, lse_TH, delta_TH, work, settings, dq_THD, dk_TGD, dv_TGV)
        Add the gradients of the slices, given the complete LSE and delta = rowsum(do * out) - dlse.
    supports(device, dtype, head_dim, v_head_dim) -> str | None
        Return why the kernel cannot run such tensors, naming what it can run; None if it can.

Arguments may be views of some heads of larger tensors. A module with ``FRESH = True`` also accepts ``settings.fresh``:
then ``out`` and ``lse`` of the forward and ``dq`` of the backward are uninitialised memory that is written and not
added to, and ``out`` and ``dq`` may be in the model's dtype.

A module with ``FINISHES = True`` takes more arguments, for rows that a list is the first or the last to add to (it
*begins* or *finishes* them):

    prepare(..., begins=rows, finishes=rows)
        Ranges of rows ``[n, 2]``, ascending, that this list begins and finishes.
    forward(..., finished_THV=rounded)
        Write the rows that the list finishes, including everything added to them before, to ``rounded`` in the model's
        dtype instead of to ``out``. ``out`` and ``lse`` may be uninitialised in the rows that the list begins. Without
        this argument, ``begins`` and ``finishes`` have no effect on results.

A module may have two functions for a dq to which only its own work lists add, one after the other:

    open_dq(dq_THD, lse_TH, delta_TH, work) -> opened
        Set a dq, which may be uninitialised, to 0 before ``work``, the first list that leaves it open. The backwards of
        all lists that leave it open get the result (``opened=``) and the number of their first head among the heads of
        that dq (``first_head=``). With ``states_TH`` (:mod:`flexcp.executor.kernels.dq_states`) only what the lists add
        to need be set.
    close_dq(dq_THD, settings, states_TH)
        With ``settings.open_dq``, backwards may leave dq *open*, in an order and scale of the kernel's own, which is
        the same for all lists of a model and for views of some heads. This function turns an open dq into the gradient,
        in place. Call it once, before anything else reads dq or adds to it. With ``finished_THD`` (only if
        ``FINISHES``) the gradient is written there instead, in the model's dtype; what comes from elsewhere, by its
        state, is left as it is.

And a module may have a function for a single list that touches every query row and whose results nothing else adds to:

    backward_alone(q_THD, k_TGD, v_TGV, lse_TH, back, work, settings) -> dq, dk, dv in the model's dtype
        Compute the gradients, and delta too, from the gradient of the output
        (:class:`flexcp.executor.kernels.sinks_and_delta.OutputGradient`).

In the files of GPU kernels a *program* is what Triton calls so: one block of GPU threads, not the program of a rank.
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
"""No rows: the default of ``begins`` and ``finishes``."""

HOMES = {
    "cpu": "cpu",
    "reference": "reference",
    "triton": "triton.kernel",
    "hopper": "hopper.kernel",
    "cute": "cute.kernel",
    "fa4": "fa4",
    "stock": "stock",
}
"""The kernels by name, and the module of this package that holds each."""


@dataclass(frozen=True)
class Settings:
    """The scalars of an attention call; logits are ``scale * q.k``, or ``softcap * tanh(scale * q.k / softcap)``."""

    scale: float
    softcap: float | None = None
    deterministic: bool = False
    """Whether gradients must be bitwise the same in every run."""
    sm_margin: int = 0
    """Multiprocessors that the kernel leaves free, for communication kernels."""
    fresh: bool = False
    """Whether output, LSE and dq are uninitialised memory, to be written and not added to.

    The slices of the work list must then touch every row of them.
    """
    open_dq: bool = False
    """Whether the kernel may leave dq *open*, in an order and scale of its own, for its ``close_dq`` to finish."""


class Kernel(Protocol):
    """A kernel module, with the functions that the docstring of this package describes."""

    prepare: Callable[..., Any]
    forward: Callable[..., None]
    backward: Callable[..., None]
    supports: Callable[..., str | None]


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of partial results for inputs of ``dtype``: float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def merge(out: Tensor, lse: Tensor, more_out: Tensor, more_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merge two partial attentions of the same rows, over different keys, and return their joint output and LSE.

    Rows that see no key in either stay zero, with an LSE of -inf.
    """
    total = torch.logaddexp(lse, more_lse)
    seen = torch.where(total == -torch.inf, 0.0, total)
    weight, more_weight = torch.exp(lse - seen), torch.exp(more_lse - seen)
    return out * weight[..., None] + more_out * more_weight[..., None], total


def merge_into(out: Tensor, lse: Tensor, more_out: Tensor, more_lse: Tensor) -> None:
    """Merge a partial attention of the same rows, over other keys, into ``out`` and ``lse``, in place."""
    total_out, total_lse = merge(out, lse, more_out, more_lse)
    out.copy_(total_out)
    lse.copy_(total_lse)


def uploaded(array: NDArray[Any], device: torch.device) -> Tensor:
    """Return an array as a tensor on the device; a GPU copies it from pinned memory, so the host does not wait."""
    with lasting():
        tensor = torch.from_numpy(array)
        if device.type == "cpu":
            return tensor
        return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def lasting() -> AbstractContextManager[Any]:
    """Return a context for making tensors that outlive a call, such as tables that are kept with a step.

    Under ``torch.inference_mode`` a new tensor is one that no later backward may save and no later pass may write to.
    """
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which ``device`` is the current CUDA device; it does nothing for other devices.

    Triton launches on the current device and its stream, wherever its arguments are.
    """
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@cache
def has_triton() -> bool:
    """Return whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None


def find_kernel(name: str) -> Any:
    """Return the kernel module with this name; raise ValueError if there is none."""
    if name not in HOMES:
        raise ValueError(f"unknown kernel {name!r}; known kernels are {', '.join(HOMES)}")
    return importlib.import_module(f"flexcp.executor.kernels.{HOMES[name]}")

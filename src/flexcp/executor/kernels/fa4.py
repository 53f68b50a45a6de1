"""The fa4 kernel (``flexcp[fa4]``): FlashAttention-4 for the work lists on which it is faster, else the CuTe kernel.

It has the interface of :mod:`flexcp.executor.kernels`. A *simple* list (:mod:`flexcp.executor.kernels.fa4_lists`) can
be one call of FlashAttention-4. Which kernel runs it is decided for each direction when the list is made, by estimated
cost; nothing is timed during training. The CuTe kernel computes everything else: other lists, results that several
lists add to, calls with a softcap, an SM margin or deterministic gradients, and forwards with sinks.

FlashAttention-4 is a pre-release, and its functions that take and return an LSE are not public. :func:`supports` checks
that they have the parameters which are used here.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flexcp import masks
from flexcp.executor.kernels import NO_ROWS, Ints, Settings, uploaded
from flexcp.executor.kernels.cute import kernel as cute_kernel
from flexcp.executor.kernels.cute.work import CuteWork
from flexcp.executor.kernels.fa4_lists import cheaper, form_of
from flexcp.executor.kernels.sinks_and_delta import OutputGradient

FRESH = True
FINISHES = True
FORWARD = {
    "softmax_scale",
    "causal",
    "window_size_left",
    "window_size_right",
    "return_lse",
    "out",
    "cu_seqlens_q",
    "max_seqlen_q",
}
BACKWARD = {"softmax_scale", "causal", "window_size_left", "window_size_right", "dlse", "cu_seqlens_k", "max_seqlen_k"}

useful_share = cute_kernel.useful_share


class Fa4Work(CuteWork):
    """A work list that also knows whether FlashAttention-4 is faster on it: ``foreign`` is (forward, backward).

    ``form`` is the list as one call of FlashAttention-4, or None if it cannot be one.
    """

    def __init__(
        self,
        slices: Ints,
        heads: int,
        kv_heads: int,
        head_dim: int,
        v_head_dim: int,
        device: torch.device,
        begins: Ints,
        finishes: Ints,
    ) -> None:
        super().__init__(slices, heads, kv_heads, head_dim, v_head_dim, device, begins=begins, finishes=finishes)
        self.form = form_of(slices)
        self.foreign = (False, False) if self.form is None else cheaper(self.form, int(masks.area(slices).sum()), heads)
        if self.form is not None and len(self.form.rows_at) > 2:
            at = (self.form.rows_at, self.form.keys_at)
            self.borders = [uploaded(x.astype(np.int32), device) for x in at]
            self.longest = [int(np.diff(x).max()) for x in at]

    def call(self, q: Tensor, k: Tensor, backward: bool, settings: Settings) -> dict[str, Any] | None:
        """Return the keyword arguments of the FlashAttention-4 call on these tensors; None if the CuTe kernel runs."""
        if self.form is None or not self.foreign[backward] or settings.softcap is not None or settings.sm_margin:
            return None
        if (len(q), len(k)) != (int(self.form.rows_at[-1]), int(self.form.keys_at[-1])):
            return None
        found = {"softmax_scale": settings.scale, **self.form.window}
        if len(self.form.rows_at) > 2:
            found |= {"cu_seqlens_q": self.borders[0], "cu_seqlens_k": self.borders[1]}
            found |= {"max_seqlen_q": self.longest[0], "max_seqlen_k": self.longest[1]}
        return found


def supports(device: torch.device, dtype: torch.dtype, head_dim: int, v_head_dim: int) -> str | None:
    """Return why this kernel cannot run tensors like these, naming what it can run; None if it can."""
    return cute_kernel.supports(device, dtype, head_dim, v_head_dim) or _missing()


@cache
def _missing() -> str | None:
    """Return a message on what the installed FlashAttention-4 lacks; None if it has all that is used here."""
    try:
        functions = _functions()
    except (ImportError, AttributeError) as error:
        return f"FlashAttention-4 cannot be imported here ({error}; pip install flexcp[fa4])"
    for function, used in zip(functions, (FORWARD, BACKWARD), strict=True):
        lacking = used - set(inspect.signature(function).parameters)
        if lacking:
            return f"this FlashAttention-4 has no {', '.join(sorted(lacking))} in {function.__name__}; 4.0.0b36 has"
    return None


@cache
def _functions() -> tuple[Any, Any]:
    """Return FlashAttention-4's forward and backward functions."""
    from flash_attn.cute import interface

    return interface._flash_attn_fwd, interface._flash_attn_bwd


def prepare(
    slices: Ints,
    heads: int,
    kv_heads: int,
    head_dim: int,
    v_head_dim: int,
    device: torch.device,
    begins: Ints = NO_ROWS,
    finishes: Ints = NO_ROWS,
) -> Fa4Work:
    """Make the work list of ``slices``, for every layer and for forward and backward.

    Raises NotImplementedError if the kernel does not support the device or head sizes.
    """
    reason = supports(device, torch.bfloat16, head_dim, v_head_dim)
    if reason:
        raise NotImplementedError(reason)
    return Fa4Work(slices, heads, kv_heads, head_dim, v_head_dim, device, begins, finishes)


def forward(
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGV: Tensor,
    work: Fa4Work,
    settings: Settings,
    out_THV: Tensor,
    lse_TH: Tensor,
    finished_THV: Tensor | None = None,
) -> None:
    """Add the slices' attention to ``out`` and ``lse``; with ``settings.fresh`` overwrite them.

    Rows that the list finishes (no later list adds to them) are written to ``finished`` instead of ``out``, if it is
    given.
    """
    call = work.call(q_THD, k_TGD, False, settings) if settings.fresh and out_THV.dtype == q_THD.dtype else None
    if call is None:
        cute_kernel.forward(q_THD, k_TGD, v_TGV, work, settings, out_THV, lse_TH, finished_THV)
        return
    tensors = _batched(work, q_THD, k_TGD, v_TGV, out_THV)
    lse = _functions()[0](*tensors[:3], out=tensors[3], return_lse=True, **call)[1]
    lse_TH.copy_(lse.reshape(lse_TH.shape[::-1]).T)


backward = cute_kernel.backward
open_dq = cute_kernel.open_dq
close_dq = cute_kernel.close_dq


def backward_alone(
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGV: Tensor,
    lse_TH: Tensor,
    back: OutputGradient,
    work: Fa4Work,
    settings: Settings,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk and dv in the model's dtype; the slices must touch every query row."""
    call = work.call(q_THD, k_TGD, True, settings)
    if call is None:
        return cute_kernel.backward_alone(q_THD, k_TGD, v_TGV, lse_TH, back, work, settings)
    assert back.out is not None
    tensors = _batched(work, q_THD, k_TGD, v_TGV, back.out, back.do)
    lse, dlse = (None if x is None else _by_head(work, x) for x in (lse_TH, back.dlse))
    dq, dk, dv = _functions()[1](*tensors, lse, dlse=dlse, **call)[:3]
    return dq.view(q_THD.shape), dk.view(k_TGD.shape), dv.view(v_TGV.shape)


def _batched(work: Fa4Work, *tensors: Tensor) -> list[Tensor]:
    """Add a batch dimension of 1 to each tensor if the list is one document; several documents need none."""
    assert work.form is not None
    return list(tensors) if len(work.form.rows_at) > 2 else [x[None] for x in tensors]


def _by_head(work: Fa4Work, rows_TH: Tensor) -> Tensor:
    """Return statistics (LSE or its gradient) in the layout of FlashAttention-4, float32 ``[heads, rows]``.

    With one document there is a batch dimension of 1 in front.
    """
    return _batched(work, rows_TH.float().T.contiguous())[0]

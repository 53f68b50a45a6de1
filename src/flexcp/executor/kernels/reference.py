"""The reference kernel: dense attention in plain torch, slow and easy to check; tests compare other kernels with it.

Products accumulate in the accumulator dtype. Probabilities are rounded to the dtype of the inputs before they are
multiplied with the values, as low-precision kernels do.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flexcp.executor.kernels import Ints, Settings, accumulator_dtype, merge_into
from flexcp.executor.kernels.masked_product import seen_product

FRESH = False


def supports(device: torch.device, dtype: torch.dtype, head_dim: int, v_head_dim: int) -> str | None:
    """Return None: this kernel runs any tensors on any device."""
    return None


def prepare(slices: Ints, heads: int, kv_heads: int, head_dim: int, v_head_dim: int, device: torch.device) -> Ints:
    """Return the slices, which are this kernel's work list."""
    return slices


def forward(
    q_THD: Tensor, k_TGD: Tensor, v_TGV: Tensor, slices: Ints, settings: Settings, out_THV: Tensor, lse_TH: Tensor
) -> None:
    """Add the attention of the slices to the running ``out`` and ``lse``, in place."""
    share = q_THD.shape[1] // k_TGD.shape[1]
    logits_HQK, _, hidden_QK = _logits(q_THD, k_TGD, slices, settings)
    lse_HQ = torch.logsumexp(logits_HQK, dim=-1)
    p_HQK = torch.exp(logits_HQK - torch.where(lse_HQ == -torch.inf, 0.0, lse_HQ)[..., None])
    v_HKV = _by_head(v_TGV).repeat_interleave(share, 0)
    more_HQV = seen_product(p_HQK.to(v_TGV.dtype).to(v_HKV.dtype), hidden_QK, v_HKV)
    merge_into(out_THV, lse_TH, more_HQV.transpose(0, 1), lse_HQ.T)


def backward(
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGV: Tensor,
    do_THV: Tensor,
    lse_TH: Tensor,
    delta_TH: Tensor,
    slices: Ints,
    settings: Settings,
    dq_THD: Tensor,
    dk_TGD: Tensor,
    dv_TGV: Tensor,
) -> None:
    """Add the gradients of the slices to ``dq``, ``dk`` and ``dv``, in place."""
    groups, share = k_TGD.shape[1], q_THD.shape[1] // k_TGD.shape[1]
    logits_HQK, slope_HQK, hidden_QK = _logits(q_THD, k_TGD, slices, settings)
    lse_TH, delta_TH = (x.to(accumulator_dtype(q_THD.dtype)) for x in (lse_TH, delta_TH))
    lse_HQ1 = lse_TH.T[..., None]
    p_HQK = torch.exp(logits_HQK - torch.where(lse_HQ1 == -torch.inf, 0.0, lse_HQ1))
    do_HQV = _by_head(do_THV)
    dp_HQK = do_HQV @ _by_head(v_TGV).repeat_interleave(share, 0).transpose(1, 2)
    ds_HQK = p_HQK * (dp_HQK - delta_TH.T[..., None]) * slope_HQK * settings.scale
    # Hidden pairs are zero already, unless a row's LSE, a value or a gradient is not finite.
    p_HQK, ds_HQK = (x.to(q_THD.dtype).to(x.dtype).masked_fill(hidden_QK, 0.0) for x in (p_HQK, ds_HQK))
    dq_THD += seen_product(ds_HQK, hidden_QK, _by_head(k_TGD).repeat_interleave(share, 0)).transpose(0, 1)
    dk_HKD = seen_product(ds_HQK.transpose(1, 2), hidden_QK.T, _by_head(q_THD))
    dv_HKV = seen_product(p_HQK.transpose(1, 2), hidden_QK.T, do_HQV)
    dk_TGD += dk_HKD.unflatten(0, (groups, share)).sum(1).transpose(0, 1)
    dv_TGV += dv_HKV.unflatten(0, (groups, share)).sum(1).transpose(0, 1)


def _by_head(x_THD: Tensor) -> Tensor:
    """Return the tensor as ``[head, row, D]`` in the accumulator dtype."""
    return x_THD.transpose(0, 1).to(accumulator_dtype(x_THD.dtype))


def _logits(q_THD: Tensor, k_TGD: Tensor, slices: Ints, settings: Settings) -> tuple[Tensor, Tensor, Tensor]:
    """Return the masked logits, the derivative of the softcap (1 without one), and a boolean matrix of hidden pairs."""
    share = q_THD.shape[1] // k_TGD.shape[1]
    s_HQK = _by_head(q_THD) @ _by_head(k_TGD).repeat_interleave(share, 0).transpose(1, 2) * settings.scale
    slope_HQK = torch.ones_like(s_HQK)
    if settings.softcap is not None:
        s_HQK = settings.softcap * torch.tanh(s_HQK / settings.softcap)
        slope_HQK = 1 - (s_HQK / settings.softcap) ** 2
    hidden_QK = ~dense_mask(slices, len(q_THD), len(k_TGD)).to(s_HQK.device)
    return s_HQK.masked_fill(hidden_QK, -torch.inf), slope_HQK, hidden_QK


def dense_mask(slices: Ints, queries: int, keys: int) -> Tensor:
    """Return a boolean matrix ``[queries, keys]`` that is true for the (query, key) pairs of the slices."""
    q, k = torch.arange(queries, device="cpu")[:, None], torch.arange(keys, device="cpu")[None, :]
    seen = torch.zeros(queries, keys, dtype=torch.bool, device="cpu")
    for *corners, lo, hi in slices.tolist():
        q0, q1, k0, k1 = (max(0, corner) for corner in corners)
        distance = k[:, k0:k1] - q[q0:q1]
        seen[q0:q1, k0:k1] |= (distance >= lo) & (distance <= hi)
    return seen

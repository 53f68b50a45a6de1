"""The CPU kernel: attention in plain torch, by tiles of rows and the keys that they see.

Each slice is cut into tiles of rows. A tile reads the keys from the first key that its first row sees to the last key
that its last row sees, and is masked only if the edge of the band crosses it. Query heads that share a KV head are
stacked into one matrix product. A tile is computed one precision above its inputs (float32 in float64), because CPU
ranks serve as a check for other kernels. The kernel also runs on a GPU, where it is correct and slow.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from flexcp.executor.kernels import Ints, Settings, merge_into
from flexcp.executor.kernels.masked_product import seen_product

FRESH = False
TILE_LOGITS = 1 << 21
"""The most logits of one tile: enough for fast matrix products, and few enough for the cache."""


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
    work = _working_dtype(q_THD.dtype)
    for rows, keys, band in _tiles(slices, q_THD.shape[1]):
        s_GRK, _, hidden = _logits(q_THD[rows], k_TGD[keys], band, settings)
        top = s_GRK.amax(-1, keepdim=True)  # every row of a tile sees a key, so this is finite
        p_GRK = torch.exp(s_GRK - top)
        total = p_GRK.sum(-1, keepdim=True)
        more = _heads_last(seen_product(p_GRK, hidden, _by_group(v_TGV[keys], work)) / total, q_THD.shape[1])
        more_lse = _heads_last(top + torch.log(total), q_THD.shape[1]).squeeze(-1)
        merge_into(out_THV[rows], lse_TH[rows], more, more_lse)


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
    heads, groups, work = q_THD.shape[1], k_TGD.shape[1], _working_dtype(q_THD.dtype)
    for rows, keys, band in _tiles(slices, heads):
        s_GRK, slope, hidden = _logits(q_THD[rows], k_TGD[keys], band, settings)
        p_GRK = torch.exp(s_GRK - _stacked(lse_TH[rows, :, None], groups, work))
        do_GRV = _stacked(do_THV[rows], groups, work)
        # Round dP like delta before the subtraction, so that a row with one key has a gradient of exactly zero.
        dp_GRK = (do_GRV @ _by_group(v_TGV[keys], work).transpose(1, 2)).to(delta_TH.dtype)
        change = (dp_GRK - _stacked(delta_TH[rows, :, None], groups, delta_TH.dtype)).to(work)
        ds_GRK = p_GRK * change * settings.scale
        if slope is not None:
            ds_GRK = ds_GRK * slope
        turned = None
        if hidden is not None:  # these are zero already, unless a row's LSE, a value or a gradient is not finite
            p_GRK, ds_GRK, turned = p_GRK.masked_fill(hidden, 0.0), ds_GRK.masked_fill(hidden, 0.0), hidden.T
        dq_THD[rows] += _heads_last(seen_product(ds_GRK, hidden, _by_group(k_TGD[keys], work)), heads)
        q_GRD = _stacked(q_THD[rows], groups, work)
        dk_TGD[keys] += seen_product(ds_GRK.transpose(1, 2), turned, q_GRD).transpose(0, 1)
        dv_TGV[keys] += seen_product(p_GRK.transpose(1, 2), turned, do_GRV).transpose(0, 1)


def _tiles(slices: Ints, heads: int) -> Iterator[tuple[slice, slice, tuple[int, int] | None]]:
    """Yield the tiles of all slices as (rows, keys, band), for ``heads`` query heads.

    ``band`` is the lowest and the highest ``key - row`` that attends, both counted from the tile's first key and row,
    or None if all rows see all keys. Slices must be trimmed, so that every row of them sees a key.
    """
    for q0, q1, k0, k1, lo, hi in slices.tolist():
        row = q0
        while row < q1:
            width = min(k1, row + hi + 1) - max(k0, row + lo)
            height = max(16, min(256, TILE_LOGITS // (width * heads)))
            stop = min(row + height, q1)
            first, last = max(k0, row + lo), min(k1, stop + hi)
            clear = first >= stop - 1 + lo and last - 1 <= row + hi
            yield slice(row, stop), slice(first, last), None if clear else (lo + row - first, hi + row - first)
            row = stop


def _logits(
    q: Tensor, k: Tensor, band: tuple[int, int] | None, settings: Settings
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the masked logits, the derivative of the softcap, and the hidden pairs.

    The derivative is None without a softcap. The hidden pairs are a boolean matrix ``[head in group x row, key]``, or
    None if there are none.
    """
    groups, work = k.shape[1], _working_dtype(k.dtype)
    s_GRK = _stacked(q, groups, work) @ _by_group(k, work).transpose(1, 2) * settings.scale
    slope = hidden = None
    if settings.softcap is not None:
        s_GRK = settings.softcap * torch.tanh(s_GRK / settings.softcap)
        slope = 1 - (s_GRK / settings.softcap) ** 2
    if band is not None:
        offset = torch.arange(len(k), device=k.device) - torch.arange(len(q), device=k.device)[:, None]
        hidden = ((offset < band[0]) | (offset > band[1])).repeat(s_GRK.shape[1] // len(q), 1)
        s_GRK = s_GRK.masked_fill(hidden, -torch.inf)
    return s_GRK, slope, hidden


def _working_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which a tile is computed: one step above its inputs, float64 for float32 and float64."""
    return torch.float64 if dtype in (torch.float32, torch.float64) else torch.float32


def _by_group(x_TGD: Tensor, work: torch.dtype) -> Tensor:
    """Return keys or values as ``[group, row, D]`` in the working dtype."""
    return x_TGD.transpose(0, 1).to(work)


def _stacked(x_THD: Tensor, groups: int, work: torch.dtype) -> Tensor:
    """Return queries as ``[group, head in group x row, D]`` in the working dtype."""
    split: Tensor = x_THD.to(work).unflatten(1, (groups, -1))
    return split.permute(1, 2, 0, 3).flatten(1, 2)


def _heads_last(x_GRD: Tensor, heads: int) -> Tensor:
    """Undo :func:`_stacked` and return ``[row, head, D]``."""
    groups = x_GRD.shape[0]
    split: Tensor = x_GRD.unflatten(1, (heads // groups, -1))
    return split.permute(2, 0, 1, 3).flatten(1, 2)

"""The stock kernel: torch's own FlashAttention for the slices that it can express, and the Triton kernel for the rest.

Every trimmed slice is a FlashAttention window: with the last row and the last key aligned, as ``varlen_attn`` counts,
row i sees the keys from ``left`` before it to ``right`` after it. But one call has one window, and its sequences must
follow each other in rows and in keys. So slices of the same window are arranged into *calls* in which both ascend; gaps
between slices become sequences without keys or without rows. Calls that are too small, and those beyond the first
``MOST_CALLS``, go to the Triton kernel. Results are merged by LSE.

FlashAttention is the operator behind ``torch.nn.attention.varlen``: FA2, or FA3 or FA4 after
``torch.nn.attention.activate_flash_attention_impl``. With a softcap or a deterministic backward, which its interface
does not have, the Triton kernel computes everything. An SM margin has no effect on FlashAttention.

FlashAttention's backward takes the LSE as an argument, so partial attention is possible, but computes ``delta`` itself
as rowsum(do * out). It is therefore given ``out = delta * do / |do|^2``, for which the result is delta; a row whose
``do`` is zero (only its LSE has a gradient) gets a tiny ``do``. Gradients of a call are rounded to the model's dtype.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flexcp import masks
from flexcp.executor.kernels import Ints, Settings, find_kernel, merge_into, uploaded
from flexcp.masks import HI, K0, K1, LO, Q0, Q1

FRESH = False
RAGGED = "triton"
LARGEST_HEAD = 256
DTYPES = (torch.bfloat16, torch.float16)
SMALLEST_CALL = 1 << 20
"""The fewest (query, key) pairs of a call; with fewer its launches and its merge cost more than they gain."""
MOST_CALLS = 8
"""The most FlashAttention calls of a work list."""


@dataclass(frozen=True)
class Call:
    """One call of FlashAttention: slices of one window, ascending in rows and keys.

    ``window`` is (left, right) in FlashAttention's convention, -1 for no limit. ``rows_at`` and ``keys_at`` are the
    borders of the sequences (``cu_seqlens``), the longest of which have ``longest_rows`` and ``longest_keys``.
    ``row_touched`` and ``key_touched`` say which rows and keys are in a slice.
    """

    window: tuple[int, int]
    slices: Ints
    rows_at: Tensor
    keys_at: Tensor
    longest_rows: int
    longest_keys: int
    row_touched: Tensor
    key_touched: Tensor


class WorkList:
    """Slices as FlashAttention calls (``dense``) and a rest for the Triton kernel.

    The Triton work lists of the rest (``ragged``) and of all slices (``whole``) are made when they are first needed.
    """

    def __init__(self, slices: Ints, sizes: tuple[int, int, int, int], device: torch.device) -> None:
        self.slices, self.sizes, self.device = slices, sizes, device
        self.dense, self.rest = split(slices)
        self._calls: dict[tuple[int, int], list[Call]] = {}

    def calls(self, rows: int, keys: int) -> list[Call]:
        """Return the FlashAttention calls over tensors of this many rows and keys, made on first use."""
        if (rows, keys) not in self._calls:
            made = [_call(window, slices, rows, keys, self.device) for window, slices in self.dense]
            self._calls[rows, keys] = made
        return self._calls[rows, keys]

    @cached_property
    def ragged(self) -> Any:
        return find_kernel(RAGGED).prepare(self.rest, *self.sizes, self.device)

    @cached_property
    def whole(self) -> Any:
        return find_kernel(RAGGED).prepare(self.slices, *self.sizes, self.device)


def supports(device: torch.device, dtype: torch.dtype, head_dim: int, v_head_dim: int) -> str | None:
    """Return why FlashAttention or the Triton kernel cannot run tensors like these; None if both can."""
    if device.type != "cuda":
        return f"FlashAttention runs on CUDA tensors; these are on {device}"
    if dtype not in DTYPES:
        return f"FlashAttention computes bfloat16 and float16; got {dtype}"
    if head_dim != v_head_dim or head_dim > LARGEST_HEAD or head_dim % 8:
        return (
            f"FlashAttention needs key and value heads of one size, a multiple of 8 up to {LARGEST_HEAD}; "
            f"got {head_dim} and {v_head_dim}"
        )
    why_not: str | None = find_kernel(RAGGED).supports(device, dtype, head_dim, v_head_dim)
    return why_not


def prepare(slices: Ints, heads: int, kv_heads: int, head_dim: int, v_head_dim: int, device: torch.device) -> WorkList:
    """Make the work list: split the slices into FlashAttention calls and a rest for the Triton kernel."""
    trimmed = masks.trim(slices.reshape(-1, 6))
    return WorkList(trimmed[~masks.is_empty(trimmed)], (heads, kv_heads, head_dim, v_head_dim), device)


def forward(
    q_THD: Tensor, k_TGD: Tensor, v_TGV: Tensor, work: WorkList, settings: Settings, out_THV: Tensor, lse_TH: Tensor
) -> None:
    """Add the attention of the work list's slices to the running ``out`` and ``lse``, in place."""
    if settings.softcap is not None:
        find_kernel(RAGGED).forward(q_THD, k_TGD, v_TGV, work.whole, settings, out_THV, lse_TH)
        return
    if len(work.rest):
        find_kernel(RAGGED).forward(q_THD, k_TGD, v_TGV, work.ragged, settings, out_THV, lse_TH)
    for call in work.calls(len(q_THD), len(k_TGD)):
        more_THV, more_HT = attend(q_THD, k_TGD, v_TGV, call, settings.scale)
        more_TH = more_HT.T.masked_fill(~call.row_touched[:, None], -torch.inf)
        merge_into(out_THV, lse_TH, more_THV.to(out_THV.dtype), more_TH)


def backward(
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGV: Tensor,
    do_THV: Tensor,
    lse_TH: Tensor,
    delta_TH: Tensor,
    work: WorkList,
    settings: Settings,
    dq_THD: Tensor,
    dk_TGD: Tensor,
    dv_TGV: Tensor,
) -> None:
    """Add the gradients of the work list's slices to ``dq``, ``dk`` and ``dv``, in place."""
    inputs, results = (q_THD, k_TGD, v_TGV, do_THV, lse_TH, delta_TH), (dq_THD, dk_TGD, dv_TGV)
    if settings.softcap is not None or settings.deterministic:
        find_kernel(RAGGED).backward(*inputs, work.whole, settings, *results)
        return
    if len(work.rest):
        find_kernel(RAGGED).backward(*inputs, work.ragged, settings, *results)
    calls = work.calls(len(q_THD), len(k_TGD))
    if not calls:
        return
    do, out = stand_in(do_THV, delta_TH)
    lse_HT = lse_TH.T.float().contiguous()
    for call in calls:
        found = attend_backward(do, q_THD, k_TGD, v_TGV, out, lse_HT, call, settings.scale)
        touched = (call.row_touched, call.key_touched, call.key_touched)
        for result, more, at in zip(results, found, touched, strict=True):
            result += torch.where(at[:, None, None], more, 0.0)


def split(slices: Ints) -> tuple[list[tuple[tuple[int, int], Ints]], Ints]:
    """Return (window, slices) of each call that is worth making, and the slices that are left over."""
    rows, keys = slices[:, Q1] - slices[:, Q0], slices[:, K1] - slices[:, K0]
    left, right = slices[:, K1] - slices[:, Q1] - slices[:, LO], slices[:, HI] + slices[:, Q1] - slices[:, K1]
    left, right = np.where(left >= keys - 1, -1, left), np.where(right >= rows - 1, -1, right)
    windows, group = np.unique(np.stack([left, right], axis=1), axis=0, return_inverse=True)
    calls = []
    for number, window in enumerate(windows.tolist()):
        found = slices[group.reshape(-1) == number]
        calls += [((window[0], window[1]), part) for part in _ascending(found)]
    worth = [int(masks.area(part).sum()) for _, part in calls]
    chosen = [i for i in np.argsort([-w for w in worth], kind="stable")[:MOST_CALLS] if worth[i] >= SMALLEST_CALL]
    rest = [part for i, (_, part) in enumerate(calls) if i not in chosen]
    return [calls[i] for i in chosen], np.concatenate(rest) if rest else slices[:0]


def _ascending(slices: Ints) -> list[Ints]:
    """Split slices greedily into lists in which both rows and keys ascend."""
    lists: list[list[list[int]]] = []
    for row in slices[np.lexsort((slices[:, K0], slices[:, Q0]))].tolist():
        for some in lists:
            if some[-1][Q1] <= row[Q0] and some[-1][K1] <= row[K0]:
                some.append(row)
                break
        else:
            lists.append([row])
    return [np.array(some, np.int64) for some in lists]


def _call(window: tuple[int, int], slices: Ints, rows: int, keys: int, device: torch.device) -> Call:
    """Make a call whose sequences cover all ``rows`` and all ``keys`` in order.

    Gaps between slices become sequences without keys or without rows.
    """
    row, key, at = 0, 0, [(0, 0)]
    row_touched, key_touched = np.zeros(rows, bool), np.zeros(keys, bool)
    for q0, q1, k0, k1 in [*slices[:, [Q0, Q1, K0, K1]].tolist(), [rows, rows, keys, keys]]:
        if q0 > row:
            at.append((q0, key))
        if k0 > key:
            at.append((q0, k0))
        if q1 > q0:
            at.append((q1, k1))
        row, key = q1, k1
        row_touched[q0:q1], key_touched[k0:k1] = True, True
    table = np.array(at, np.int32)
    longest = np.diff(table, axis=0).max(axis=0)
    rows_at, keys_at = (uploaded(np.ascontiguousarray(x), device) for x in table.T)
    touched = uploaded(row_touched, device), uploaded(key_touched, device)
    return Call(window, slices, rows_at, keys_at, int(longest[0]), int(longest[1]), *touched)


def attend(q: Tensor, k: Tensor, v: Tensor, call: Call, scale: float) -> tuple[Tensor, Tensor]:
    """Run the forward of a call and return output ``[T, H, V]`` and LSE ``[H, T]``."""
    found = torch.ops.aten._flash_attention_forward(
        q,
        k,
        v,
        call.rows_at,
        call.keys_at,
        call.longest_rows,
        call.longest_keys,
        0.0,
        call.window == (-1, 0),
        False,
        scale=scale,
        window_size_left=call.window[0],
        window_size_right=call.window[1],
    )
    return found[0], found[1]


def attend_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse_HT: Tensor, call: Call, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Run the backward of a call with the complete LSE, float32 ``[H, T]``, and return dq, dk and dv."""
    unused = torch.zeros(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device)
    dq, dk, dv = torch.ops.aten._flash_attention_backward(
        do,
        q,
        k,
        v,
        out,
        lse_HT,
        call.rows_at,
        call.keys_at,
        call.longest_rows,
        call.longest_keys,
        0.0,
        call.window == (-1, 0),
        *unused,
        scale=scale,
        window_size_left=call.window[0],
        window_size_right=call.window[1],
    )
    return dq, dk, dv


def stand_in(do_THV: Tensor, delta_TH: Tensor) -> tuple[Tensor, Tensor]:
    """Return (do, out) with rowsum(do * out) = delta, for a FlashAttention backward that computes delta itself.

    ``do`` is changed only in rows where it is zero and delta is not.
    """
    tiny = 2.0**-10 if do_THV.dtype == torch.float16 else 2.0**-40
    wide = do_THV.to(torch.float32, copy=True)
    square = wide.square().sum(-1)
    lost = (square == 0) & (delta_TH != 0)
    wide[..., 0] = torch.where(lost, tiny, wide[..., 0])
    square = torch.where(lost, tiny * tiny, square)
    ratio = torch.where(square == 0, 0.0, delta_TH.float() / torch.where(square == 0, 1.0, square))
    return wide.to(do_THV.dtype), (wide * ratio[..., None]).to(do_THV.dtype)

"""The Triton kernel: attention on any NVIDIA GPU from Ampere (sm80) on, and on the CPU by Triton's interpreter.

It has the interface of :mod:`flexcp.executor.kernels`. ``prepare`` makes a work list once for all layers of a step.
``forward`` and ``backward`` only launch kernels: the forward one over tiles of rows; the backward one over tiles of
keys, for dk and dv, and one over tiles of rows, for dq. ``launch_forward`` and ``launch_backward`` do the same with
blocks of given sizes. Long tiles of keys are split among programs, which add to dk and dv in any order; with
``settings.deterministic`` they are not split, and gradients are bitwise the same in every run.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from flexcp.executor.kernels import Ints, Settings
from flexcp.executor.kernels.tiles import tile_list, transposed, useful
from flexcp.executor.kernels.triton.arguments import aligned, base_of, columns, described, scales, strides
from flexcp.executor.kernels.triton.block_sizes import forward_blocks, keys_blocks, queries_blocks
from flexcp.executor.kernels.triton.forward import forward_kernel
from flexcp.executor.kernels.triton.keys import keys_kernel
from flexcp.executor.kernels.triton.queries import queries_kernel
from flexcp.executor.kernels.triton.statistics import pack_statistics
from flexcp.executor.kernels.triton.turns import CHUNK, item_order
from flexcp.executor.kernels.triton.work import Blocks, WorkList, check, multiprocessors

FRESH = True
LARGEST_HEAD, HEAD_STEP = 256, 8
"""Head sizes are multiples of ``HEAD_STEP`` up to ``LARGEST_HEAD``."""
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def prepare(slices: Ints, heads: int, kv_heads: int, head_dim: int, v_head_dim: int, device: torch.device) -> WorkList:
    """Make the work list of ``slices``, for every layer and for forward and backward.

    Raises NotImplementedError if the kernel does not support the device or head sizes, and ValueError if ``heads`` is
    no multiple of ``kv_heads``.
    """
    reason = supports(device, torch.bfloat16, head_dim, v_head_dim)
    if reason:
        raise NotImplementedError(reason)
    if kv_heads < 1 or heads % kv_heads:
        raise ValueError(f"query heads must be a multiple of KV heads; got {heads} and {kv_heads}")
    return WorkList(slices, heads, kv_heads, head_dim, v_head_dim, device)


def supports(device: torch.device, dtype: torch.dtype, head_dim: int, v_head_dim: int) -> str | None:
    """Return why this kernel cannot run tensors like these, naming what it can run; None if it can."""
    for size in (head_dim, v_head_dim):
        if not 0 < size <= LARGEST_HEAD or size % HEAD_STEP:
            pad = "Pad the heads with zeros to the next of these, or use" if size < LARGEST_HEAD else "Use"
            return (
                f"the triton kernel has head sizes that are multiples of {HEAD_STEP} up to {LARGEST_HEAD}; got {size}. "
                f'{pad} kernel="cpu" (plain torch, any size, slow)'
            )
    if dtype not in DTYPES:
        return f"the triton kernel computes {', '.join(map(str, DTYPES))}; got {dtype}"
    if device.type == "cuda":
        found = torch.cuda.get_device_capability(device)
        if found < (8, 0):
            return (
                f"the triton kernel needs an NVIDIA GPU of compute capability 8.0 (Ampere) or newer; "
                f"{torch.cuda.get_device_name(device)} has {found[0]}.{found[1]}"
            )
    elif not triton.knobs.runtime.interpret:
        return f'the triton kernel runs on CUDA tensors; got {device}. Use kernel="cpu" there'
    return None


def forward(
    q_THD: Tensor, k_TGD: Tensor, v_TGV: Tensor, work: WorkList, settings: Settings, out_THV: Tensor, lse_TH: Tensor
) -> None:
    """Add the slices' attention to ``out`` and ``lse``; with ``settings.fresh`` overwrite the rows of the work list."""
    blocks = forward_blocks(work, q_THD.dtype)
    launch_forward(q_THD, k_TGD, v_TGV, work, settings, out_THV, lse_TH, blocks)


def launch_forward(
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGV: Tensor,
    work: WorkList,
    settings: Settings,
    out_THV: Tensor,
    lse_TH: Tensor,
    blocks: Blocks,
) -> None:
    """Run :func:`forward` with blocks of the given sizes."""
    tiles = work.rows(blocks)
    if not len(tiles):
        return
    q, k, v = (aligned(x, work.unit) for x in (q_THD, k_TGD, v_TGV))
    check(work, supports, q, k, v, out_THV, lse_TH)
    pack = blocks.pack(work.share)
    programs = len(tiles) * (work.heads // pack)
    k_at, v_at = (described(x, blocks.n, 1) if blocks.tma else x for x in (k, v))
    forward_kernel[_grid(programs, settings.sm_margin, work.device)](
        q,
        k_at,
        v_at,
        out_THV,
        lse_TH,
        tiles.tiles,
        tiles.entries,
        *item_order(tiles, work.heads // pack, work),
        programs,
        *scales(settings, q.dtype),
        *strides(q, k, v, out_THV, lse_TH, unit=work.unit),
        SHARE=work.share,
        PACK=pack,
        SOFTCAP=settings.softcap is not None,
        FRESH=settings.fresh,
        **_sizes(q, work, blocks, settings),
    )


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
    """Add the slices' gradients to ``dq``, ``dk`` and ``dv``; with ``settings.deterministic`` always in the same order.

    With ``settings.fresh`` the work list's rows of dq are overwritten.
    """
    keys, queries = keys_blocks(work, q_THD.dtype), queries_blocks(work, q_THD.dtype)
    inputs = (q_THD, k_TGD, v_TGV, do_THV, lse_TH, delta_TH)
    launch_backward(*inputs, work, settings, dq_THD, dk_TGD, dv_TGV, keys, queries)


def launch_backward(
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
    keys: Blocks,
    queries: Blocks,
) -> None:
    """Run :func:`backward` with blocks of the given sizes for dk and dv (``keys``) and for dq (``queries``)."""
    if not len(work.rows(queries)):
        return
    q, k, v, do = (aligned(x, work.unit) for x in (q_THD, k_TGD, v_TGV, do_THV))
    check(work, supports, q, k, v, do, lse_TH, delta_TH, dq_THD, dk_TGD, dv_TGV)
    inputs = (q, k, v, do, lse_TH, delta_TH, work, settings)
    _launch_keys(*inputs, dk_TGD, dv_TGV, keys)
    _launch_queries(*inputs, dq_THD, queries)


def _launch_keys(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    lse: Tensor,
    delta: Tensor,
    work: WorkList,
    settings: Settings,
    dk: Tensor,
    dv: Tensor,
    blocks: Blocks,
) -> None:
    """Launch the kernel of dk and dv."""
    if settings.deterministic:
        tiles = work.keys(blocks)
        order = item_order(tiles, work.kv_heads, work)
    else:
        tiles = work.split_keys(blocks)
        order = (len(tiles), work.kv_heads, CHUNK)
    pack, programs, rows = blocks.pack(work.share), len(tiles) * work.kv_heads, len(q)
    packed = pack_statistics(lse, delta, pack, base_of(q.dtype))
    q_at, do_at = (described(x, blocks.m // pack, pack) if blocks.tma else x for x in (q, do))
    keys_kernel[_grid(programs, settings.sm_margin, work.device)](
        q_at,
        k,
        v,
        do_at,
        packed,
        dk,
        dv,
        tiles.tiles,
        tiles.entries,
        rows,
        work.heads,
        *order,
        programs,
        *scales(settings, q.dtype),
        *strides(q, k, v, do, dk, dv, unit=work.unit),
        SHARE=work.share,
        PACK=pack,
        SOFTCAP=settings.softcap is not None,
        SPLIT=not settings.deterministic,
        **_sizes(q, work, blocks, settings),
    )


def _launch_queries(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    lse: Tensor,
    delta: Tensor,
    work: WorkList,
    settings: Settings,
    dq: Tensor,
    blocks: Blocks,
) -> None:
    """Launch the kernel of dq."""
    tiles, pack = work.rows(blocks), blocks.pack(work.share)
    programs = len(tiles) * (work.heads // pack)
    k_at, v_at = (described(x, blocks.n, 1) if blocks.tma else x for x in (k, v))
    queries_kernel[_grid(programs, settings.sm_margin, work.device)](
        q,
        k_at,
        v_at,
        do,
        lse,
        delta,
        dq,
        tiles.tiles,
        tiles.entries,
        *item_order(tiles, work.heads // pack, work),
        programs,
        *scales(settings, q.dtype),
        *strides(q, k, v, do, lse, delta, dq, unit=work.unit),
        SHARE=work.share,
        PACK=pack,
        SOFTCAP=settings.softcap is not None,
        FRESH=settings.fresh,
        **_sizes(q, work, blocks, settings),
    )


def useful_share(slices: Ints, share: int, backward: bool) -> float:
    """Return the fraction of the (query, key) pairs in computed blocks that attend.

    It is an upper bound of the kernel's efficiency, and holds for bfloat16 heads of up to 128 on Hopper. ``share`` is
    the number of query heads per KV head.
    """
    forward, back = Blocks(128, 64, 4, 2, tma=True), Blocks(64, 64, 4, 2, tma=True)
    if not backward:
        rows = forward.m // forward.pack(share)
        return useful(slices, tile_list(slices, rows, forward.n), rows * forward.n)
    rows = back.m // back.pack(share)
    queries = useful(slices, tile_list(slices, rows, back.n), rows * back.n)
    keys = useful(slices, tile_list(transposed(slices), back.n, rows, odd_clear=False), rows * back.n)
    return 7 / (3 / queries + 4 / keys)  # three of seven products are dq's


def _grid(programs: int, margin: int, device: torch.device) -> tuple[int]:
    """Return the grid of a launch: one GPU program per item, or with an SM margin one per remaining multiprocessor.

    ``programs`` is the number of items (a tile with a group of heads).
    """
    if margin <= 0 or device.type != "cuda":
        return (programs,)
    return (min(programs, max(1, multiprocessors(device) - margin)),)


def _sizes(q: Tensor, work: WorkList, blocks: Blocks, settings: Settings) -> dict[str, Any]:
    """Return the constants and launch options that all kernels share."""
    return {
        "D": work.head_dim,
        "V": work.v_head_dim,
        "BLOCK_D": columns(work.head_dim),
        "BLOCK_V": columns(work.v_head_dim),
        "BLOCK_M": blocks.m,
        "BLOCK_N": blocks.n,
        "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32",
        "PERSISTENT": settings.sm_margin > 0,
        "EDGE_STAGES": blocks.edge_stages,
        "TMA": blocks.tma,
        "UNIT": work.unit,
        "num_warps": blocks.warps,
        "num_stages": blocks.stages,
    }

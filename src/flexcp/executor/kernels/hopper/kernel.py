"""The Hopper kernel: head sizes 64 and 128 in bf16 or fp16 on sm90, in Gluon.

It has the interface of :mod:`flexcp.executor.kernels`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from flexcp.executor.kernels import Ints, Settings
from flexcp.executor.kernels.hopper.forward import forward_kernel
from flexcp.executor.kernels.hopper.keys import keys_kernel
from flexcp.executor.kernels.hopper.queries import queries_kernel
from flexcp.executor.kernels.hopper.tiles import (
    BLOCK,
    QUERIES,
    TILE,
    key_tiles,
    longest_part,
    packed_heads,
    query_tiles,
    tiles_in_turn,
)
from flexcp.executor.kernels.tiles import SegmentList, TileList, segment_list, useful
from flexcp.executor.kernels.triton.arguments import aligned, base_of, scales, strides
from flexcp.executor.kernels.triton.statistics import pack_statistics
from flexcp.executor.kernels.triton.work import WorkList, check, multiprocessors

FRESH = True
HEAD_SIZES = (64, 128)
DTYPES = (torch.bfloat16, torch.float16)
STAGES = 2
GLUON_DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}


def supports(device: torch.device, dtype: torch.dtype, head_dim: int, v_head_dim: int) -> str | None:
    """Return why this kernel cannot run tensors like these, naming what it can run; None if it can."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return f"the hopper kernel runs on NVIDIA GPUs of compute capability 9.0 (H100, H200); got {device}"
    if dtype not in DTYPES:
        return f"the hopper kernel computes {', '.join(map(str, DTYPES))}; got {dtype}"
    if not {head_dim, v_head_dim} <= set(HEAD_SIZES):
        return f"the hopper kernel has head sizes {', '.join(map(str, HEAD_SIZES))}; got {head_dim} and {v_head_dim}"
    return None


class HopperWork(WorkList):
    """A work list whose tiles are walked in segments, ranges of blocks that all need a mask or all do not."""

    @cached_property
    def pack(self) -> int:
        """How many query heads of a KV head are in one tile."""
        return packed_heads(self.share)

    @cached_property
    def forward_segments(self) -> Segments:
        """Tiles of packed query rows (a token and one of the query heads that share a tile)."""
        return Segments.of(query_tiles(self.slices, self.share), BLOCK, self.device)

    @cached_property
    def backward_segments(self) -> Segments:
        """Tiles of keys with blocks of packed query rows, not split: one program computes a key's gradients."""
        return self._key_segments(None)

    @cached_property
    def split_segments(self) -> Segments:
        """Tiles of keys with long ones split, for balance: parts of a key's gradients are added in any order."""
        units = multiprocessors(self.device)
        return self._key_segments(longest_part(self._key_tiles, self.kv_heads, self.share, units))

    def in_turn(self, programs: int) -> int:
        """Return how many tiles of queries a group of heads takes per turn, if ``programs`` GPU programs run.

        The result is cached, because launches must not make the host wait.
        """
        if programs not in self._turns:
            row_bytes = (self.head_dim + self.v_head_dim) * 2  # all DTYPES have two bytes
            blocks, groups = self.forward_segments.blocks, self.heads // self.pack
            self._turns[programs] = tiles_in_turn(blocks, row_bytes, groups, self.kv_heads, programs)
        return self._turns[programs]

    @cached_property
    def _turns(self) -> dict[int, int]:
        return {}

    @cached_property
    def _key_tiles(self) -> TileList:
        return key_tiles(self.slices, self.share)

    def _key_segments(self, longest: int | None) -> Segments:
        """Return tiles of keys as segments; tiles of more than ``longest`` blocks are split."""
        return Segments.of(self._key_tiles, QUERIES // self.pack, self.device, longest)


@dataclass(frozen=True)
class Segments:
    """A segment list on the host (``made``) and its tables on the device, and the number of blocks of each tile."""

    made: SegmentList
    blocks: Ints
    tiles: Tensor
    segments: Tensor

    @staticmethod
    def of(
        made: TileList, block: int, device: torch.device, longest: int | None = None, descending: bool = False
    ) -> Segments:
        """Cut a tile list into segments and upload them; the arguments are those of :func:`segment_list`."""
        cut = segment_list(made, block, longest, descending)
        tables = (torch.from_numpy(x.reshape(-1)).pin_memory() for x in (cut.tiles, cut.segments))
        return Segments(cut, cut.tiles[:, 3].astype(np.int64), *(t.to(device, non_blocking=True) for t in tables))

    @property
    def count(self) -> int:
        """The number of tiles."""
        return len(self.blocks)


def prepare(
    slices: Ints, heads: int, kv_heads: int, head_dim: int, v_head_dim: int, device: torch.device
) -> HopperWork:
    """Make the work list of ``slices``, for every layer and for forward and backward.

    Raises NotImplementedError if the kernel does not support the device or head sizes.
    """
    reason = supports(device, torch.bfloat16, head_dim, v_head_dim)
    if reason:
        raise NotImplementedError(reason)
    return HopperWork(slices, heads, kv_heads, head_dim, v_head_dim, device)


def forward(
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGV: Tensor,
    work: HopperWork,
    settings: Settings,
    out_THV: Tensor,
    lse_TH: Tensor,
) -> None:
    """Add the slices' attention to ``out`` and ``lse``; with ``settings.fresh`` overwrite them."""
    made = work.forward_segments
    if not made.count:
        return
    q, k, v = (aligned(x) for x in (q_THD, k_TGD, v_TGV))
    check(work, supports, q, k, v, out_THV, lse_TH)
    pack, groups = work.pack, work.heads // work.pack
    programs = programs_of(made.count * groups, settings, work)
    forward_kernel[(programs,)](
        _described(q, TILE // 2 // pack, pack),
        _described(k, BLOCK, 1),
        _described(v, BLOCK, 1),
        out_THV,
        lse_TH,
        made.tiles,
        made.segments,
        made.count,
        groups,
        work.in_turn(programs),
        *scales(settings, q.dtype),
        *strides(out_THV, lse_TH),
        SHARE=work.share,
        PACK=pack,
        D=work.head_dim,
        V=work.v_head_dim,
        N=BLOCK,
        STAGES=STAGES,
        SOFTCAP=settings.softcap is not None,
        FRESH=settings.fresh,
        num_warps=4,
    )


def backward(
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGV: Tensor,
    do_THV: Tensor,
    lse_TH: Tensor,
    delta_TH: Tensor,
    work: HopperWork,
    settings: Settings,
    dq_THD: Tensor,
    dk_TGD: Tensor,
    dv_TGV: Tensor,
) -> None:
    """Add the slices' gradients to ``dq``, ``dk`` and ``dv``; with ``settings.deterministic`` always in the same order.

    With ``settings.fresh`` dq is overwritten.
    """
    if not work.forward_segments.count:
        return
    q, k, v, do = (aligned(x) for x in (q_THD, k_TGD, v_TGV, do_THV))
    check(work, supports, q, k, v, do, lse_TH, delta_TH, dq_THD, dk_TGD, dv_TGV)
    inputs = (q, k, v, do, lse_TH, delta_TH, work, settings)
    _backward_keys(*inputs, dk_TGD, dv_TGV)
    _backward_queries(*inputs, dq_THD)


def _backward_keys(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    lse: Tensor,
    delta: Tensor,
    work: HopperWork,
    settings: Settings,
    dk: Tensor,
    dv: Tensor,
) -> None:
    """Launch the kernel of dk and dv."""
    made = work.backward_segments if settings.deterministic else work.split_segments
    pack, items, rows = work.pack, made.count * work.kv_heads, len(q)
    keys_kernel[(programs_of(items, settings, work),)](
        _described(q, QUERIES // pack, pack),
        _described(k, BLOCK, 1),
        _described(v, BLOCK, 1),
        _described(do, QUERIES // pack, pack),
        pack_statistics(lse, delta, pack, base_of(q.dtype)),
        dk,
        dv,
        made.tiles,
        made.segments,
        work.kv_heads,
        items,
        rows,
        work.heads,
        *scales(settings, q.dtype),
        *strides(dk, dv),
        SHARE=work.share,
        PACK=pack,
        D=work.head_dim,
        V=work.v_head_dim,
        STAGES=STAGES,
        SOFTCAP=settings.softcap is not None,
        num_warps=4,
    )


def _backward_queries(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    lse: Tensor,
    delta: Tensor,
    work: HopperWork,
    settings: Settings,
    dq: Tensor,
) -> None:
    """Launch the kernel of dq."""
    made, pack, groups = work.forward_segments, work.pack, work.heads // work.pack
    programs = programs_of(made.count * groups, settings, work)
    queries_kernel[(programs,)](
        _described(q, TILE // 2 // pack, pack),
        _described(k, BLOCK, 1),
        _described(v, BLOCK, 1),
        _described(do, TILE // 2 // pack, pack),
        lse,
        delta,
        dq,
        made.tiles,
        made.segments,
        made.count,
        groups,
        work.in_turn(programs),
        *scales(settings, q.dtype),
        *strides(lse, delta, dq),
        SHARE=work.share,
        PACK=pack,
        D=work.head_dim,
        V=work.v_head_dim,
        N=BLOCK,
        STAGES=STAGES,
        SOFTCAP=settings.softcap is not None,
        FRESH=settings.fresh,
        num_warps=4,
    )


def useful_share(slices: Ints, share: int, backward: bool) -> float:
    """Return the fraction of the (query, key) pairs in computed blocks that attend.

    It is an upper bound of the kernel's efficiency. ``share`` is the number of query heads per KV head.
    """
    pack = packed_heads(share)
    shares = [useful(slices, query_tiles(slices, share), TILE // pack * BLOCK)]
    if not backward:
        return shares[0]
    shares.append(useful(slices, key_tiles(slices, share), QUERIES // pack * BLOCK))
    return 7 / (3 / shares[0] + 4 / shares[1])  # three of seven products are dq's


def programs_of(items: int, settings: Settings, work: HopperWork) -> int:
    """Return the number of GPU programs of a launch.

    It is one for each multiprocessor outside of the SM margin, and at most ``items``.
    """
    return min(items, max(1, multiprocessors(work.device) - settings.sm_margin))


def _described(x_THD: Tensor, rows: int, heads: int) -> TensorDescriptor:
    """Return the tensor descriptor by which the copy engine loads boxes of ``rows`` rows and ``heads`` heads."""
    width = x_THD.shape[2]
    layout = _layout(rows, heads, width, x_THD.dtype)
    return TensorDescriptor(x_THD, list(x_THD.shape), list(x_THD.stride()), [rows, heads, width], layout)


@lru_cache
def _layout(rows: int, heads: int, width: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    """Return the layout of a box in shared memory.

    It is cached, because a launch needs three or four of them, and finding one takes the host as long as launching.
    """
    return gl.NVMMASharedLayout.get_default_for([rows, heads, width], GLUON_DTYPES[dtype])

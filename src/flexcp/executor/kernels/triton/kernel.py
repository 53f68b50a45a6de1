"""The Triton kernel: attention on any NVIDIA GPU from Ampere (sm80) on, and on the CPU by Triton's interpreter.

``prepare`` makes a work list once for all layers of a step: tiles of rows for the forward and for dq, tiles of keys for
dk and dv, each when it is first needed. ``forward`` and ``backward`` only launch kernels. Long tiles of keys are split
among programs, which add to dk and dv in any order; with ``settings.deterministic`` they are not split, and gradients
are bitwise the same in every run.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from flexcp.executor.kernels import Ints, Settings
from flexcp.executor.kernels.tiles import TileList, split, tile_list, transposed, useful
from flexcp.executor.kernels.triton.backward import keys_kernel, pack_kernel, queries_kernel
from flexcp.executor.kernels.triton.forward import forward_kernel

FRESH = True
LARGEST_HEAD, HEAD_STEP = 256, 8
"""Head sizes are multiples of ``HEAD_STEP`` up to ``LARGEST_HEAD``."""
NARROWEST = 16
"""The fewest columns of a matrix product."""
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
PACK_BLOCK = 1024
RESIDENT = 2
"""Programs that run at a time on one multiprocessor."""
PARTS, SHORTEST_PART = 6, 16
"""For dk and dv: about how many parts of tiles each running program gets, and the fewest blocks of a part."""
CHUNK, UNEVEN = 32, 0.07
"""How many tiles a group of heads takes per turn, if tiles are uneven; and when they are uneven.

They are if the longest tile is more than the share ``UNEVEN`` of one program's work.
"""
ALIGNMENT, UNIT = 16, 16
"""Inputs begin at a multiple of ``ALIGNMENT`` bytes, and their strides are multiples of ``UNIT`` elements.

``UNIT`` is 8 instead for head sizes that are no multiple of 16. Other inputs are copied.
"""


@dataclass(frozen=True)
class Blocks:
    """Sizes of one kernel: packed queries (``m``) and keys (``n``) of a block, and warps of a GPU program.

    A packed query is a token and one of the query heads that share a KV head. ``stages`` and ``edge_stages`` are the
    depths of the software pipelines of blocks without and with a mask.
    """

    m: int
    n: int
    warps: int
    stages: int
    edge_stages: int = 1
    tma: bool = False
    """Whether blocks are loaded by tensor descriptors (the copy engine of Hopper and later GPUs)."""

    def pack(self, share: int) -> int:
        """Return how many of the ``share`` query heads of a KV head are in one block: the largest divisor that fits."""
        fit = [p for p in range(1, min(share, self.m) + 1) if share % p == 0]
        # The boxes of a tensor descriptor must fill a block exactly.
        return max(p for p in fit if not self.tma or self.m % p == 0)


@dataclass(frozen=True)
class Tiles:
    """A tile list on the host (``counts``), and its tables on the device."""

    counts: TileList
    tiles: Tensor
    entries: Tensor

    @staticmethod
    def on_device(made: TileList, device: torch.device) -> Tiles:
        """Upload a tile list."""
        tables = (torch.from_numpy(x.reshape(-1)) for x in (made.tiles, made.entries))
        if device.type == "cuda":
            return Tiles(made, *(t.pin_memory().to(device, non_blocking=True) for t in tables))
        return Tiles(made, *tables)

    def __len__(self) -> int:
        return len(self.counts.tiles)


class WorkList:
    """The slices of a call as tiles, for the given heads; each kernel's tiles are made when they are first needed."""

    def __init__(self, slices: Ints, heads: int, kv_heads: int, head_dim: int, v_head_dim: int, device: torch.device):
        self.slices, self.heads, self.kv_heads, self.device = slices, heads, kv_heads, numbered(device)
        self.head_dim, self.v_head_dim, self.share = head_dim, v_head_dim, heads // kv_heads
        self.widest = max(head_dim, v_head_dim)
        self.unit = math.gcd(UNIT, head_dim, v_head_dim)

    @cached_property
    def copy_engine(self) -> bool:
        """Whether the device can load blocks by tensor descriptors (Hopper, data-centre Blackwell)."""
        return self.device.type == "cuda" and (9, 0) <= torch.cuda.get_device_capability(self.device) < (12, 0)

    @cached_property
    def residents(self) -> int:
        """How many GPU programs run at a time.

        On a CPU (Triton's interpreter) it is a small number, so that tests split short lists too.
        """
        return RESIDENT * (multiprocessors(self.device) if self.device.type == "cuda" else 2)

    @cached_property
    def _made(self) -> dict[tuple[str, int, int], Tiles]:
        return {}

    def rows(self, blocks: Blocks) -> Tiles:
        """Return tiles of packed query rows (a token and a head), for blocks of these sizes."""
        return self._tiles("rows", blocks.m // blocks.pack(self.share), blocks.n)

    def keys(self, blocks: Blocks) -> Tiles:
        """Return tiles of keys with blocks of packed query rows, for blocks of these sizes."""
        return self._tiles("keys", blocks.n, blocks.m // blocks.pack(self.share))

    def split_keys(self, blocks: Blocks) -> Tiles:
        """Return tiles of keys like :meth:`keys`, with long ones split for balance."""
        return self._tiles("split", blocks.n, blocks.m // blocks.pack(self.share))

    def _tiles(self, side: str, height: int, block: int) -> Tiles:
        """Return the tiles of one side ("rows", "keys" or "split"), made on first use.

        ``height`` is the number of rows (or keys) of a tile, ``block`` that of keys (or rows) of a block.
        """
        key = (side, height, block)
        if key not in self._made:
            if side == "rows":
                made = tile_list(self.slices, height, block)
            else:
                made = tile_list(transposed(self.slices), height, block, odd_clear=False)
            if side == "split":
                each = made.blocks * self.kv_heads // (self.residents * PARTS)
                made = split(made, block, max(SHORTEST_PART, each))
            self._made[key] = Tiles.on_device(made, self.device)
        return self._made[key]


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
    k_at, v_at = (_described(x, blocks.n, 1) if blocks.tma else x for x in (k, v))
    forward_kernel[_grid(programs, settings.sm_margin, work.device)](
        q,
        k_at,
        v_at,
        out_THV,
        lse_TH,
        tiles.tiles,
        tiles.entries,
        *_order(tiles, work.heads // pack, work),
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
        order = _order(tiles, work.kv_heads, work)
    else:
        tiles = work.split_keys(blocks)
        order = (len(tiles), work.kv_heads, CHUNK)
    pack, programs, rows = blocks.pack(work.share), len(tiles) * work.kv_heads, len(q)
    packed = pack_statistics(lse, delta, pack, base_of(q.dtype))
    q_at, do_at = (_described(x, blocks.m // pack, pack) if blocks.tma else x for x in (q, do))
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
    k_at, v_at = (_described(x, blocks.n, 1) if blocks.tma else x for x in (k, v))
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
        *_order(tiles, work.heads // pack, work),
        programs,
        *scales(settings, q.dtype),
        *strides(q, k, v, do, lse, delta, dq, unit=work.unit),
        SHARE=work.share,
        PACK=pack,
        SOFTCAP=settings.softcap is not None,
        FRESH=settings.fresh,
        **_sizes(q, work, blocks, settings),
    )


def pack_statistics(lse_TH: Tensor, delta_TH: Tensor, pack: int, base: float) -> Tensor:
    """Return LSE times ``base``, and delta, as a flat float32 tensor in the order ``[2, heads / pack, rows, pack]``.

    So the numbers of a block of packed queries are adjacent. The tensor is a little longer than that, because a block
    may reach past the last row.
    """
    rows, heads = lse_TH.shape
    packed = torch.empty(2 * rows * heads + PACK_BLOCK, dtype=torch.float32, device=lse_TH.device)
    pack_kernel[(triton.cdiv(rows * pack, PACK_BLOCK), heads // pack)](
        lse_TH, delta_TH, packed, rows, *strides(lse_TH, delta_TH), PACK=pack, BLOCK=PACK_BLOCK, BASE=base
    )
    return packed


def _float32_blocks(work: WorkList) -> Blocks:
    """Return the block sizes that all kernels use in float32."""
    return Blocks(32, 32, 8, 1) if work.widest <= 128 else Blocks(16, 32, 8, 1)


def forward_blocks(work: WorkList, dtype: torch.dtype) -> Blocks:
    """Return the block sizes of the forward kernel.

    They are those that were fastest on an H200 (docs/kernels.md), or that fit the shared memory of other GPUs.
    """
    if dtype == torch.float32:
        return _float32_blocks(work)
    if work.copy_engine:
        return Blocks(128, 64, 4, 2, 2, tma=True) if work.widest <= 128 else Blocks(128, 64, 8, 2, tma=True)
    return Blocks(128, 64, 8, 2) if work.widest <= 128 else Blocks(64, 32, 4, 2)


def keys_blocks(work: WorkList, dtype: torch.dtype) -> Blocks:
    """Return the block sizes of the kernel of dk and dv."""
    if dtype == torch.float32:
        return _float32_blocks(work)
    if work.copy_engine:
        return Blocks(64, 64, 4, 2, 2, tma=True) if work.widest <= 128 else Blocks(64, 64, 8, 1, tma=True)
    return Blocks(64, 64, 4, 1) if work.widest <= 128 else Blocks(32, 32, 4, 1)


def queries_blocks(work: WorkList, dtype: torch.dtype) -> Blocks:
    """Return the block sizes of the kernel of dq."""
    if dtype == torch.float32:
        return _float32_blocks(work)
    if work.copy_engine:
        return Blocks(64, 64, 4, 2, 2, tma=True) if work.widest <= 128 else Blocks(64, 32, 8, 2, tma=True)
    return Blocks(64, 64, 4, 1) if work.widest <= 128 else Blocks(32, 32, 4, 1)


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


def tiles_in_turn(made: TileList, groups: int, residents: int) -> int:
    """Return how many tiles a group of heads takes before the next group's turn; ``residents`` programs run at a time.

    Programs that run at the same time should read the same keys. So if tiles are even, a group takes all of them in one
    turn (on an H200 with a full mask and 16,384 tokens the forward ran at 457 TFLOP/s that way, and at 447 in turns of
    32). But then long tiles of the last group start late, and the launch waits for them at its end. So if the longest
    tile is a large share of one program's work, groups take turns of ``CHUNK`` tiles.
    """
    uneven = made.longest > UNEVEN * made.blocks * groups / residents
    return CHUNK if uneven else len(made.tiles)


def _order(tiles: Tiles, groups: int, work: WorkList) -> tuple[int, int, int]:
    """Return the number of tiles, the number of groups of heads, and how many tiles a group takes per turn."""
    return len(tiles), groups, tiles_in_turn(tiles.counts, groups, work.residents)


def numbered(device: torch.device) -> torch.device:
    """Return the device with its number, as tensors name it: ``cuda`` is the current CUDA device."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


@lru_cache
def multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors of a GPU."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


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


def _described(x_THD: Tensor, rows: int, heads: int) -> TensorDescriptor:
    """Return the tensor descriptor for blocks of ``rows`` rows and ``heads`` heads.

    Columns of a block beyond the head size are read as zeros.
    """
    block = [rows, heads, columns(x_THD.shape[2])]
    return TensorDescriptor(x_THD, list(x_THD.shape), list(x_THD.stride()), block)


def columns(size: int) -> int:
    """Return the width of a block for a head size: the next power of two, as Triton needs, at least ``NARROWEST``."""
    return max(NARROWEST, int(triton.next_power_of_2(size)))


def base_of(dtype: torch.dtype) -> float:
    """Return the factor from natural logits to those of the kernels: log2(e), or 1 for float32 (no rounding)."""
    return 1.0 if dtype == torch.float32 else math.log2(math.e)


def scales(settings: Settings, dtype: torch.dtype) -> tuple[float, float]:
    """Return the factor of q.k, and the softcap (0 for none); raise ValueError if the scale is not above 0.

    Without a softcap the factor times q.k is a logit in the kernels' base; with one it is the argument of tanh.
    """
    if not settings.scale > 0:
        raise ValueError(f"the scale of logits must be above 0; got {settings.scale}")
    if settings.softcap is None:
        return settings.scale * base_of(dtype), 0.0
    return settings.scale / settings.softcap, settings.softcap


def strides(*tensors: Tensor, unit: int = UNIT) -> list[int]:
    """Return the strides of rows and heads of each tensor, as integers for a launch.

    They are in units of ``unit`` elements for 3-D tensors, and in elements for 2-D ones (statistics).
    """
    return [s if t.dim() == 2 else s // unit for t in tensors for s in t.stride()[:2]]


def aligned(x: Tensor, unit: int = UNIT) -> Tensor:
    """Return the tensor itself if the kernel's 16-byte loads can read it, else a contiguous copy."""
    return x if _fits(x, unit) and x.storage_offset() * x.element_size() % ALIGNMENT == 0 else x.contiguous()


def _fits(x: Tensor, unit: int) -> bool:
    """Return whether the strides are multiples of ``unit`` elements and columns are adjacent."""
    apart = (stride % unit == 0 for stride, size in zip(x.stride()[:2], x.shape[:2], strict=True) if size > 1)
    return x.stride(2) == 1 and all(apart)


def check(
    work: WorkList, supports: Callable[..., str | None], q: Tensor, k: Tensor, v: Tensor, *others: Tensor
) -> None:
    """Raise if tensors do not fit the work list.

    Raises ValueError for another device, unsuitable strides, several dtypes, or other heads or head sizes, and
    NotImplementedError for what ``supports``, the kernel's function, refuses.
    """
    for x in (q, k, v, *others):
        if x.device != work.device:
            raise ValueError(f"the work list was prepared for {work.device}, but a tensor is on {x.device}")
        if x.dim() == 3 and not _fits(x, work.unit):
            raise ValueError(
                f"results need rows and heads at multiples of {work.unit} elements; got strides {tuple(x.stride())}"
            )
    reason = supports(work.device, q.dtype, work.head_dim, work.v_head_dim)
    if reason:
        raise NotImplementedError(reason)
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q, k and v need one dtype; got {q.dtype}, {k.dtype} and {v.dtype}")
    found = (q.shape[1], k.shape[1], q.shape[2], v.shape[2])
    made = (work.heads, work.kv_heads, work.head_dim, work.v_head_dim)
    if found != made:
        raise ValueError(f"the work list is for (heads, KV heads, head size, V head size) {made}; got {found}")

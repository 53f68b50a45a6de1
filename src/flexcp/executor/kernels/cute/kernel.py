"""The CuTe kernel: head size 128 in bf16 or fp16 on sm90, in NVIDIA's CuTe DSL (``flexcp[cute]``). Same interface as every kernel.

A function is compiled once for a model (dtype, heads that share a KV head, softcap), in the process that first needs it, which takes some
seconds. It gets addresses, sizes and strides as numbers, so no batch compiles anything, and a launch costs the host some ten microseconds.
``deterministic`` gradients are the hopper kernel's: here dq is added to memory in any order.
"""

from __future__ import annotations

from functools import cache, cached_property
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import numpy as np
import torch
import tvm_ffi  # noqa: F401  (what the compiled functions are called through; without it this kernel is not there)
from cutlass import Float32, Int32, Int64, cute
from cutlass.cute.runtime import make_ptr
from torch import Tensor

from flexcp.executor.kernels import Ints, Settings, uploaded
from flexcp.executor.kernels.cute.backward import Backward
from flexcp.executor.kernels.cute.forward import Forward
from flexcp.executor.kernels.cute.items import dealt, group_by_group, in_turns
from flexcp.executor.kernels.hopper import kernel as hopper_kernel
from flexcp.executor.kernels.hopper.kernel import STAGES, HopperWork, Segments, programs_of
from flexcp.executor.kernels.hopper.tiles import BEYOND_L2, BLOCK, QUERIES, longest_part
from flexcp.executor.kernels.triton.kernel import aligned, base_of, check, multiprocessors, pack_statistics
from flexcp.masks import Q0, Q1

FRESH = True
HEAD_SIZE = 128
TYPES = {torch.bfloat16: cutlass.BFloat16, torch.float16: cutlass.Float16, torch.float32: cutlass.Float32}
LONGEST_PART = 1024
"""Blocks of a part of a tile of keys, where programs add to dq in step."""

useful_share = hopper_kernel.useful_share


def supports(device: torch.device, dtype: torch.dtype, head_dim: int, v_head_dim: int) -> str | None:
    """Why this kernel cannot run such tensors, naming what it can run; None when it can."""
    reason = hopper_kernel.supports(device, dtype, head_dim, v_head_dim)
    if reason is None and (head_dim, v_head_dim) != (HEAD_SIZE, HEAD_SIZE):
        reason = f"the cute kernel has head size {HEAD_SIZE}; got {head_dim} and {v_head_dim}"
    return reason


class CuteWork(HopperWork):
    """A work list whose items are dealt to programs.

    Tiles of keys are walked from their last queries to their first: under a causal mask all of them end with the same queries.
    """

    @cached_property
    def descending_segments(self) -> Segments:
        """Tiles of keys against blocks of packed query rows, long ones split."""
        longest = longest_part(self._key_tiles, self.kv_heads, self.share, multiprocessors(self.device))
        if self.in_step:
            longest = min(longest, LONGEST_PART)
        return Segments.of(self._key_tiles, QUERIES // self.pack, self.device, longest, descending=True)

    @cached_property
    def in_step(self) -> bool:
        """Whether dq is too large for the L2, so that programs that run together should add to the same part of it."""
        rows = int(self.slices[:, Q1].max(initial=0)) - int(self.slices[:, Q0].min(initial=0))
        return rows * self.heads * self.head_dim * 4 > BEYOND_L2

    def items(self, backward: bool, programs: int) -> Tensor:
        """Which program computes what. Dealt once for each number of programs: launches must not make the host wait."""
        key = (backward, programs)
        if key not in self._items:
            table = self._backward_items(programs) if backward else self._forward_items(programs)
            self._items[key] = uploaded(table.reshape(-1), self.device)
        return self._items[key]

    @cached_property
    def _items(self) -> dict[tuple[bool, int], Tensor]:
        return {}

    def _forward_items(self, programs: int) -> Any:
        made, groups = self.forward_segments, self.heads // self.pack
        return dealt(in_turns(made.count, groups, self.in_turn(programs)), made.blocks, groups, programs)

    def _backward_items(self, programs: int) -> Any:
        made, groups = self.descending_segments, self.kv_heads
        order = in_turns(made.count, groups, 1)
        if self.in_step:
            tiles, segments = made.made.tiles, made.made.segments
            begin = segments[tiles[:, 2], 0] + segments[tiles[:, 2], 1] * (QUERIES // self.pack)
            order = group_by_group(np.lexsort((tiles[:, 0], -begin)), groups)
        return dealt(order, made.blocks, groups, programs)


def prepare(slices: Ints, heads: int, kv_heads: int, head_dim: int, v_head_dim: int, device: torch.device) -> CuteWork:
    """The work list of ``slices``; reusable by every layer and by forward and backward."""
    reason = supports(device, torch.bfloat16, head_dim, v_head_dim)
    if reason:
        raise NotImplementedError(reason)
    return CuteWork(slices, heads, kv_heads, head_dim, v_head_dim, device)


def forward(
    q_THD: Tensor, k_TGD: Tensor, v_TGV: Tensor, work: CuteWork, settings: Settings, out_THV: Tensor, lse_TH: Tensor,
) -> None:  # fmt: skip
    """Add the slices' attention to ``out`` and ``lse``; with ``settings.fresh`` write them."""
    made = work.forward_segments
    if not made.count:
        return
    q, k, v = (aligned(x) for x in (q_THD, k_TGD, v_TGV))
    check(work, supports, q, k, v, out_THV, lse_TH)
    groups = work.heads // work.pack
    programs = programs_of(made.count * groups, settings, work)
    run = compiled_forward(q.dtype, out_THV.dtype, work.share, work.pack, settings.softcap is not None, settings.fresh)
    tables = (made.tiles, made.segments, work.items(False, programs))
    run(
        *_addresses(q, k, v, out_THV, lse_TH, *tables), len(q), len(k), work.heads, work.kv_heads,
        *_strides(q, k, v, out_THV, lse_TH), groups, *_numbers(settings), programs, _stream(q.device),
    )  # fmt: skip


def backward(
    q_THD: Tensor, k_TGD: Tensor, v_TGV: Tensor, do_THV: Tensor, lse_TH: Tensor, delta_TH: Tensor, work: CuteWork,
    settings: Settings, dq_THD: Tensor, dk_TGD: Tensor, dv_TGV: Tensor,
) -> None:  # fmt: skip
    """Add the slices' gradients to ``dq``, ``dk`` and ``dv``. With ``settings.fresh`` dq is written."""
    if not work.forward_segments.count:
        return
    if settings.deterministic:
        inputs = (q_THD, k_TGD, v_TGV, do_THV, lse_TH, delta_TH, work, settings)
        hopper_kernel.backward(*inputs, dq_THD, dk_TGD, dv_TGV)
        return
    q, k, v, do = (aligned(x) for x in (q_THD, k_TGD, v_TGV, do_THV))
    check(work, supports, q, k, v, do, lse_TH, delta_TH, dq_THD, dk_TGD, dv_TGV)
    made = work.descending_segments
    programs = programs_of(made.count * work.kv_heads, settings, work)
    run = compiled_backward(q.dtype, work.share, work.pack, settings.softcap is not None)
    statistics = pack_statistics(lse_TH, delta_TH, work.pack, base_of(q.dtype))
    sums = torch.zeros(dq_THD.shape, dtype=torch.float32, device=q.device) if settings.fresh else dq_THD
    tables = (made.tiles, made.segments, work.items(True, programs))
    run(
        *_addresses(q, k, v, do, statistics, sums, dk_TGD, dv_TGV, *tables), len(q), len(k), work.heads, work.kv_heads,
        *_strides(q, k, v, do, sums, dk_TGD, dv_TGV), *_numbers(settings), programs, _stream(q.device),
    )  # fmt: skip
    if settings.fresh:
        dq_THD.copy_(sums)


@cache
def compiled_forward(
    dtype: torch.dtype, out_dtype: torch.dtype, share: int, pack: int, softcap: bool, fresh: bool
) -> Any:
    """The forward of a model, ready to be called with numbers."""
    kind, out = TYPES[dtype], TYPES[out_dtype]
    kernel = Forward(kind, out, share, pack, HEAD_SIZE, HEAD_SIZE, BLOCK, STAGES, softcap, fresh)
    pointers = [_pointer(kind)] * 3 + [_pointer(out), _pointer(Float32, 4)] + [_pointer(Int32)] * 3
    numbers = [Int32(1)] * 4 + [Int64(8)] * 10 + [Int32(1), Float32(1.0), Float32(1.0), Int32(1)]
    return cute.compile(kernel, *pointers, *numbers, cuda.CUstream(0), options="--enable-tvm-ffi")


@cache
def compiled_backward(dtype: torch.dtype, share: int, pack: int, softcap: bool) -> Any:
    """The backward of a model, ready to be called with numbers."""
    kind = TYPES[dtype]
    kernel = Backward(kind, share, pack, HEAD_SIZE, HEAD_SIZE, STAGES, softcap)
    pointers = [_pointer(kind)] * 4 + [_pointer(Float32, 4)] + [_pointer(Float32)] * 3 + [_pointer(Int32)] * 3
    numbers = [Int32(1)] * 4 + [Int64(8)] * 14 + [Float32(1.0), Float32(1.0), Int32(1)]
    return cute.compile(kernel, *pointers, *numbers, cuda.CUstream(0), options="--enable-tvm-ffi")


def _pointer(kind: Any, alignment: int = 16) -> Any:
    return make_ptr(kind, 0, cute.AddressSpace.gmem, assumed_align=alignment)


def _addresses(*tensors: Tensor) -> list[int]:
    return [x.data_ptr() for x in tensors]


def _strides(*tensors: Tensor) -> list[int]:
    """Of rows and heads, in elements."""
    return [stride for x in tensors for stride in x.stride()[:2]]


def _numbers(settings: Settings) -> tuple[float, float]:
    if not settings.scale > 0:
        raise ValueError(f"the scale of logits must be above 0; got {settings.scale}")
    return settings.scale, settings.softcap or 0.0


def _stream(device: torch.device) -> int:
    return int(torch.cuda.current_stream(device).cuda_stream)

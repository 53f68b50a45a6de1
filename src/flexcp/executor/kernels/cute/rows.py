"""Rows: the CuTe kernels that run before and after the fused backward kernel.

If only one launch adds to dq, the backward adds it up in a float32 buffer of its own, the *sums*, of shape
``[head chunk, half of the columns, packed row, 64]``. A packed row is a token and one of the query heads that share a
tile, and every half has ``SPARE`` extra rows at its end. The columns of a row are in the order in which the registers
of a warp group hold them: thread ``c`` of a quad has four numbers of each group ``g`` of 16 columns, and its number
``e`` is column ``16 g + 8 (e // 2) + 2 c + e % 2``. In odd rows groups 0 and 1, and 2 and 3, are exchanged, so that
threads that store at the same time use different banks of shared memory.

:class:`Before` computes delta, packs the statistics and clears the sums, in one pass over the output and its gradient.
:class:`After` makes dq from the sums.

If several launches add to a dq, and nothing else does before the last of them, dq is *open*: rows and heads are in
place, but columns are permuted within each 32, and the scale is missing. Thread ``c``'s number ``e`` of group ``g``
(0 or 1) is at place ``8 c + 4 g + e`` of the 32; together with the copy engine's own permutation of chunks this also
uses different banks. :class:`Close` puts the columns in place and scales them.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Float32, Int32, Int64, const_expr, cute

from flexcp.executor.kernels.cute.parts import LOG2E, rounded_pair

THREADS = 256
LANES = 16  # threads that share a row of one head; each has 8 numbers of it
ROWS_AT_ONCE = THREADS // LANES
LAPS = 4  # rows of each thread, loaded together
SPARE = 64  # packed rows at the end of each half, for blocks that reach past the last row


@cute.jit
def place_of(number, rows, heads, pack: cutlass.Constexpr[int]):
    """Return token, head, chunk of heads and packed row of the (token, head) pair with this number."""
    row, head = number // heads, number % heads
    return row, head, head // pack, row * pack + head % pack


@cute.jit
def vector_at(dtype, pointer, size: cutlass.Constexpr[int]):
    """Return ``size`` numbers in global memory as a tensor; their address must be a multiple of their bytes."""
    align = const_expr(size * dtype.width // 8)
    there = cute.make_ptr(dtype, pointer.toint(), cute.AddressSpace.gmem, assumed_align=align)
    return cute.make_tensor(there, cute.make_layout(size))


class Before:
    """The kernel that computes delta, packs the statistics (LSE in base 2, then delta) and clears the sums.

    It is for heads of ``8 * LANES`` numbers.
    """

    def __init__(self, dtype, pack, has_dlse):
        self.dtype, self.pack, self.has_dlse = dtype, pack, has_dlse

    @cute.jit
    def __call__(
        self,
        do: cute.Pointer,
        out: cute.Pointer,
        lse: cute.Pointer,
        dlse: cute.Pointer,
        statistics: cute.Pointer,
        sums: cute.Pointer,
        rows: Int32,
        heads: Int32,
        do_row: Int64,
        do_head: Int64,
        out_row: Int64,
        out_head: Int64,
        lse_row: Int64,
        lse_head: Int64,
        dlse_row: Int64,
        dlse_head: Int64,
        stream: cuda.CUstream,
    ):
        """Launch the kernel. Strides are in elements; those of ``do`` and ``out`` are multiples of 16 bytes."""
        programs = (rows * heads + ROWS_AT_ONCE * LAPS - 1) // (ROWS_AT_ONCE * LAPS)
        self.kernel(
            do,
            out,
            lse,
            dlse,
            statistics,
            sums,
            rows,
            heads,
            do_row,
            do_head,
            out_row,
            out_head,
            lse_row,
            lse_head,
            dlse_row,
            dlse_head,
        ).launch(grid=(programs, 1, 1), block=(THREADS, 1, 1), stream=stream)

    @cute.kernel
    def kernel(
        self,
        do: cute.Pointer,
        out: cute.Pointer,
        lse: cute.Pointer,
        dlse: cute.Pointer,
        statistics: cute.Pointer,
        sums: cute.Pointer,
        rows: Int32,
        heads: Int32,
        do_row: Int64,
        do_head: Int64,
        out_row: Int64,
        out_head: Int64,
        lse_row: Int64,
        lse_head: Int64,
        dlse_row: Int64,
        dlse_head: Int64,
    ):
        P = self.pack
        thread = cute.arch.thread_idx()[0]
        lane, first = thread % LANES, cute.arch.block_idx()[0] * (ROWS_AT_ONCE * LAPS) + thread // LANES
        a, b = (cute.make_rmem_tensor((8, LAPS), self.dtype) for _ in range(2))
        for lap in cutlass.range_constexpr(LAPS):
            number = first + lap * ROWS_AT_ONCE
            if number < rows * heads:
                row, head, _chunk, _packed = place_of(number, rows, heads, P)
                cute.autovec_copy(
                    vector_at(self.dtype, do + (row * do_row + head * do_head + lane * 8), 8), a[None, lap]
                )
                there = out + (row * out_row + head * out_head + lane * 8)
                cute.autovec_copy(vector_at(self.dtype, there, 8), b[None, lap])
        nothing = cute.make_rmem_tensor(4, Float32)
        nothing.fill(0.0)
        for lap in cutlass.range_constexpr(LAPS):
            number = first + lap * ROWS_AT_ONCE
            delta = Float32(0.0)
            for i in cutlass.range_constexpr(8):
                delta += a[i, lap].to(Float32) * b[i, lap].to(Float32)
            for step in cutlass.range_constexpr(4):
                delta += cute.arch.shuffle_sync_bfly(delta, offset=1 << step)
            if number < rows * heads:
                row, head, chunk, packed = place_of(number, rows, heads, P)
                for half in cutlass.range_constexpr(2):
                    at = ((Int64(chunk) * 2 + half) * (rows * P + SPARE) + packed) * 64 + lane * 4
                    cute.autovec_copy(nothing, vector_at(Float32, sums + at, 4))
                if lane == 0:
                    if const_expr(self.has_dlse):
                        delta -= vector_at(Float32, dlse + (row * dlse_row + head * dlse_head), 1)[0]
                    at = Int64(chunk) * rows * P + packed
                    top = vector_at(Float32, lse + (row * lse_row + head * lse_head), 1)[0]
                    vector_at(Float32, statistics + at, 1)[0] = top * LOG2E
                    vector_at(Float32, statistics + (at + Int64(heads) * rows), 1)[0] = delta


class After:
    """The kernel that makes dq from the sums of a backward: scaled, rounded, and with rows and columns in place.

    The order of the sums in memory is that of the module docstring.
    """

    def __init__(self, dtype, pack):
        self.dtype, self.pack = dtype, pack

    @cute.jit
    def __call__(
        self,
        sums: cute.Pointer,
        dq: cute.Pointer,
        rows: Int32,
        heads: Int32,
        dq_row: Int64,
        dq_head: Int64,
        scale: Float32,
        stream: cuda.CUstream,
    ):
        """Launch the kernel. Strides are in elements."""
        programs = (rows * heads + ROWS_AT_ONCE * LAPS - 1) // (ROWS_AT_ONCE * LAPS)
        self.kernel(sums, dq, rows, heads, dq_row, dq_head, scale).launch(
            grid=(programs, 1, 1), block=(THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        sums: cute.Pointer,
        dq: cute.Pointer,
        rows: Int32,
        heads: Int32,
        dq_row: Int64,
        dq_head: Int64,
        scale: Float32,
    ):
        P = self.pack
        thread = cute.arch.thread_idx()[0]
        lane, first = thread % LANES, cute.arch.block_idx()[0] * (ROWS_AT_ONCE * LAPS) + thread // LANES
        found = cute.make_rmem_tensor((4, 2, LAPS), Float32)
        for lap in cutlass.range_constexpr(LAPS):
            number = first + lap * ROWS_AT_ONCE
            if number < rows * heads:
                _row, _head, chunk, packed = place_of(number, rows, heads, P)
                for half in cutlass.range_constexpr(2):
                    at = ((Int64(chunk) * 2 + half) * (rows * P + SPARE) + packed) * 64 + lane * 4
                    cute.autovec_copy(vector_at(Float32, sums + at, 4), found[None, half, lap])
        for lap in cutlass.range_constexpr(LAPS):
            number = first + lap * ROWS_AT_ONCE
            if number < rows * heads:
                row, head, _chunk, packed = place_of(number, rows, heads, P)
                group = (lane // 4) ^ (packed % 2)
                column = group * 16 + lane % 4 * 2
                for half in cutlass.range_constexpr(2):
                    for pair in cutlass.range_constexpr(2):
                        low, high = found[2 * pair, half, lap] * scale, found[2 * pair + 1, half, lap] * scale
                        at = row * dq_row + head * dq_head + (half * 64 + pair * 8 + column)
                        to = cute.make_ptr(Int32, (dq + at).toint(), cute.AddressSpace.gmem, assumed_align=4)
                        cute.make_tensor(to, cute.make_layout(1))[0] = rounded_pair(low, high, self.dtype)


class Close:
    """The kernel that closes an open dq: it puts the columns in place and scales them.

    It writes to the same memory, or rounded to ``dtype`` to another tensor. A warp handles a row.
    """

    def __init__(self, dtype):
        self.dtype = dtype

    @cute.jit
    def __call__(
        self,
        dq: cute.Pointer,
        out: cute.Pointer,
        rows: Int32,
        heads: Int32,
        dq_row: Int64,
        dq_head: Int64,
        out_row: Int64,
        out_head: Int64,
        scale: Float32,
        stream: cuda.CUstream,
    ):
        """Launch the kernel; ``out`` may be ``dq``.

        Strides are in elements; those of ``dq`` are multiples of 16 bytes.
        """
        at_once = THREADS // 32 * LAPS
        programs = (rows * heads + at_once - 1) // at_once
        self.kernel(dq, out, rows, heads, dq_row, dq_head, out_row, out_head, scale).launch(
            grid=(programs, 1, 1), block=(THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        dq: cute.Pointer,
        out: cute.Pointer,
        rows: Int32,
        heads: Int32,
        dq_row: Int64,
        dq_head: Int64,
        out_row: Int64,
        out_head: Int64,
        scale: Float32,
    ):
        warps = THREADS // 32
        warp, lane = cute.arch.warp_idx(), cute.arch.lane_idx()
        first = cute.arch.block_idx()[0] * (warps * LAPS) + warp
        found = cute.make_rmem_tensor((4, LAPS), Float32)
        for lap in cutlass.range_constexpr(LAPS):
            number = first + lap * warps
            if number < rows * heads:
                at = number // heads * dq_row + number % heads * dq_head + lane * 4
                cute.autovec_copy(vector_at(Float32, dq + at, 4), found[None, lap])
        # The whole row must be read before any of it is written.
        cute.arch.sync_warp()
        column = lane // 8 * 32 + lane % 2 * 16 + lane % 8 // 2 * 2
        for lap in cutlass.range_constexpr(LAPS):
            number = first + lap * warps
            if number < rows * heads:
                to = out + (number // heads * out_row + number % heads * out_head + column)
                for pair in cutlass.range_constexpr(2):
                    two = cute.make_rmem_tensor(2, Float32)
                    two[0], two[1] = found[2 * pair, lap] * scale, found[2 * pair + 1, lap] * scale
                    if const_expr(self.dtype is Float32):
                        cute.autovec_copy(two, vector_at(Float32, to + 8 * pair, 2))
                    else:
                        word = cute.make_ptr(Int32, (to + 8 * pair).toint(), cute.AddressSpace.gmem, assumed_align=4)
                        cute.make_tensor(word, cute.make_layout(1))[0] = rounded_pair(two[0], two[1], self.dtype)

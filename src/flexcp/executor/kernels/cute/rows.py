"""Rows: the CuTe kernels that run before and after the fused backward kernel.

If only one launch adds to dq, the backward adds it up in a float32 buffer of its own, the *sums*, of shape
``[head chunk, half of the columns, packed row, 64]``. A packed row is a token and one of the query heads that share a
tile, and every half has ``SPARE`` extra rows at its end. The columns of a row are in the order in which the registers
of a warp group hold them: thread ``c`` of a quad has four numbers of each group ``g`` of 16 columns, and its number
``e`` is column ``16 g + 8 (e // 2) + 2 c + e % 2``. In odd rows groups 0 and 1, and 2 and 3, are exchanged, so that
threads that store at the same time use different banks of shared memory.

:class:`Before` computes delta, packs the statistics and clears the sums, in one pass over the output and its gradient.
:class:`After` makes dq from the sums. Statistics have the order ``[head chunk, 2, packed row]``: LSEs in base 2, then
deltas. So those of a block are adjacent, and those of some chunks of heads are a part of the memory.

If several launches add to a dq, and nothing else does before the last of them, dq is *open*: rows and heads are in
place, but columns are permuted within each 32, and the scale is missing. Thread ``c``'s number ``e`` of group ``g``
(0 or 1) is at place ``8 c + 4 g + e`` of the 32; together with the copy engine's own permutation of chunks this also
uses different banks. :class:`Open` clears such a dq and packs the statistics of its rows, :class:`Close` puts the
columns in place and scales them.

A launch may begin before the one before it has ended (*programmatic launch*). :class:`After` and :class:`Close` wait
for it before they read anything, as the backward does, and the other kernels let the next launch begin at once.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Float32, Int32, Int64, Uint8, const_expr, cute

from flexcp.executor.kernels.cute.parts import LOG2E, rounded_pair
from flexcp.executor.kernels.dq_states import ADDED, EMPTY, OTHERS

THREADS = 256
LANES = 16  # threads that share a row of one head; each has 8 numbers of it
ROWS_AT_ONCE = THREADS // LANES
LAPS = 4  # rows of each thread, loaded together
OPEN_LAPS = 8  # rows that each warp clears
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


@cute.jit
def state_of(states, number, some):
    """Return the state of the (token, head) pair with this number; all have the state ``ADDED`` unless ``some``."""
    found = Int32(ADDED)
    if some != 0:
        found = vector_at(Uint8, states + number, 1)[0].to(Int32)
    return found


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
        cute.arch.griddepcontrol_launch_dependents()
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
                    at = Int64(chunk) * 2 * rows * P + packed
                    top = vector_at(Float32, lse + (row * lse_row + head * lse_head), 1)[0]
                    vector_at(Float32, statistics + at, 1)[0] = top * LOG2E
                    vector_at(Float32, statistics + (at + Int64(rows) * P), 1)[0] = delta


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
            grid=(programs, 1, 1), block=(THREADS, 1, 1), stream=stream, use_pdl=True
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
        cute.arch.griddepcontrol_wait()
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


class Open:
    """The kernel that packs the statistics of rows, and with ``clears`` sets dq of these rows to 0.

    It is for heads of 128 numbers. A warp clears a row of one head.
    """

    def __init__(self, pack, clears):
        self.pack, self.clears = pack, clears

    @cute.jit
    def __call__(
        self,
        dq: cute.Pointer,
        lse: cute.Pointer,
        delta: cute.Pointer,
        statistics: cute.Pointer,
        states: cute.Pointer,
        rows: Int32,
        heads: Int32,
        some: Int32,
        dq_row: Int64,
        dq_head: Int64,
        lse_row: Int64,
        lse_head: Int64,
        delta_row: Int64,
        delta_head: Int64,
        stream: cuda.CUstream,
    ):
        """Launch the kernel. Strides are in elements; those of ``dq`` are multiples of 16 bytes.

        With ``some``, only rows and heads to which lists add by their ``states`` are set to 0.
        """
        at_once = THREADS // 32 * OPEN_LAPS
        programs = (rows * heads + at_once - 1) // at_once
        strides = (dq_row, dq_head, lse_row, lse_head, delta_row, delta_head)
        self.kernel(dq, lse, delta, statistics, states, rows, heads, some, *strides).launch(
            grid=(programs, 1, 1), block=(THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        dq: cute.Pointer,
        lse: cute.Pointer,
        delta: cute.Pointer,
        statistics: cute.Pointer,
        states: cute.Pointer,
        rows: Int32,
        heads: Int32,
        some: Int32,
        dq_row: Int64,
        dq_head: Int64,
        lse_row: Int64,
        lse_head: Int64,
        delta_row: Int64,
        delta_head: Int64,
    ):
        cute.arch.griddepcontrol_launch_dependents()
        warps, P = THREADS // 32, self.pack
        warp, lane, thread = cute.arch.warp_idx(), cute.arch.lane_idx(), cute.arch.thread_idx()[0]
        first = cute.arch.block_idx()[0] * (warps * OPEN_LAPS)
        nothing = cute.make_rmem_tensor(4, Float32)
        nothing.fill(0.0)
        for lap in cutlass.range_constexpr(OPEN_LAPS if self.clears else 0):
            number = first + lap * warps + warp
            if number < rows * heads:  # noqa: SIM102  (both sides of an "and" would be computed)
                if state_of(states, number, some) == ADDED:
                    at = number // heads * dq_row + number % heads * dq_head + lane * 4
                    cute.autovec_copy(nothing, vector_at(Float32, dq + at, 4))
        mine = first + thread
        if thread < warps * OPEN_LAPS and mine < rows * heads:
            row, head, chunk, packed = place_of(mine, rows, heads, P)
            at = Int64(chunk) * 2 * rows * P + packed
            top = vector_at(Float32, lse + (row * lse_row + head * lse_head), 1)[0]
            inner = vector_at(Float32, delta + (row * delta_row + head * delta_head), 1)[0]
            vector_at(Float32, statistics + at, 1)[0] = top * LOG2E
            vector_at(Float32, statistics + (at + Int64(rows) * P), 1)[0] = inner


class Close:
    """The kernel that closes an open dq: it puts the columns in place and scales them.

    It writes to the same memory, or rounded to ``dtype`` to another tensor. A warp handles a row. Told the states of
    rows (:mod:`flexcp.executor.kernels.dq_states`), it closes those to which lists add and leaves others alone.
    """

    def __init__(self, dtype):
        self.dtype = dtype

    @cute.jit
    def __call__(
        self,
        dq: cute.Pointer,
        out: cute.Pointer,
        states: cute.Pointer,
        rows: Int32,
        heads: Int32,
        last_state: Int32,
        dq_row: Int64,
        dq_head: Int64,
        out_row: Int64,
        out_head: Int64,
        scale: Float32,
        stream: cuda.CUstream,
    ):
        """Launch the kernel; ``out`` may be ``dq``.

        Strides are in elements; those of ``dq`` are multiples of 16 bytes. ``last_state`` is 0 without states,
        ``ADDED`` if only rows to which lists add are written, and ``EMPTY`` if rows to which nothing adds are set to 0
        too.
        """
        at_once = THREADS // 32 * LAPS
        programs = (rows * heads + at_once - 1) // at_once
        self.kernel(dq, out, states, rows, heads, last_state, dq_row, dq_head, out_row, out_head, scale).launch(
            grid=(programs, 1, 1), block=(THREADS, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(
        self,
        dq: cute.Pointer,
        out: cute.Pointer,
        states: cute.Pointer,
        rows: Int32,
        heads: Int32,
        last_state: Int32,
        dq_row: Int64,
        dq_head: Int64,
        out_row: Int64,
        out_head: Int64,
        scale: Float32,
    ):
        cute.arch.griddepcontrol_wait()
        warps = THREADS // 32
        warp, lane = cute.arch.warp_idx(), cute.arch.lane_idx()
        first = cute.arch.block_idx()[0] * (warps * LAPS) + warp
        found = cute.make_rmem_tensor((4, LAPS), Float32)
        found.fill(0.0)
        state = cute.make_rmem_tensor(LAPS, Int32)
        for lap in cutlass.range_constexpr(LAPS):
            number = first + lap * warps
            state[lap] = Int32(OTHERS)
            if number < rows * heads:
                state[lap] = state_of(states, number, last_state)
        for lap in cutlass.range_constexpr(LAPS):
            number = first + lap * warps
            if state[lap] == ADDED:
                at = number // heads * dq_row + number % heads * dq_head + lane * 4
                cute.autovec_copy(vector_at(Float32, dq + at, 4), found[None, lap])
        # The whole row must be read before any of it is written.
        cute.arch.sync_warp()
        # Lanes that hold neighbouring columns exchange pairs, so that each has four adjacent ones.
        odd = lane // 2 % 2
        column = lane // 8 * 32 + lane % 2 * 16 + odd * 8 + lane % 8 // 4 * 4
        for lap in cutlass.range_constexpr(LAPS):
            number = first + lap * warps
            four = cute.make_rmem_tensor(4, Float32)
            for i in cutlass.range_constexpr(2):
                low, high = found[i, lap] * scale, found[2 + i, lap] * scale
                other = cute.arch.shuffle_sync_bfly(high if odd == 0 else low, offset=2)
                four[i] = low if odd == 0 else other
                four[2 + i] = other if odd == 0 else high
            if state[lap] == ADDED or (state[lap] == EMPTY and last_state == EMPTY):
                to = out + (number // heads * out_row + number % heads * out_head + column)
                if const_expr(self.dtype is Float32):
                    cute.autovec_copy(four, vector_at(Float32, to, 4))
                else:
                    words = cute.make_rmem_tensor(2, Int32)
                    words[0] = rounded_pair(four[0], four[1], self.dtype)
                    words[1] = rounded_pair(four[2], four[3], self.dtype)
                    there = cute.make_ptr(Int32, to.toint(), cute.AddressSpace.gmem, assumed_align=8)
                    cute.autovec_copy(words, cute.make_tensor(there, cute.make_layout(2)))

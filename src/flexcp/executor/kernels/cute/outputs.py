"""Outputs: how the CuTe forward kernel writes its results from registers, as float32 sums or in the model's dtype."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import cutlass
from cutlass import Float32, cute
from cutlass.cute.nvgpu import warp

from flexcp.executor.kernels.cute.parts import ROWS, by_rows, round_to


@cute.jit
def write_sums(acc, out, o_at, row0, row1, m, column0, pack: cutlass.Constexpr[int]):
    """Write float32 results from the registers to memory."""
    rows = by_rows(acc)
    for r in cutlass.range_constexpr(2):
        if row0 + m[r] // pack < row1:
            for c in cutlass.range_constexpr(cute.size(rows, mode=[1]) // 2):
                pair = cute.make_rmem_tensor(2, Float32)
                pair[0], pair[1] = rows[r, 2 * c], rows[r, 2 * c + 1]
                at = (out + (o_at[r] + column0 + 8 * c)).align(8)
                cute.autovec_copy(pair, cute.make_tensor(at, cute.make_layout(2)))


@cute.jit
def write_rounded(mma_O, acc, sO, rounded, thread, wg, row0, row1, group, barrier, pack: cutlass.Constexpr[int]):
    """Write results in the model's dtype, through shared memory, so that whole cache lines are written.

    Each thread writes 16 bytes at a time. ``rounded`` is (tensor, stride of rows, stride of heads), and ``barrier`` is
    the named barrier of this warp group.
    """
    out, o_row, o_head = rounded
    dtype = sO.element_type
    results = cute.make_rmem_tensor(acc.shape, dtype)
    round_to(acc, results)
    atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(transpose=False, num_matrices=4), dtype)
    copy = cute.make_tiled_copy_C(atom, mma_O).get_slice(thread)
    mine = sO[None, None, wg]
    cute.arch.barrier(barrier_id=barrier, number_of_threads=128)
    cute.copy(copy, copy.retile(results), copy.partition_D(mine))
    cute.arch.barrier(barrier_id=barrier, number_of_threads=128)
    across = cute.size(mine, mode=[1]) // 8
    for i in cutlass.range_constexpr(ROWS * across // 128):
        at = i * 128 + thread
        r, part = at // across, at % across
        m = wg * ROWS + r
        row, head = row0 + m // pack, group * pack + m % pack
        if row < row1:
            numbers = cute.make_rmem_tensor(8, dtype)
            cute.autovec_copy(cute.local_tile(mine[r, None], (8,), (part,)), numbers)
            to = (out + (row * o_row + head * o_head + part * 8)).align(16)
            cute.autovec_copy(numbers, cute.make_tensor(to, cute.make_layout(8)))

"""Results: how the fused CuTe backward kernel writes its results from registers.

A warp group stores dq of a block in a buffer in shared memory, and the copy engine adds the buffer to memory. There are
three orders of dq in memory:

    rows   the caller's tensor as it is, to which other code may add as well
    open   the caller's tensor while only these kernels add to it: rows and heads are in place, but the columns of a row
           are in the order of the registers (:mod:`flexcp.executor.kernels.cute.rows`). That needs half as many stores,
           no bank conflicts between threads that store together, and no scaling
    alone  a buffer of this launch alone (its *sums*), also in the order of the registers, to which contiguous memory is
           added

dk and dv of a tile are added to the caller's float32 tensors, four adjacent numbers per request, if tiles are split
over programs; otherwise they are written once, in the model's dtype.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, Int64, const_expr, cute
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import dsl_user_op

from flexcp.executor.kernels.cute.parts import by_rows, rounded_pair

M = 64  # packed queries of a block


def tensor_addresses(dq_memory, wg, row, lane, width):
    """Return four addresses of this thread's numbers of dq in the shared buffer, for dq in the order "rows".

    The other addresses are at constant distances from them. The buffer has rows of 32 numbers whose eight chunks of 16
    bytes are permuted by the row number, as the copy engine expects.
    """
    chunk16 = ((lane % 4) // 2) ^ (row % 8)
    first = wg * (M * width) + row * 32 + (lane % 2) * 2
    return [dq_memory + (first + (chunk16 ^ (2 * i)) * 4) for i in range(4)]


@cute.jit
def save_tensor(dq_at, acc_dQ, width: cutlass.Constexpr[int], scale):
    """Store this thread's numbers of a block's dq, scaled, in the shared buffer, for dq in the order "rows"."""
    rows = by_rows(acc_dQ)
    for r in cutlass.range_constexpr(2):
        for j in cutlass.range_constexpr(width // 8):
            pair = cute.make_rmem_tensor(2, Float32)
            pair[0], pair[1] = rows[r, 2 * j] * scale, rows[r, 2 * j + 1] * scale
            cute.autovec_copy(pair, _shared(dq_at[j % 4] + (j // 4 * M * 32 + r * 8 * 32), 2))


def open_addresses(dq_memory, wg, row, lane, width):
    """Return this thread's addresses in the shared buffer, for dq in the order "open".

    They are those of column groups 0 and 1; the others are at constant distances.
    """
    chunk16 = ((lane % 4) * 2) ^ (row % 8)
    first = wg * (M * width) + row * 32
    return [dq_memory + (first + (chunk16 ^ i) * 4) for i in range(2)]


@cute.jit
def save_open(dq_at, acc_dQ, width: cutlass.Constexpr[int]):
    """Store this thread's numbers of a block's dq in the shared buffer, for dq in the order "open"."""
    rows = by_rows(acc_dQ)
    for r in cutlass.range_constexpr(2):
        for g in cutlass.range_constexpr(width // 16):
            _save_four(rows, r, g, dq_at[g % 2] + (g // 2 * M * 32 + r * 8 * 32))


def sums_addresses(dq_memory, wg, row, lane, width):
    """Return this thread's addresses in the shared buffer, for dq in the order "alone".

    They are those of column groups 0 and 1 in an even row.
    """
    first = dq_memory + (wg * (M * width) + row * width + (lane % 4) * 4)
    return [first, first + 16]


@cute.jit
def save_sums(dq_at, acc_dQ, width: cutlass.Constexpr[int], odd):
    """Store this thread's numbers of a block's dq in the shared buffer, for dq in the order "alone".

    ``odd`` is 1 if its rows have odd numbers, else 0.
    """
    rows = by_rows(acc_dQ)
    even_at, odd_at = dq_at[0] + odd * 16, dq_at[1] - odd * 16
    for r in cutlass.range_constexpr(2):
        for g in cutlass.range_constexpr(width // 16):
            at = even_at if const_expr(g % 2 == 0) else odd_at
            _save_four(rows, r, g, at + (r * 8 * width + g // 2 * 32))


@cute.jit
def _save_four(rows, r: cutlass.Constexpr[int], group: cutlass.Constexpr[int], at):
    """Store this thread's four numbers of a group of 16 columns at once."""
    four = cute.make_rmem_tensor(4, Float32)
    for e in cutlass.range_constexpr(4):
        four[e] = rows[r, 4 * group + e]
    cute.autovec_copy(four, _shared(at, 4))


@cute.jit
def _shared(pointer, size: cutlass.Constexpr[int]):
    there = cute.make_ptr(Float32, pointer.toint(), cute.AddressSpace.smem, assumed_align=size * 4)
    return cute.make_tensor(there, cute.make_layout(size))


@dsl_user_op
def add_run(source, target, size, *, loc=None, ip=None):
    """Let the copy engine add ``size`` bytes of float32 numbers from shared memory to those at ``target``."""
    operands = [target.llvm_ptr, source.toint(loc=loc, ip=ip).ir_value(), Int32(size).ir_value()]
    code = "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [$0], [$1], $2;"
    flags = {"has_side_effects": True, "is_align_stack": False, "asm_dialect": llvm.AsmDialect.AD_ATT}
    llvm.inline_asm(None, operands, code, "l,r,r", **flags)


@dsl_user_op
def add_four(target, numbers, *, loc=None, ip=None):
    """Add four float32 numbers to those at ``target``, an address aligned to 16 bytes, in one request."""
    operands = [target.llvm_ptr, *(Float32(x).ir_value(loc=loc, ip=ip) for x in numbers)]
    code = "red.relaxed.gpu.global.add.v4.f32 [$0], {$1, $2, $3, $4};"
    flags = {"has_side_effects": True, "is_align_stack": False, "asm_dialect": llvm.AsmDialect.AD_ATT}
    llvm.inline_asm(None, operands, code, "l,f,f,f,f", **flags)


@cute.jit
def add_rows(out, accumulator, key, key1, group, row_stride, head_stride, column0, factor):
    """Add this thread's rows of dk or dv, times ``factor``, to float32 memory.

    They are added, because several programs may compute parts of a tile. Neighbouring threads exchange pairs of
    numbers, so that each has four adjacent ones: of every 16 columns, the even thread gets numbers of columns 0 to 7
    and the odd one those of columns 8 to 15.
    """
    rows = by_rows(accumulator)
    odd = column0 % 4 != 0
    column = column0 + 6 if odd else column0
    fours = cute.size(rows, mode=[1]) // 4
    for r in cutlass.range_constexpr(2):
        found = cute.make_rmem_tensor((4, fours), Float32)
        for j in cutlass.range_constexpr(fours):
            for i in cutlass.range_constexpr(2):
                low, high = rows[r, 4 * j + i] * factor, rows[r, 4 * j + 2 + i] * factor
                other = cute.arch.shuffle_sync_bfly(low if odd else high, offset=1)
                found[i, j] = other if odd else low
                found[2 + i, j] = high if odd else other
        if key + 8 * r < key1:
            at = out + (Int64(key + 8 * r) * row_stride + group * head_stride + column)
            for j in cutlass.range_constexpr(fours):
                add_four(at + 16 * j, [found[i, j] for i in range(4)])


@cute.jit
def write_rows(out, accumulator, key, key1, group, row_stride, head_stride, column0, factor, dtype):
    """Write this thread's rows of dk or dv, times ``factor``, to memory, rounded to ``dtype``."""
    rows, out = by_rows(accumulator), cute.recast_ptr(out, dtype=dtype)
    for r in cutlass.range_constexpr(2):
        if key + 8 * r < key1:
            first = out + (Int64(key + 8 * r) * row_stride + group * head_stride + column0)
            for j in cutlass.range_constexpr(cute.size(rows, mode=[1]) // 2):
                at = cute.make_ptr(Int32, (first + 8 * j).toint(), cute.AddressSpace.gmem, assumed_align=4)
                pair = rounded_pair(rows[r, 2 * j] * factor, rows[r, 2 * j + 1] * factor, dtype)
                cute.make_tensor(at, cute.make_layout(1))[0] = pair

"""Parts: functions that the CuTe kernels share, for tiles in shared memory, matrix products and their registers.

A warp group of 128 threads computes products of 64 rows. Thread t holds parts of two rows of the result,
``16 * (t // 32) + t % 32 // 4`` and the one eight below it. Of each row it holds two adjacent columns out of every
eight, beginning with column ``2 * (t % 4)``.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import math

import cutlass
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int32, const_expr, cute
from cutlass._mlir.dialects import llvm
from cutlass.cute.nvgpu import warpgroup
from cutlass.cutlass_dsl import T, dsl_user_op
from cutlass.tensor_utils import LayoutEnum

from flexcp.executor.kernels.cute.items import RECORD

LOG2E = math.log2(math.e)
LN2 = math.log(2.0)
ROWS = 64  # rows of a warp group's product
THREADS = 384  # one warp group that loads and stores, two that compute
LOAD_REGISTERS, COMPUTE_REGISTERS = 24, 240
FAR = 1 << 30  # stands for the length of a table, or a number of items, where the true number is not needed


def shared_layout(dtype, rows, width, stages):
    """Return the shared-memory layout of a tensor ``[rows, width, stages]`` for copy engine and tensor cores."""
    atom = sm90.get_smem_layout_atom(LayoutEnum.ROW_MAJOR, dtype, width)
    return cute.tile_to_shape(warpgroup.make_smem_layout_atom(atom, dtype), (rows, width, stages), order=(0, 1, 2))


def shared_tensor(smem, dtype, layout):
    """Allocate a tensor with this layout in shared memory."""
    return smem.allocate_tensor(dtype, layout.outer, byte_alignment=1024, swizzle=layout.inner)


def packed_heads_view(tensor, pack):
    """Return a tensor ``((heads, rows), width)`` as ``((pack, rows), width, heads / pack)``.

    A row of a tile is then a token and one of ``pack`` heads.
    """
    (heads, rows), width = tensor.shape
    stride = (tensor.stride[0], tensor.stride[1], tensor.stride[0][0] * pack)
    return cute.make_tensor(tensor.iterator, cute.make_layout(((pack, rows), width, heads // pack), stride=stride))


def transposed(tensor):
    """Return the tensor with its first two dimensions exchanged."""
    shape = (tensor.shape[1], tensor.shape[0], tensor.shape[2])
    return cute.composition(tensor, cute.make_ordered_layout(shape, order=(1, 0, 2)))


def by_rows(accumulator):
    """Return the registers of a product as a tensor (rows of this thread, columns of this thread)."""
    shape, stride = accumulator.layout.shape, accumulator.layout.stride
    rows = ((shape[0][1], shape[1]), (stride[0][1], stride[1]))
    columns = ((shape[0][0], shape[0][2], shape[2]), (stride[0][0], stride[0][2], stride[2]))
    layout = cute.make_layout((rows[0], columns[0]), stride=(rows[1], columns[1]))
    return cute.make_tensor(accumulator.iterator, layout)


def as_operand(accumulator):
    """Return the registers of a product in the layout of the left operand of another product."""
    pairs = cute.logical_divide(accumulator.layout, ((None, None, 2), None, None))
    shape, stride = pairs.shape, pairs.stride
    layout = cute.make_layout(
        ((shape[0][0], shape[0][1], shape[0][2][0]), shape[1], (shape[0][2][1], shape[2])),
        stride=((stride[0][0], stride[0][1], stride[0][2][0]), stride[1], (stride[0][2][1], stride[2])),
    )
    return cute.make_tensor(accumulator.iterator, layout)


def tiled_product(dtype, columns, a_mode, b_mode, from_registers=False):
    """Return the tiled product of 64 rows and ``columns`` columns by one warp group.

    The left operand comes from shared memory or, with ``from_registers``, from registers. ``a_mode`` and ``b_mode`` say
    which dimension of each operand is contiguous.
    """
    source = warpgroup.OperandSource.RMEM if from_registers else warpgroup.OperandSource.SMEM
    return sm90.make_trivial_tiled_mma(
        dtype, dtype, a_mode, b_mode, Float32, atom_layout_mnk=(1, 1, 1), tiler_mn=(ROWS, columns), a_source=source
    )


@cute.jit
def product(tiled_mma, accumulator, pairs, fresh: cutlass.Constexpr[bool]):
    """Start the products of all ``pairs`` of operands and add them to ``accumulator``.

    With ``fresh`` the first one overwrites it. The caller waits for the results.
    """
    warpgroup.fence()
    atom = cute.make_mma_atom(tiled_mma.op)
    atom.set(warpgroup.Field.ACCUMULATE, not fresh)
    for a, b in pairs:
        for i in cutlass.range_constexpr(cute.size(a.shape[2])):
            cute.gemm(atom, accumulator, a[None, None, i], b[None, None, i], accumulator)
            atom.set(warpgroup.Field.ACCUMULATE, True)
    warpgroup.commit_group()


@dsl_user_op
def rounded_pair(low, high, dtype, *, loc=None, ip=None):
    """Round two float32 numbers to ``dtype`` (16 bits) and pack them into one Int32, ``low`` in the lower half."""
    kind = "bf16x2" if dtype is cutlass.BFloat16 else "f16x2"
    operands = [Float32(x).ir_value(loc=loc, ip=ip) for x in (low, high)]
    code = f"cvt.rn.{kind}.f32 $0, $2, $1;"
    flags = {"has_side_effects": False, "is_align_stack": False, "asm_dialect": llvm.AsmDialect.AD_ATT}
    return Int32(llvm.inline_asm(T.i32(), operands, code, "=r,f,f", **flags))


@cute.jit
def round_to(source, target):
    """Round float32 registers to 16-bit ones at this point of the code.

    The compiler would move a plain conversion to the place where its result is used, after other work.
    """
    words = cute.recast_tensor(target, Int32)
    for i in cutlass.range_constexpr(cute.size(words)):
        words[i] = rounded_pair(source[2 * i], source[2 * i + 1], target.element_type)


@dsl_user_op
def seen_bits(first, last, *, loc=None, ip=None):
    """Return a word of 32 bits in which the bits ``first`` to ``last``, inclusive, are set; both may be any integers.

    This relies on PTX, in which shifts by 32 or more give 0.
    """
    operands = [Int32(x).ir_value(loc=loc, ip=ip) for x in (first, last)]
    code = """{
        .reg .b32 from, past;
        max.s32 from, $1, 0;
        add.s32 past, $2, 1;
        max.s32 past, past, 0;
        shl.b32 from, -1, from;
        shl.b32 past, -1, past;
        not.b32 past, past;
        and.b32 $0, from, past;
    }"""
    flags = {"has_side_effects": False, "is_align_stack": False, "asm_dialect": llvm.AsmDialect.AD_ATT}
    return Int32(llvm.inline_asm(T.i32(), operands, code, "=r,r,r", **flags))


@dsl_user_op
def kept(word, bits, bit, *, loc=None, ip=None):
    """Return ``word`` if bit number ``bit`` of ``bits`` is set, else 0.

    ``bit`` is a constant, so this is one test and one selection.
    """
    operands = [Int32(x).ir_value(loc=loc, ip=ip) for x in (word, bits)]
    code = f"{{ .reg .pred p; .reg .b32 t; and.b32 t, $2, {1 << bit}; setp.ne.s32 p, t, 0; selp.b32 $0, $1, 0, p; }}"
    flags = {"has_side_effects": False, "is_align_stack": False, "asm_dialect": llvm.AsmDialect.AD_ATT}
    return Int32(llvm.inline_asm(T.i32(), operands, code, "=r,r,r", **flags))


@cute.jit
def bounded(s, inner):
    """Return tanh of a logit times ``inner``, for a softcap; -inf stays -inf."""
    x = cute.math.exp2(cutlass.min(s * inner, Float32(20.0)) * (2 * LOG2E), fastmath=True)
    return -Float32.inf if s == -Float32.inf else 1.0 - 2.0 / (1.0 + x)


@dsl_user_op
def fetch_line(pointer, *, loc=None, ip=None):
    """Prefetch the cache line at ``pointer`` into the L2."""
    flags = {"has_side_effects": True, "is_align_stack": False, "asm_dialect": llvm.AsmDialect.AD_ATT}
    llvm.inline_asm(None, [pointer.llvm_ptr], "prefetch.global.L2 [$0];", "l", **flags)


@cute.jit
def next_buffer(stage, phase, stages: cutlass.Constexpr[int]):
    """Return the next buffer of a ring, and the phase of its barriers."""
    after = stage + 1 if stage + 1 < stages else Int32(0)
    return after, phase ^ 1 if after == 0 else phase


@cute.jit
def read_record(records, turn, record):
    """Load record number ``turn`` of a launch into the registers ``record``."""
    at = cute.make_ptr(Int32, (records + turn * RECORD).toint(), cute.AddressSpace.gmem, assumed_align=16)
    cute.autovec_copy(cute.make_tensor(at, cute.make_layout(RECORD)), record)


def record_fields(record):
    """Return the 12 fields of a record, which describes an item (:func:`flexcp.executor.kernels.cute.items.records`).

    They are: first row (-1: no more items), last row + 1, first segment, blocks; first key, blocks and mask of that
    segment; group of heads; counter and place of a part of a tile; whether the item is the last, and whether it is the
    first, to add to its rows.
    """
    return [record[i] for i in range(12)]


@cute.jit
def segment_start(segments, segment):
    """Return the first key of a segment, its number of blocks, and whether they need a mask."""
    at = cute.make_ptr(Int32, (segments + segment * 8).toint(), cute.AddressSpace.gmem, assumed_align=16)
    found = cute.make_rmem_tensor(4, Int32)
    cute.autovec_copy(cute.make_tensor(at, cute.make_layout(4)), found)
    return found[0], found[1], found[2]


@cute.jit
def segment_limits(segments, segment):
    """Return lo, hi, the end of the keys, q0 and q1 of a segment: row q sees key k if ``lo <= k - q <= hi``.

    Only rows ``q0 <= q < q1`` and keys before the end do.
    """
    at = cute.make_ptr(Int32, (segments + segment * 8).toint(), cute.AddressSpace.gmem, assumed_align=16)
    found = cute.make_rmem_tensor(8, Int32)
    cute.autovec_copy(cute.make_tensor(at, cute.make_layout(8)), found)
    return found[3], found[4], found[5], found[6], found[7]


@cute.jit
def arrive(bar):
    """Arrive at a barrier with one lane of this warp: the warp is done with a buffer."""
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(bar)


@cute.jit
def expect(bar, size):
    """Arrive at a barrier with one lane, and announce how many bytes the copy engine will bring."""
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(bar, size)


@cute.jit
def load_box(atom, source, target, bar):
    """Start to load a box of a tensor into a buffer, by the copy engine."""
    to, at = cute.nvgpu.cpasync.tma_partition(
        atom, 0, cute.make_layout(1), cute.group_modes(target, 0, 2), cute.group_modes(source, 0, 2)
    )
    cute.copy(atom, at, to, tma_bar_ptr=bar)


@cute.jit
def zero_from(buffer, valid, thread):
    """Zero the rows of a buffer from row ``valid`` on.

    Memory past the end may hold anything, and 0 * NaN is NaN.
    """
    rows, width = buffer.shape[0], buffer.shape[1]
    zeros = cute.make_rmem_tensor(8, buffer.element_type)
    zeros.fill(0.0)
    across = cute.size(width) // 8
    for i in cutlass.range_constexpr(cute.size(rows) * across // 128):
        at = i * 128 + thread
        if at // across >= valid:
            cute.autovec_copy(zeros, cute.local_tile(buffer[at // across, None], (8,), (at % across,)))
    cute.arch.fence_view_async_shared()


@cute.jit
def init_bars(bars, counts: cutlass.Constexpr[tuple]):
    """Initialise barriers; ``counts`` is the number of arrivals that completes each."""
    for i in cutlass.range_constexpr(len(counts)):
        cute.arch.mbarrier_init(bars + i, const_expr(counts[i]))

"""The forward kernel for Hopper (sm90) in Gluon: TMA copies, asynchronous tensor cores, warp specialisation.

There is one persistent program per multiprocessor that the launch may use. An item of its work is a tile of 128 packed
query rows (each one token and one head) of a group of heads. Programs take items, the longest tiles first, in a
*zigzag* through the list, so that the program with the longest tile of one round has the shortest of the next. Three
partitions of warps work on a tile:

    load       one warp: loads the queries, then the keys and values block by block, by TMA into rings of buffers
    compute 0  one warp group: rows 0..63 of the tile
    compute 1  one warp group: rows 64..127

A warp group starts the logits of block j + 1 and the product with the values of block j together, and computes the
softmax of block j + 1 while the tensor cores multiply the values. The two groups take turns in starting products
(*ping-pong*), so that the softmax of one runs beside the products of the other.

The blocks of a tile are walked in one loop over its segments (:mod:`flexcp.executor.kernels.tiles`). Keys past the end
of a slice may hold anything: their logits are masked, and their values are zeroed in the buffer, since 0 * NaN is NaN.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from flexcp.executor.kernels.hopper.rings import (
    first_item,
    load_box,
    load_keys,
    next_item,
    next_slot,
    ring_barriers,
)

LN2 = gl.constexpr(0.6931471805599453)
LOG2E = gl.constexpr(1.4426950408889634)
ROWS = gl.constexpr(64)  # packed query rows of one warp group


@gluon.jit(do_not_specialize=["n_tiles", "groups", "chunk", "scale", "softcap", "so0", "so1", "sl0", "sl1"])
def forward_kernel(
    q,
    k,
    v,
    out,
    lse,
    tiles,
    segments,
    n_tiles,
    groups,
    chunk,
    scale,
    softcap,
    so0,
    so1,
    sl0,
    sl1,
    SHARE: gl.constexpr,
    PACK: gl.constexpr,
    D: gl.constexpr,
    V: gl.constexpr,
    N: gl.constexpr,
    STAGES: gl.constexpr,
    SOFTCAP: gl.constexpr,
    FRESH: gl.constexpr,
):
    q_smem = gl.allocate_shared_memory(q.dtype, [2, ROWS // PACK, PACK, D], q.layout)
    k_smem = gl.allocate_shared_memory(k.dtype, [STAGES, N, 1, D], k.layout)
    v_smem = gl.allocate_shared_memory(v.dtype, [STAGES, N, 1, V], v.layout)
    # Full and free barriers of the queries, of the rings of keys and values, and barriers for the groups' turns.
    q_bars = ring_barriers(1, 1)
    k_bars = ring_barriers(STAGES, 1)
    v_bars = ring_barriers(STAGES, 1)
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(turns.index(0), count=1)
    mbarrier.init(turns.index(1), count=1)
    fence_async_shared()

    common = (tiles, segments, n_tiles, groups, chunk)
    buffers = (q_smem, k_smem, v_smem, q_bars, k_bars, v_bars, turns)
    results = (out, lse, scale, softcap, so0, so1, sl0, sl1)
    gl.warp_specialize(
        [
            (_compute, (0, common, buffers, results, PACK, D, V, N, STAGES, SOFTCAP, FRESH)),
            (_compute, (1, common, buffers, results, PACK, D, V, N, STAGES, SOFTCAP, FRESH)),
            (_load, (q, k, v, common, buffers, SHARE, PACK, D, V, N, STAGES)),
        ],
        [4, 1],
        [240, 24],
    )


@gluon.jit
def _load(
    q,
    k,
    v,
    common,
    buffers,
    SHARE: gl.constexpr,
    PACK: gl.constexpr,
    D: gl.constexpr,
    V: gl.constexpr,
    N: gl.constexpr,
    STAGES: gl.constexpr,
):
    tiles, segments, n_tiles, groups, chunk = common
    n_programs = n_tiles * groups
    q_smem, k_smem, v_smem, q_bars, k_bars, v_bars, _turns = buffers
    size: gl.constexpr = q.dtype.primitive_bitwidth // 8
    stage = 0
    phase = 1  # a new free barrier counts as passed for phase 1
    q_phase = 1
    program, step = first_item()
    while program < n_programs:
        tile, group = whose(program, n_tiles, groups, chunk)
        row0 = gl.load(tiles + tile * 4)
        segment = gl.load(tiles + tile * 4 + 2)
        blocks = gl.load(tiles + tile * 4 + 3)
        key = gl.load(segments + segment * 8)
        left = gl.load(segments + segment * 8 + 1)
        mbarrier.wait(q_bars.index(1), q_phase)
        q_phase ^= 1
        mbarrier.expect(q_bars.index(0), 2 * ROWS * D * size)
        load_box(q, [row0, group * PACK, 0], q_bars.index(0), q_smem.index(0))
        load_box(q, [row0 + ROWS // PACK, group * PACK, 0], q_bars.index(0), q_smem.index(1))
        head = group * PACK // SHARE
        stage, phase = load_keys(
            k,
            v,
            head,
            key,
            left,
            segment,
            segments,
            blocks,
            k_smem,
            v_smem,
            k_bars,
            v_bars,
            stage,
            phase,
            N,
            D,
            V,
            STAGES,
        )
        program, step = next_item(program, step)


@gluon.jit
def _compute(
    group_id: gl.constexpr,
    common,
    buffers,
    results,
    PACK: gl.constexpr,
    D: gl.constexpr,
    V: gl.constexpr,
    N: gl.constexpr,
    STAGES: gl.constexpr,
    SOFTCAP: gl.constexpr,
    FRESH: gl.constexpr,
):
    """Compute one warp group's rows of every tile of this program: logits, softmax and the sum of values.

    In one piece: a step of the loop over keys has the logits of one block and the product with the values of the block
    before it in flight together, so neither can be a function that starts its product and waits for it.
    """
    tiles, segments, n_tiles, groups, chunk = common
    n_programs = n_tiles * groups
    q_smem, k_smem, v_smem, q_bars, k_bars, v_bars, turns = buffers
    out, lse, scale, softcap, so0, so1, sl0, sl1 = results
    s_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, V, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=o_layout, k_width=2)
    s_rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    o_rows: gl.constexpr = gl.SliceLayout(1, o_layout)
    q_mem = q_smem.index(group_id).reshape([ROWS, D])
    m = group_id * ROWS + gl.arange(0, ROWS, layout=s_rows)
    column = gl.arange(0, N, layout=gl.SliceLayout(0, s_layout))
    mo = group_id * ROWS + gl.arange(0, ROWS, layout=o_rows)
    e = gl.arange(0, V, layout=gl.SliceLayout(0, o_layout))
    so0 = so0 * 16
    so1 = so1 * 16
    stage = 0
    phase = 0
    q_phase = 0
    turn = 1 - group_id  # group 0 begins: a new barrier counts as passed for phase 1
    program, step = first_item()
    while program < n_programs:
        tile, group = whose(program, n_tiles, groups, chunk)
        row0 = gl.load(tiles + tile * 4)
        row1 = gl.load(tiles + tile * 4 + 1)
        segment = gl.load(tiles + tile * 4 + 2)
        blocks = gl.load(tiles + tile * 4 + 3)
        key = gl.load(segments + segment * 8)
        left = gl.load(segments + segment * 8 + 1)
        edge = gl.load(segments + segment * 8 + 2)
        row = row0 + m // PACK
        out_base = out + row0 * so0.to(gl.int64) + group * PACK * so1.to(gl.int64)
        lse_base = lse + row0 * sl0.to(gl.int64) + group * PACK * sl1.to(gl.int64)
        live = row0 + mo // PACK < row1
        if FRESH:
            top = gl.full([ROWS], float("-inf"), gl.float32, layout=s_rows)
            total = gl.full([ROWS], 0.0, gl.float32, layout=s_rows)
            acc = gl.full([ROWS, V], 0.0, gl.float32, layout=o_layout)
        else:
            before = lse_base + m // PACK * sl0 + m % PACK * sl1
            top = gl.load(before, mask=row < row1, other=float("-inf")) * LOG2E
            total = gl.where(top == float("-inf"), 0.0, 1.0)
            # Rows that have seen no key are zero, so they are not read.
            old = live & (gl.convert_layout(top, o_rows) > float("-inf"))
            at = (mo // PACK * so0 + mo % PACK * so1)[:, None] + e[None, :]
            acc = gl.load(out_base + at, mask=old[:, None], other=0.0).to(gl.float32)

        # Logits and softmax of the first block.
        mbarrier.wait(q_bars.index(0), q_phase)
        q_phase ^= 1
        mbarrier.wait(k_bars.index(stage), phase)
        s = gl.full([ROWS, N], 0.0, gl.float32, layout=s_layout)
        s = warpgroup_mma(q_mem, k_smem.index(stage).reshape([N, D]).permute((1, 0)), s, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=(s,))
        mbarrier.arrive(k_bars.index(STAGES + stage))
        valid = N
        if edge != 0:
            s = _masked(s, row, key + column, segments + segment * 8)
            valid = gl.load(segments + segment * 8 + 5) - key
        p, top, total, decay = _softmax(s, top, total, scale, softcap, SOFTCAP)
        acc = acc * gl.convert_layout(decay, o_rows)[:, None]
        p = gl.convert_layout(p.to(k_smem.dtype), p_layout)

        for _ in range(1, blocks):
            key += N
            left -= 1
            if left == 0:
                segment += 1
                key = gl.load(segments + segment * 8)
                left = gl.load(segments + segment * 8 + 1)
                edge = gl.load(segments + segment * 8 + 2)
            v_stage = stage
            v_phase = phase
            stage, phase = next_slot(stage, phase, STAGES)
            mbarrier.wait(k_bars.index(stage), phase)
            mbarrier.wait(turns.index(group_id), turn)
            turn ^= 1
            s = gl.full([ROWS, N], 0.0, gl.float32, layout=s_layout)
            s = warpgroup_mma(
                q_mem, k_smem.index(stage).reshape([N, D]).permute((1, 0)), s, use_acc=False, is_async=True
            )
            mbarrier.wait(v_bars.index(v_stage), v_phase)
            if valid < N:
                zero_tail(v_smem.index(v_stage).reshape([N, V]), valid, N, V)
            acc = warpgroup_mma(p, v_smem.index(v_stage).reshape([N, V]), acc, is_async=True)
            mbarrier.arrive(turns.index(1 - group_id))
            s = warpgroup_mma_wait(1, deps=(s,))
            mbarrier.arrive(k_bars.index(STAGES + stage))
            valid = N
            if edge != 0:
                s = _masked(s, row, key + column, segments + segment * 8)
                valid = gl.load(segments + segment * 8 + 5) - key
            p32, top, total, decay = _softmax(s, top, total, scale, softcap, SOFTCAP)
            acc = warpgroup_mma_wait(0, deps=(acc,))
            mbarrier.arrive(v_bars.index(STAGES + v_stage))
            acc = acc * gl.convert_layout(decay, o_rows)[:, None]
            p = gl.convert_layout(p32.to(k_smem.dtype), p_layout)

        # Free the queries for the next tile, then multiply the values of the last block.
        mbarrier.arrive(q_bars.index(1))
        mbarrier.wait(v_bars.index(stage), phase)
        if valid < N:
            zero_tail(v_smem.index(stage).reshape([N, V]), valid, N, V)
        acc = warpgroup_mma(p, v_smem.index(stage).reshape([N, V]), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(v_bars.index(STAGES + stage))
        stage, phase = next_slot(stage, phase, STAGES)

        share = 1.0 / gl.where(total == 0.0, 1.0, total)
        acc = acc * gl.convert_layout(share, o_rows)[:, None]
        at = (mo // PACK * so0 + mo % PACK * so1)[:, None] + e[None, :]
        gl.store(out_base + at, acc.to(out.dtype.element_ty), mask=live[:, None])
        gl.store(lse_base + m // PACK * sl0 + m % PACK * sl1, (top + gl.log2(total)) * LN2, mask=row < row1)
        program, step = next_item(program, step)


@gluon.jit
def whose(program, n_tiles, groups, chunk):
    """Return the tile and the group of heads of item ``program``; each group takes ``chunk`` tiles in its turn."""
    first = program // (chunk * groups) * chunk
    within = program - first * groups
    width = gl.minimum(chunk, n_tiles - first)
    return first + within % width, within // width


@gluon.jit
def _masked(s, row, column, segment):
    """Return the logits with -inf where the segment's band or rows hide the pair."""
    first, last = _bounds(row, segment)
    return gl.where((column[None, :] >= first[:, None]) & (column[None, :] <= last[:, None]), s, float("-inf"))


@gluon.jit
def seen(x, row, column, segment):
    """Return ``x`` with 0 where the segment's band or rows hide the pair."""
    first, last = _bounds(row, segment)
    return gl.where((column[None, :] >= first[:, None]) & (column[None, :] <= last[:, None]), x, 0.0)


@gluon.jit
def _bounds(row, segment):
    """Return the first and the last column of a segment that each row sees."""
    lo = gl.load(segment + 3)
    hi = gl.load(segment + 4)
    end = gl.load(segment + 5)
    q0 = gl.load(segment + 6)
    q1 = gl.load(segment + 7)
    return gl.where((row >= q0) & (row < q1), row + lo, 2147483647), gl.minimum(row + hi, end - 1)


@gluon.jit
def _softmax(s, top, total, scale, softcap, SOFTCAP: gl.constexpr):
    """Return probabilities, running maximum, running sum, and the factor of older results, after a block of logits.

    Maximum and exponents are in base 2.
    """
    if SOFTCAP:
        s = gl.where(s == float("-inf"), s, tanh(s * scale))
        scale = softcap * LOG2E
    new = gl.maximum(top, gl.max(s, axis=1) * scale)
    base = gl.where(new == float("-inf"), 0.0, new)
    p = gl.exp2(s * scale - base[:, None])
    decay = gl.exp2(top - base)
    total = total * decay + gl.sum(p, axis=1)
    return p, new, total, decay


@gluon.jit
def tanh(x):
    return 1.0 - 2.0 / (1.0 + gl.exp2(gl.minimum(x, 20.0) * (2.0 * LOG2E)))


@gluon.jit
def zero_tail(values, valid, N: gl.constexpr, V: gl.constexpr):
    """Zero the rows of a buffer from row ``valid`` on; both warp groups do this, and write the same zeros."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // V, V // 8], [4, 1], [1, 0])
    CHUNK: gl.constexpr = 16
    for i in gl.static_range(N // CHUNK):
        if (i + 1) * CHUNK > valid:
            part = values.slice(i * CHUNK, CHUNK, dim=0)
            row = i * CHUNK + gl.arange(0, CHUNK, layout=gl.SliceLayout(1, layout))
            x = part.load(layout)
            part.store(gl.where((row < valid)[:, None], x, gl.zeros_like(x)))
    fence_async_shared()

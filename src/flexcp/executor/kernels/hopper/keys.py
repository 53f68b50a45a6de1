"""The kernel of dk and dv for Hopper (sm90) in Gluon.

There is one persistent program per multiprocessor. It takes tiles of 128 keys of one KV head and walks the packed
queries that see them, 64 at a time. One warp loads queries and output gradients by the copy engine, and their
statistics (LSE and delta). Two warp groups compute 64 of the keys each. All products are transposed (keys x queries),
so that dK and dV stay in registers:

    S' = K Q'    P' = exp2(S' - lse)    dV += P' dO    dP' = V dO'    dS' = P' (dP' - delta)    dK += dS' Q

The logits of the next block are started right after the products of the current one, so that the tensor cores stay busy
while a warp group waits for them. dq has a kernel of its own (:mod:`flexcp.executor.kernels.hopper.queries`): a fused
kernel with five products instead of seven, in which the copy engine adds dq to memory, was measured to be slower
(docs/lab-notes.md). With a list without split tiles, every sum has a fixed order.

Queries past the end of a slice and keys past the end of a tile may hold anything: both are masked, and such queries are
also zeroed in the buffers.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from flexcp.executor.kernels.hopper.forward import LOG2E, seen, tanh, zero_tail
from flexcp.executor.kernels.hopper.rings import (
    first_item,
    load_box,
    next_block,
    next_item,
    next_slot,
    ring_barriers,
)

# Copies numbers to shared memory asynchronously; the function has different names in Triton 3.6 and 3.9.
load_numbers = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared
KEYS = gl.constexpr(128)  # keys of a tile
HALF = gl.constexpr(64)  # keys of one warp group
M = gl.constexpr(64)  # packed queries of a block


@gluon.jit(
    do_not_specialize=["groups", "n_programs", "rows", "heads", "scale", "softcap", "sdk0", "sdk1", "sdv0", "sdv1"]
)
def keys_kernel(
    q,
    k,
    v,
    do,
    statistics,
    dk,
    dv,
    tiles,
    segments,
    groups,
    n_programs,
    rows,
    heads,
    scale,
    softcap,
    sdk0,
    sdk1,
    sdv0,
    sdv1,
    SHARE: gl.constexpr,
    PACK: gl.constexpr,
    D: gl.constexpr,
    V: gl.constexpr,
    STAGES: gl.constexpr,
    SOFTCAP: gl.constexpr,
):
    k_smem = gl.allocate_shared_memory(k.dtype, [1, KEYS, 1, D], k.layout)
    v_smem = gl.allocate_shared_memory(v.dtype, [1, KEYS, 1, V], v.layout)
    q_smem = gl.allocate_shared_memory(q.dtype, [STAGES, M // PACK, PACK, D], q.layout)
    do_smem = gl.allocate_shared_memory(do.dtype, [STAGES, M // PACK, PACK, V], do.layout)
    stat_smem = gl.allocate_shared_memory(gl.float32, [2 * STAGES, M], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    # Full and free barriers of keys and values, and of the ring of queries (with statistics) and gradients.
    kv_bars = ring_barriers(1, 1)
    q_bars = ring_barriers(STAGES, 2)
    fence_async_shared()

    common = (tiles, segments, groups, n_programs)
    buffers = (k_smem, v_smem, q_smem, do_smem, stat_smem, kv_bars, q_bars)
    results = (dk, dv, scale, softcap, sdk0, sdk1, sdv0, sdv1)
    gl.warp_specialize(
        [
            (_compute, (0, common, buffers, results, SHARE, PACK, D, V, STAGES, SOFTCAP)),
            (_compute, (1, common, buffers, results, SHARE, PACK, D, V, STAGES, SOFTCAP)),
            (_load, (q, k, v, do, statistics, rows, heads, common, buffers, SHARE, PACK, D, V, STAGES)),
        ],
        [4, 1],
        [240, 24],
    )


@gluon.jit
def _load(
    q,
    k,
    v,
    do,
    statistics,
    rows,
    heads,
    common,
    buffers,
    SHARE: gl.constexpr,
    PACK: gl.constexpr,
    D: gl.constexpr,
    V: gl.constexpr,
    STAGES: gl.constexpr,
):
    tiles, segments, groups, n_programs = common
    k_smem, v_smem, q_smem, do_smem, stat_smem, kv_bars, q_bars = buffers
    size: gl.constexpr = q.dtype.primitive_bitwidth // 8
    CHUNKS: gl.constexpr = SHARE // PACK
    m = gl.arange(0, M, layout=gl.BlockedLayout([2], [32], [1], [0]))
    stage = 0
    phase = 1  # a new free barrier counts as passed for phase 1
    kv_phase = 1
    program, step = first_item()
    while program < n_programs:
        tile = program // groups
        group = program % groups
        key0 = gl.load(tiles + tile * 4)
        begin = gl.load(tiles + tile * 4 + 2)
        blocks = gl.load(tiles + tile * 4 + 3)
        mbarrier.wait(kv_bars.index(1), kv_phase)
        kv_phase ^= 1
        mbarrier.expect(kv_bars.index(0), KEYS * (D + V) * size)
        load_box(k, [key0, group, 0], kv_bars.index(0), k_smem.index(0))
        load_box(v, [key0, group, 0], kv_bars.index(0), v_smem.index(0))
        for chunk in range(CHUNKS):
            number = group * CHUNKS + chunk
            segment = begin
            query = gl.load(segments + segment * 8)
            left = gl.load(segments + segment * 8 + 1)
            for _ in range(blocks):
                mbarrier.wait(q_bars.index(2 * STAGES + stage), phase)
                lse_at = statistics + (number * rows.to(gl.int64) + query) * PACK
                delta_at = lse_at + heads * rows.to(gl.int64)
                load_numbers(stat_smem.index(stage), lse_at + m)
                load_numbers(stat_smem.index(STAGES + stage), delta_at + m)
                async_copy.mbarrier_arrive(q_bars.index(stage))
                mbarrier.expect(q_bars.index(stage), M * D * size)
                load_box(q, [query, number * PACK, 0], q_bars.index(stage), q_smem.index(stage))
                full = q_bars.index(STAGES + stage)
                mbarrier.expect(full, M * V * size)
                load_box(do, [query, number * PACK, 0], full, do_smem.index(stage))
                stage, phase = next_slot(stage, phase, STAGES)
                query, left, segment = next_block(query, left, segment, segments, M // PACK)
        program, step = next_item(program, step)


@gluon.jit
def _compute(
    group_id: gl.constexpr,
    common,
    buffers,
    results,
    SHARE: gl.constexpr,
    PACK: gl.constexpr,
    D: gl.constexpr,
    V: gl.constexpr,
    STAGES: gl.constexpr,
    SOFTCAP: gl.constexpr,
):
    """Compute one warp group's keys of every tile of this program: gradients of keys and values, summed over queries.

    In one piece: both sums and the positions in the rings live in registers across chunks of heads and blocks of
    queries, so an inner loop in a separate function would have to take and return them all.
    """
    tiles, segments, groups, n_programs = common
    k_smem, v_smem, q_smem, do_smem, stat_smem, kv_bars, q_bars = buffers
    dk, dv, scale, softcap, sdk0, sdk1, sdv0, sdv1 = results
    CHUNKS: gl.constexpr = SHARE // PACK
    s_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, M, 16])
    dk_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    dv_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, V, 16])
    columns: gl.constexpr = gl.SliceLayout(0, s_layout)
    n = group_id * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(1, s_layout))
    m_row = gl.arange(0, M, layout=columns) // PACK
    sdk0, sdk1, sdv0, sdv1 = sdk0 * 16, sdk1 * 16, sdv0 * 16, sdv1 * 16
    keys = k_smem.index(0).reshape([KEYS, D]).slice(group_id * HALF, HALF, dim=0)
    values = v_smem.index(0).reshape([KEYS, V]).slice(group_id * HALF, HALF, dim=0)
    unit = scale / LOG2E
    if SOFTCAP:
        unit = scale * softcap
    stage = 0
    phase = 0
    kv_phase = 0
    program, step = first_item()
    while program < n_programs:
        tile = program // groups
        group = program % groups
        key0 = gl.load(tiles + tile * 4)
        key1 = gl.load(tiles + tile * 4 + 1)
        begin = gl.load(tiles + tile * 4 + 2)
        blocks = gl.load(tiles + tile * 4 + 3)
        dk_acc = gl.full([HALF, D], 0.0, gl.float32, layout=dk_layout)
        dv_acc = gl.full([HALF, V], 0.0, gl.float32, layout=dv_layout)
        mbarrier.wait(kv_bars.index(0), kv_phase)
        kv_phase ^= 1
        for _ in range(CHUNKS):
            segment = begin
            query = gl.load(segments + segment * 8)
            left = gl.load(segments + segment * 8 + 1)
            edge = gl.load(segments + segment * 8 + 2)
            end = gl.load(segments + segment * 8 + 5)
            valid = (end - query) * PACK
            queries = q_smem.index(stage).reshape([M, D])
            mbarrier.wait(q_bars.index(stage), phase)
            if valid < M:
                zero_tail(queries, valid, M, D)
            s = gl.full([HALF, M], 0.0, gl.float32, layout=s_layout)
            s = warpgroup_mma(keys, queries.permute((1, 0)), s, use_acc=False, is_async=True)
            s = warpgroup_mma_wait(0, deps=(s,))
            for block in range(blocks):
                queries = q_smem.index(stage).reshape([M, D])
                gradients = do_smem.index(stage).reshape([M, V])
                mbarrier.wait(q_bars.index(STAGES + stage), phase)
                if valid < M:
                    zero_tail(gradients, valid, M, V)
                dp = gl.full([HALF, M], 0.0, gl.float32, layout=s_layout)
                dp = warpgroup_mma(values, gradients.permute((1, 0)), dp, use_acc=False, is_async=True)
                lse = stat_smem.index(stage).load(columns)
                if SOFTCAP:
                    t = tanh(s * scale)
                    p = gl.exp2(t * (softcap * LOG2E) - lse[None, :])
                else:
                    p = gl.exp2(s * scale - lse[None, :])
                if edge != 0:
                    p = seen(p, key0 + n, query + m_row, segments + segment * 8)
                p16 = gl.convert_layout(p.to(q_smem.dtype), gl.DotOperandLayout(0, dv_layout, 2))
                dv_acc = warpgroup_mma(p16, gradients, dv_acc, is_async=True)
                dp = warpgroup_mma_wait(1, deps=(dp,))
                delta = stat_smem.index(STAGES + stage).load(columns)
                ds = p * (dp - delta[None, :])
                if SOFTCAP:
                    ds = ds * (1.0 - t * t)
                if edge != 0:
                    ds = seen(ds, key0 + n, query + m_row, segments + segment * 8)
                ds16 = gl.convert_layout(ds.to(q_smem.dtype), gl.DotOperandLayout(0, dk_layout, 2))
                dk_acc = warpgroup_mma(ds16, queries, dk_acc, is_async=True)

                # Logits of the next block. After the last block they are computed from stale buffers and not used.
                done = stage
                stage, phase = next_slot(stage, phase, STAGES)
                query += M // PACK
                left -= 1
                more = block + 1 < blocks
                if left == 0:
                    segment += 1
                    query = gl.load(segments + segment * 8)
                    left = gl.load(segments + segment * 8 + 1)
                    edge = gl.load(segments + segment * 8 + 2)
                    end = gl.load(segments + segment * 8 + 5)
                valid = (end - query) * PACK
                queries = q_smem.index(stage).reshape([M, D])
                mbarrier.wait(q_bars.index(stage), phase, pred=more)
                if (valid < M) & more:
                    zero_tail(queries, valid, M, D)
                s = gl.full([HALF, M], 0.0, gl.float32, layout=s_layout)
                s = warpgroup_mma(keys, queries.permute((1, 0)), s, use_acc=False, is_async=True)
                dv_acc, dk_acc = warpgroup_mma_wait(1, deps=(dv_acc, dk_acc))
                mbarrier.arrive(q_bars.index(2 * STAGES + done))
                s = warpgroup_mma_wait(0, deps=(s,))
        mbarrier.arrive(kv_bars.index(1))

        # Results are added, because several programs may compute parts of a tile; otherwise their order is fixed.
        nk = group_id * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(1, dk_layout))
        nv = group_id * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(1, dv_layout))
        d = gl.arange(0, D, layout=gl.SliceLayout(0, dk_layout))
        e = gl.arange(0, V, layout=gl.SliceLayout(0, dv_layout))
        dk_to = (dk + key0 * sdk0.to(gl.int64) + group * sdk1.to(gl.int64) + nk * sdk0)[:, None] + d[None, :]
        dv_to = (dv + key0 * sdv0.to(gl.int64) + group * sdv1.to(gl.int64) + nv * sdv0)[:, None] + e[None, :]
        gl.atomic_add(dk_to, dk_acc * unit, mask=(nk < key1 - key0)[:, None], sem="relaxed")
        gl.atomic_add(dv_to, dv_acc, mask=(nv < key1 - key0)[:, None], sem="relaxed")
        program, step = next_item(program, step)

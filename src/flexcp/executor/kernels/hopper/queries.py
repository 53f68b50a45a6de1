"""The dq kernel for Hopper (sm90) in Gluon; :mod:`flexcp.executor.kernels.hopper.keys` computes dk and dv.

It is built like the forward: tiles of 128 packed query rows, one warp that loads, and two warp groups of 64 rows each
that compute

    S = Q K'    P = exp2(S - lse)    dP = dO V'    dS = P (dP - delta)    dQ += dS K
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

from flexcp.executor.kernels.hopper.forward import LOG2E, ROWS, seen, tanh, whose, zero_tail
from flexcp.executor.kernels.hopper.rings import (
    first_item,
    load_box,
    load_keys,
    next_item,
    next_slot,
    ring_barriers,
)


@gluon.jit(
    do_not_specialize=["n_tiles", "groups", "chunk", "scale", "softcap", "sl0", "sl1", "sd0", "sd1", "sdq0", "sdq1"]
)
def queries_kernel(
    q,
    k,
    v,
    do,
    lse,
    delta,
    dq,
    tiles,
    segments,
    n_tiles,
    groups,
    chunk,
    scale,
    softcap,
    sl0,
    sl1,
    sd0,
    sd1,
    sdq0,
    sdq1,
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
    do_smem = gl.allocate_shared_memory(do.dtype, [2, ROWS // PACK, PACK, V], do.layout)
    k_smem = gl.allocate_shared_memory(k.dtype, [STAGES, N, 1, D], k.layout)
    v_smem = gl.allocate_shared_memory(v.dtype, [STAGES, N, 1, V], v.layout)
    q_bars = ring_barriers(1, 1)
    k_bars = ring_barriers(STAGES, 1)
    v_bars = ring_barriers(STAGES, 1)
    fence_async_shared()

    common = (tiles, segments, n_tiles, groups, chunk)
    buffers = (q_smem, do_smem, k_smem, v_smem, q_bars, k_bars, v_bars)
    results = (lse, delta, dq, scale, softcap, sl0, sl1, sd0, sd1, sdq0, sdq1)
    gl.warp_specialize(
        [
            (_compute, (0, common, buffers, results, PACK, D, V, N, STAGES, SOFTCAP, FRESH)),
            (_compute, (1, common, buffers, results, PACK, D, V, N, STAGES, SOFTCAP, FRESH)),
            (_load, (q, k, v, do, common, buffers, SHARE, PACK, D, V, N, STAGES)),
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
    q_smem, do_smem, k_smem, v_smem, q_bars, k_bars, v_bars = buffers
    size: gl.constexpr = q.dtype.primitive_bitwidth // 8
    stage = 0
    phase = 1
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
        mbarrier.expect(q_bars.index(0), 2 * ROWS * (D + V) * size)
        for i in gl.static_range(2):
            row = row0 + i * (ROWS // PACK)
            load_box(q, [row, group * PACK, 0], q_bars.index(0), q_smem.index(i))
            load_box(do, [row, group * PACK, 0], q_bars.index(0), do_smem.index(i))
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
    """Compute one warp group's rows of every tile of this program: gradients of queries, summed over keys.

    In one piece: a step of the loop over keys has the sum of one block and the logits of the next in flight together,
    so neither can be a function that starts its product and waits for it.
    """
    tiles, segments, n_tiles, groups, chunk = common
    n_programs = n_tiles * groups
    q_smem, do_smem, k_smem, v_smem, q_bars, k_bars, v_bars = buffers
    lse, delta, dq, scale, softcap, sl0, sl1, sd0, sd1, sdq0, sdq1 = results
    s_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, N, 16])
    dq_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    queries = q_smem.index(group_id).reshape([ROWS, D])
    gradients = do_smem.index(group_id).reshape([ROWS, V])
    m = group_id * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, s_layout))
    column = gl.arange(0, N, layout=gl.SliceLayout(0, s_layout))
    mq = group_id * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, dq_layout))
    d = gl.arange(0, D, layout=gl.SliceLayout(0, dq_layout))
    sdq0, sdq1 = sdq0 * 16, sdq1 * 16
    unit = scale / LOG2E
    if SOFTCAP:
        unit = scale * softcap
    stage = 0
    phase = 0
    q_phase = 0
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
        end = gl.load(segments + segment * 8 + 5)
        row = row0 + m // PACK
        lse_at = lse + row0 * sl0.to(gl.int64) + group * PACK * sl1.to(gl.int64) + m // PACK * sl0 + m % PACK * sl1
        delta_at = delta + row0 * sd0.to(gl.int64) + group * PACK * sd1.to(gl.int64) + m // PACK * sd0 + m % PACK * sd1
        top = gl.load(lse_at, mask=row < row1, other=float("inf")) * LOG2E
        less = gl.load(delta_at, mask=row < row1, other=0.0)
        acc = gl.full([ROWS, D], 0.0, gl.float32, layout=dq_layout)
        mbarrier.wait(q_bars.index(0), q_phase)
        q_phase ^= 1
        mbarrier.wait(k_bars.index(stage), phase)
        if end - key < N:
            zero_tail(k_smem.index(stage).reshape([N, D]), end - key, N, D)
        s = gl.full([ROWS, N], 0.0, gl.float32, layout=s_layout)
        s = warpgroup_mma(queries, k_smem.index(stage).reshape([N, D]).permute((1, 0)), s, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=(s,))
        for block in range(blocks):
            mbarrier.wait(v_bars.index(stage), phase)
            dp = gl.full([ROWS, N], 0.0, gl.float32, layout=s_layout)
            values = v_smem.index(stage).reshape([N, V])
            dp = warpgroup_mma(gradients, values.permute((1, 0)), dp, use_acc=False, is_async=True)
            if SOFTCAP:
                t = tanh(s * scale)
                p = gl.exp2(t * (softcap * LOG2E) - top[:, None])
            else:
                p = gl.exp2(s * scale - top[:, None])
            dp = warpgroup_mma_wait(0, deps=(dp,))
            mbarrier.arrive(v_bars.index(STAGES + stage))
            ds = p * (dp - less[:, None])
            if SOFTCAP:
                ds = ds * (1.0 - t * t)
            if edge != 0:
                ds = seen(ds, row, key + column, segments + segment * 8)
            ds16 = gl.convert_layout(ds.to(q_smem.dtype), gl.DotOperandLayout(0, dq_layout, 2))
            acc = warpgroup_mma(ds16, k_smem.index(stage).reshape([N, D]), acc, is_async=True)

            # Logits of the next block. After the last block they are computed from stale buffers and not used.
            k_stage = stage
            stage, phase = next_slot(stage, phase, STAGES)
            key += N
            left -= 1
            more = block + 1 < blocks
            if left == 0:
                segment += 1
                key = gl.load(segments + segment * 8)
                left = gl.load(segments + segment * 8 + 1)
                edge = gl.load(segments + segment * 8 + 2)
                end = gl.load(segments + segment * 8 + 5)
            mbarrier.wait(k_bars.index(stage), phase, pred=more)
            if (end - key < N) & more:
                zero_tail(k_smem.index(stage).reshape([N, D]), end - key, N, D)
            s = gl.full([ROWS, N], 0.0, gl.float32, layout=s_layout)
            s = warpgroup_mma(
                queries, k_smem.index(stage).reshape([N, D]).permute((1, 0)), s, use_acc=False, is_async=True
            )
            acc = warpgroup_mma_wait(1, deps=(acc,))
            mbarrier.arrive(k_bars.index(STAGES + k_stage))
            s = warpgroup_mma_wait(0, deps=(s,))
        mbarrier.arrive(q_bars.index(1))

        to = dq + row0 * sdq0.to(gl.int64) + group * PACK * sdq1.to(gl.int64)
        to = (to + mq // PACK * sdq0 + mq % PACK * sdq1)[:, None] + d[None, :]
        live = (row0 + mq // PACK < row1)[:, None]
        if FRESH:
            gl.store(to, (acc * unit).to(dq.dtype.element_ty), mask=live)
        else:  # only one program adds to a row, so the order of additions is fixed
            gl.atomic_add(to, acc * unit, mask=live, sem="relaxed")
        program, step = next_item(program, step)

"""The Triton kernel of dq; :mod:`flexcp.executor.kernels.triton.keys` computes dk and dv.

There is one program per tile of packed query rows, as in the forward. It walks the keys that these rows see and adds to
their dq (or writes it: ``FRESH``). Only one program adds to a row of dq, so the sum has a fixed order, and results are
bitwise the same in every run. Missing rows get an LSE of +inf, which makes their probabilities zero without a mask.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl

from flexcp.executor.kernels.triton.arithmetic import added, base_of, power, tanh
from flexcp.executor.kernels.triton.programs import UNSPECIALISED, load_block, whose


@triton.jit(do_not_specialize=UNSPECIALISED)
def queries_kernel(
    q,
    k,
    v,
    do,
    lse,
    delta,
    dq,
    tiles,
    entries,
    n_tiles,
    groups,
    chunk,
    n_programs,
    scale,
    softcap,
    sq0,
    sq1,
    sk0,
    sk1,
    sv0,
    sv1,
    so0,
    so1,
    sl0,
    sl1,
    sd0,
    sd1,
    sdq0,
    sdq1,
    SHARE: tl.constexpr,
    PACK: tl.constexpr,
    D: tl.constexpr,
    V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
    PERSISTENT: tl.constexpr,
    EDGE_STAGES: tl.constexpr,
    TMA: tl.constexpr,
    UNIT: tl.constexpr,
    FRESH: tl.constexpr,
):
    """Compute dq of tiles of queries: one tile per program, or several one after the other (``PERSISTENT``).

    In one piece: its lines are the names of arguments, which are passed on in one of two places.
    """
    if PERSISTENT:
        for program in range(tl.program_id(0), n_programs, tl.num_programs(0)):
            _queries_tile(
                program,
                q,
                k,
                v,
                do,
                lse,
                delta,
                dq,
                tiles,
                entries,
                n_tiles,
                groups,
                chunk,
                scale,
                softcap,
                sq0,
                sq1,
                sk0,
                sk1,
                sv0,
                sv1,
                so0,
                so1,
                sl0,
                sl1,
                sd0,
                sd1,
                sdq0,
                sdq1,
                SHARE,
                PACK,
                D,
                V,
                BLOCK_D,
                BLOCK_V,
                BLOCK_M,
                BLOCK_N,
                SOFTCAP,
                PRECISION,
                EDGE_STAGES,
                TMA,
                UNIT,
                FRESH,
            )
    else:
        _queries_tile(
            tl.program_id(0),
            q,
            k,
            v,
            do,
            lse,
            delta,
            dq,
            tiles,
            entries,
            n_tiles,
            groups,
            chunk,
            scale,
            softcap,
            sq0,
            sq1,
            sk0,
            sk1,
            sv0,
            sv1,
            so0,
            so1,
            sl0,
            sl1,
            sd0,
            sd1,
            sdq0,
            sdq1,
            SHARE,
            PACK,
            D,
            V,
            BLOCK_D,
            BLOCK_V,
            BLOCK_M,
            BLOCK_N,
            SOFTCAP,
            PRECISION,
            EDGE_STAGES,
            TMA,
            UNIT,
            FRESH,
        )


@triton.jit
def _queries_tile(
    program,
    q,
    k,
    v,
    do,
    lse,
    delta,
    dq,
    tiles,
    entries,
    n_tiles,
    groups,
    chunk,
    scale,
    softcap,
    sq0,
    sq1,
    sk0,
    sk1,
    sv0,
    sv1,
    so0,
    so1,
    sl0,
    sl1,
    sd0,
    sd1,
    sdq0,
    sdq1,
    SHARE: tl.constexpr,
    PACK: tl.constexpr,
    D: tl.constexpr,
    V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
    EDGE_STAGES: tl.constexpr,
    TMA: tl.constexpr,
    UNIT: tl.constexpr,
    FRESH: tl.constexpr,
):
    """Compute one tile: dq of rows of PACK query heads, over all keys of its entries.

    In one piece: both loops over keys, of clear blocks and of edge blocks, carry the sum, and pass what the lines above
    them make to ``_queries_block``, with a line for each name.
    """
    tile, group = whose(program, n_tiles, groups, chunk)  # a group is PACK query heads
    row0, row1 = tl.load(tiles + tile * 4), tl.load(tiles + tile * 4 + 1)
    first, last = tl.load(tiles + tile * 4 + 2), tl.load(tiles + tile * 4 + 3)
    sq0, sq1, so0, so1 = sq0 * UNIT, sq1 * UNIT, so0 * UNIT, so1 * UNIT
    sk0, sk1, sv0, sv1 = sk0 * UNIT, sk1 * UNIT, sv0 * UNIT, sv1 * UNIT
    sdq0, sdq1 = sdq0 * UNIT, sdq1 * UNIT

    m, n = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    d, e = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    row, head = m // PACK, m % PACK
    live = (row < row1 - row0) & (row < BLOCK_M // PACK)
    d_live, e_live = (d < D)[None, :], (e < V)[None, :]
    head0 = group * PACK
    q_at = q + row0 * sq0.to(tl.int64) + head0 * sq1.to(tl.int64) + (row * sq0 + head * sq1)[:, None] + d[None, :]
    do_at = do + row0 * so0.to(tl.int64) + head0 * so1.to(tl.int64) + (row * so0 + head * so1)[:, None] + e[None, :]
    dq_at = dq + row0 * sdq0.to(tl.int64) + head0 * sdq1.to(tl.int64) + (row * sdq0 + head * sdq1)[:, None] + d[None, :]
    q_MD = tl.load(q_at, mask=live[:, None] & d_live, other=0.0)
    do_MV = tl.load(do_at, mask=live[:, None] & e_live, other=0.0)
    lse_at = lse + row0 * sl0.to(tl.int64) + head0 * sl1.to(tl.int64) + row * sl0 + head * sl1
    delta_at = delta + row0 * sd0.to(tl.int64) + head0 * sd1.to(tl.int64) + row * sd0 + head * sd1
    lse_M = tl.load(lse_at, mask=live, other=float("inf")) * base_of(PRECISION)
    delta_M = tl.load(delta_at, mask=live, other=0.0)
    dq_MD = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)

    kv_head = group * PACK // SHARE
    for entry in range(first, last):
        at = entries + entry * 8
        k0, full0, full1, k1 = tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)
        lo, hi, q0, q1 = tl.load(at + 4), tl.load(at + 5), tl.load(at + 6), tl.load(at + 7)
        for key in range(full0, full1, BLOCK_N):
            dq_MD = _queries_block(
                key,
                full1,
                dq_MD,
                q_MD,
                do_MV,
                lse_M,
                delta_M,
                k,
                v,
                kv_head,
                row0 + row,
                n,
                d,
                e,
                0,
                0,
                0,
                0,
                scale,
                softcap,
                sk0,
                sk1,
                sv0,
                sv1,
                D,
                V,
                BLOCK_D,
                BLOCK_V,
                BLOCK_N,
                False,
                SOFTCAP,
                PRECISION,
                TMA,
            )
        before = (full0 - k0) // BLOCK_N
        for block in tl.range(0, before + tl.cdiv(k1 - full1, BLOCK_N), num_stages=EDGE_STAGES):
            key = tl.where(block < before, k0 + block * BLOCK_N, full1 + (block - before) * BLOCK_N)
            dq_MD = _queries_block(
                key,
                k1,
                dq_MD,
                q_MD,
                do_MV,
                lse_M,
                delta_M,
                k,
                v,
                kv_head,
                row0 + row,
                n,
                d,
                e,
                lo,
                hi,
                q0,
                q1,
                scale,
                softcap,
                sk0,
                sk1,
                sv0,
                sv1,
                D,
                V,
                BLOCK_D,
                BLOCK_V,
                BLOCK_N,
                True,
                SOFTCAP,
                PRECISION,
                TMA,
            )

    unit = scale if SOFTCAP else scale / base_of(PRECISION)
    if SOFTCAP:
        unit = unit * softcap
    mask = live[:, None] & d_live
    dq_MD = dq_MD * unit if FRESH else tl.load(dq_at, mask=mask) + dq_MD * unit
    tl.store(dq_at, dq_MD.to(dq.dtype.element_ty), mask=mask)


@triton.jit
def _queries_block(
    key,
    end,
    dq_MD,
    q_MD,
    do_MV,
    lse_M,
    delta_M,
    k,
    v,
    kv_head,
    query,
    n,
    d,
    e,
    lo,
    hi,
    q0,
    q1,
    scale,
    softcap,
    sk0,
    sk1,
    sv0,
    sv1,
    D: tl.constexpr,
    V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EDGE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
    TMA: tl.constexpr,
):
    """Return dq with the block of keys added that begins at ``key``."""
    within = (key + n < end)[:, None]
    d_live, e_live = within & (d < D)[None, :], within & (e < V)[None, :]
    keys_ND = load_block(k, key, kv_head, sk0, sk1, n, d, d_live, BLOCK_N, BLOCK_D, (not EDGE) and BLOCK_D == D, TMA)
    values_NV = load_block(v, key, kv_head, sv0, sv1, n, e, e_live, BLOCK_N, BLOCK_V, (not EDGE) and BLOCK_V == V, TMA)
    if EDGE and TMA:  # memory beyond the last key may hold anything
        keys_ND = tl.where(within, keys_ND, 0.0)
        values_NV = tl.where(within, values_NV, 0.0)
    s_MN = tl.dot(q_MD, tl.trans(keys_ND), input_precision=PRECISION)
    if SOFTCAP:
        t_MN = tanh(s_MN * scale)
        s_MN = t_MN * (softcap * base_of(PRECISION))
    else:
        s_MN = s_MN * scale
    if EDGE:
        offset = (key + n)[None, :] - query[:, None]
        seen = (offset >= lo) & (offset <= hi) & (key + n < end)[None, :] & ((query >= q0) & (query < q1))[:, None]
        s_MN = tl.where(seen, s_MN, float("-inf"))
    p_MN = power(s_MN - lse_M[:, None], PRECISION)
    dp_MN = tl.dot(do_MV, tl.trans(values_NV), input_precision=PRECISION)
    ds_MN = p_MN * (dp_MN - delta_M[:, None])
    if SOFTCAP:
        ds_MN = ds_MN * (1.0 - t_MN * t_MN)
    return added(dq_MD, ds_MN.to(keys_ND.dtype), keys_ND, PRECISION)

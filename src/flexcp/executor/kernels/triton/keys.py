"""The Triton kernel of dk and dv; :mod:`flexcp.executor.kernels.triton.queries` computes dq.

There is one program per tile of keys and KV head. It walks the queries that see these keys and adds to their dk and dv,
summed over the query heads of the KV head. Together the two kernels compute seven matrix products per block, and a
fused kernel five; but a fused kernel, which adds dq to memory, was slower on an H200 (docs/lab-notes.md).

If tiles are not split, only one program adds to a row of dk and dv. Their sums then have a fixed order, and results are
bitwise the same in every run. If tiles are split (``SPLIT``), several programs add to dk and dv, in any order.

Statistics are read as :mod:`flexcp.executor.kernels.triton.statistics` packs them. Missing queries get an LSE of +inf,
which makes their probabilities zero without a mask.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl

from flexcp.executor.kernels.triton.arithmetic import added, base_of, power, tanh
from flexcp.executor.kernels.triton.programs import UNSPECIALISED, load_packed, whose


@triton.jit(do_not_specialize=UNSPECIALISED)
def keys_kernel(
    q,
    k,
    v,
    do,
    packed,
    dk,
    dv,
    tiles,
    entries,
    rows,
    heads,
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
    sdk0,
    sdk1,
    sdv0,
    sdv1,
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
    SPLIT: tl.constexpr,
):
    """Compute dk and dv of tiles of keys: one tile per program, or several one after the other (``PERSISTENT``).

    In one piece: its lines are the names of arguments, which are passed on in one of two places.
    """
    if PERSISTENT:
        for program in range(tl.program_id(0), n_programs, tl.num_programs(0)):
            _keys_tile(
                program,
                q,
                k,
                v,
                do,
                packed,
                dk,
                dv,
                tiles,
                entries,
                rows,
                heads,
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
                sdk0,
                sdk1,
                sdv0,
                sdv1,
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
                SPLIT,
            )
    else:
        _keys_tile(
            tl.program_id(0),
            q,
            k,
            v,
            do,
            packed,
            dk,
            dv,
            tiles,
            entries,
            rows,
            heads,
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
            sdk0,
            sdk1,
            sdv0,
            sdv1,
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
            SPLIT,
        )


@triton.jit
def _keys_tile(
    program,
    q,
    k,
    v,
    do,
    packed,
    dk,
    dv,
    tiles,
    entries,
    rows,
    heads,
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
    sdk0,
    sdk1,
    sdv0,
    sdv1,
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
    SPLIT: tl.constexpr,
):
    """Compute one tile: dk and dv of its keys, over all queries of its entries.

    In one piece: both loops over queries, of clear blocks and of edge blocks, carry the two sums, and pass what the
    lines above them make to ``_keys_block``, with a line for each name.
    """
    tile, group = whose(program, n_tiles, groups, chunk)  # a group is a KV head
    key0, key1 = tl.load(tiles + tile * 4), tl.load(tiles + tile * 4 + 1)
    first, last = tl.load(tiles + tile * 4 + 2), tl.load(tiles + tile * 4 + 3)
    sq0, sq1, so0, so1 = sq0 * UNIT, sq1 * UNIT, so0 * UNIT, so1 * UNIT
    sk0, sk1, sv0, sv1 = sk0 * UNIT, sk1 * UNIT, sv0 * UNIT, sv1 * UNIT
    sdk0, sdk1, sdv0, sdv1 = sdk0 * UNIT, sdk1 * UNIT, sdv0 * UNIT, sdv1 * UNIT
    ROWS: tl.constexpr = BLOCK_M // PACK

    m, n = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    d, e = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    row, head = m // PACK, m % PACK
    n_live, d_live, e_live = (n < key1 - key0)[:, None], (d < D)[None, :], (e < V)[None, :]
    k += key0 * sk0.to(tl.int64) + group * sk1.to(tl.int64)
    v += key0 * sv0.to(tl.int64) + group * sv1.to(tl.int64)
    dk += key0 * sdk0.to(tl.int64) + group * sdk1.to(tl.int64)
    dv += key0 * sdv0.to(tl.int64) + group * sdv1.to(tl.int64)
    keys_ND = tl.load(k + (n * sk0)[:, None] + d[None, :], mask=n_live & d_live, other=0.0)
    values_NV = tl.load(v + (n * sv0)[:, None] + e[None, :], mask=n_live & e_live, other=0.0)
    dk_ND = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv_NV = tl.zeros([BLOCK_N, BLOCK_V], tl.float32)

    for part in range(SHARE // PACK):
        head0 = group * SHARE + part * PACK
        lse_M = packed + head0 * rows.to(tl.int64) + m
        delta_M = lse_M + heads * rows.to(tl.int64)
        for entry in range(first, last):
            at = entries + entry * 8
            q0, full0, full1, q1 = tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)
            lo, hi, k0, k1 = tl.load(at + 4), tl.load(at + 5), tl.load(at + 6), tl.load(at + 7)
            for query in range(full0, full1, ROWS):
                dk_ND, dv_NV = _keys_block(
                    query,
                    full1,
                    head0,
                    dk_ND,
                    dv_NV,
                    keys_ND,
                    values_NV,
                    q,
                    do,
                    lse_M,
                    delta_M,
                    row,
                    head,
                    n,
                    d,
                    e,
                    0,
                    0,
                    0,
                    0,
                    scale,
                    softcap,
                    sq0,
                    sq1,
                    so0,
                    so1,
                    D,
                    V,
                    BLOCK_D,
                    BLOCK_V,
                    BLOCK_M,
                    PACK,
                    False,
                    SOFTCAP,
                    PRECISION,
                    TMA,
                )
            before = (full0 - q0) // ROWS
            for block in tl.range(0, before + tl.cdiv(q1 - full1, ROWS), num_stages=EDGE_STAGES):
                query = tl.where(block < before, q0 + block * ROWS, full1 + (block - before) * ROWS)
                dk_ND, dv_NV = _keys_block(
                    query,
                    q1,
                    head0,
                    dk_ND,
                    dv_NV,
                    keys_ND,
                    values_NV,
                    q,
                    do,
                    lse_M,
                    delta_M,
                    row,
                    head,
                    key0 + n,
                    d,
                    e,
                    lo,
                    hi,
                    k0,
                    k1,
                    scale,
                    softcap,
                    sq0,
                    sq1,
                    so0,
                    so1,
                    D,
                    V,
                    BLOCK_D,
                    BLOCK_V,
                    BLOCK_M,
                    PACK,
                    True,
                    SOFTCAP,
                    PRECISION,
                    TMA,
                )

    unit = scale if SOFTCAP else scale / base_of(PRECISION)  # d logit / d (q.k)
    if SOFTCAP:
        unit = unit * softcap
    dk_at = dk + (n * sdk0)[:, None] + d[None, :]
    dv_at = dv + (n * sdv0)[:, None] + e[None, :]
    if SPLIT:
        tl.atomic_add(dk_at, dk_ND * unit, mask=n_live & d_live, sem="relaxed")
        tl.atomic_add(dv_at, dv_NV, mask=n_live & e_live, sem="relaxed")
    else:
        tl.store(dk_at, tl.load(dk_at, mask=n_live & d_live) + dk_ND * unit, mask=n_live & d_live)
        tl.store(dv_at, tl.load(dv_at, mask=n_live & e_live) + dv_NV, mask=n_live & e_live)


@triton.jit
def _keys_block(
    query,
    end,
    head0,
    dk_ND,
    dv_NV,
    keys_ND,
    values_NV,
    q,
    do,
    lse_M,
    delta_M,
    row,
    head,
    key,
    d,
    e,
    lo,
    hi,
    k0,
    k1,
    scale,
    softcap,
    sq0,
    sq1,
    so0,
    so1,
    D: tl.constexpr,
    V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PACK: tl.constexpr,
    EDGE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
    TMA: tl.constexpr,
):
    """Return dk and dv with the block of queries added that begins at ``query``."""
    whole: tl.constexpr = (not EDGE) and (BLOCK_M % PACK == 0)
    live = (query + row < end) & (row < BLOCK_M // PACK)
    d_live, e_live = live[:, None] & (d < D)[None, :], live[:, None] & (e < V)[None, :]
    queries_MD = load_packed(
        q, query, head0, sq0, sq1, row, head, d, d_live, BLOCK_M, BLOCK_D, whole and BLOCK_D == D, TMA
    )
    do_MV = load_packed(do, query, head0, so0, so1, row, head, e, e_live, BLOCK_M, BLOCK_V, whole and BLOCK_V == V, TMA)
    if EDGE and TMA:  # memory beyond the last query may hold anything
        queries_MD = tl.where(live[:, None], queries_MD, 0.0)
        do_MV = tl.where(live[:, None], do_MV, 0.0)
    skip = query * tl.full([], PACK, tl.int64)
    if whole:
        lse, delta = tl.load(lse_M + skip), tl.load(delta_M + skip)
    else:
        lse = tl.load(lse_M + skip, mask=live, other=float("inf"))
        delta = tl.load(delta_M + skip, mask=live, other=0.0)
    s_NM = tl.dot(keys_ND, tl.trans(queries_MD), input_precision=PRECISION)
    if SOFTCAP:
        t_NM = tanh(s_NM * scale)
        s_NM = t_NM * (softcap * base_of(PRECISION))
    else:
        s_NM = s_NM * scale
    if EDGE:
        offset = (query + row)[None, :] - key[:, None]
        seen = (offset >= lo) & (offset <= hi) & ((key >= k0) & (key < k1))[:, None]
        s_NM = tl.where(seen, s_NM, float("-inf"))
    p_NM = power(s_NM - lse[None, :], PRECISION)
    dp_NM = tl.dot(values_NV, tl.trans(do_MV), input_precision=PRECISION)
    dv_NV = added(dv_NV, p_NM.to(do_MV.dtype), do_MV, PRECISION)
    ds_NM = p_NM * (dp_NM - delta[None, :])
    if SOFTCAP:
        ds_NM = ds_NM * (1.0 - t_NM * t_NM)
    ds_NM = ds_NM.to(queries_MD.dtype)
    return added(dk_ND, ds_NM, queries_MD, PRECISION), dv_NV

"""The backward Triton kernels: one for dk and dv, and one for dq.

``keys_kernel`` has one program per tile of keys and KV head. It walks the queries that see these keys and adds to their
dk and dv, summed over the query heads of the KV head. ``queries_kernel`` has one program per tile of packed query rows,
as in the forward, and adds to their dq (or writes it: ``FRESH``). Together they compute seven matrix products per
block, and a fused kernel five; but a fused kernel that adds dq by atomics was slower on an H200 (docs/kernels.md).

Only one program adds to a row of dq, and, if tiles are not split, to a row of dk and dv. Their sums then have a fixed
order, and results are bitwise the same in every run. If tiles are split (``SPLIT``), several programs add to dk and dv,
in any order.

``pack_kernel`` copies the statistics to the order in which blocks of queries read them (head chunk, row, head of the
chunk), in the base of the logits, so that those of a block are adjacent. Missing queries get an LSE of +inf, which
makes their probabilities zero without a mask.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl

from flexcp.executor.kernels.triton.forward import added, base_of, load_block, power, tanh, whose

UNSPECIALISED = [
    "n_tiles",
    "groups",
    "chunk",
    "n_programs",
    "scale",
    "softcap",
    "sq0",
    "sq1",
    "sk0",
    "sk1",
    "sv0",
    "sv1",
    "so0",
    "so1",
    "sl0",
    "sl1",
    "sd0",
    "sd1",
    "sdq0",
    "sdq1",
    "sdk0",
    "sdk1",
    "sdv0",
    "sdv1",
    "rows",
    "heads",
]


@triton.jit(do_not_specialize=["rows", "sl0", "sl1", "sd0", "sd1"])
def pack_kernel(
    lse, delta, packed, rows, sl0, sl1, sd0, sd1, PACK: tl.constexpr, BLOCK: tl.constexpr, BASE: tl.constexpr
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    chunk = tl.program_id(1)
    row, head = (at // PACK).to(tl.int64), chunk * PACK + at % PACK
    live = row < rows
    to = packed + chunk * rows.to(tl.int64) * PACK + at
    top = tl.load(lse + row * sl0 + head * sl1, mask=live) * BASE
    tl.store(to, top, mask=live)
    to += tl.num_programs(1) * rows.to(tl.int64) * PACK
    tl.store(to, tl.load(delta + row * sd0 + head * sd1, mask=live), mask=live)


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
    queries_MD = _packed(q, query, head0, sq0, sq1, row, head, d, d_live, BLOCK_M, BLOCK_D, whole and BLOCK_D == D, TMA)
    do_MV = _packed(do, query, head0, so0, so1, row, head, e, e_live, BLOCK_M, BLOCK_V, whole and BLOCK_V == V, TMA)
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


@triton.jit
def _packed(
    x,
    row0,
    head0,
    s0,
    s1,
    row,
    head,
    d,
    live,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WHOLE: tl.constexpr,
    TMA: tl.constexpr,
):
    """Load a block of packed rows (a token and a head each) from row ``row0`` and head ``head0`` on.

    A tensor descriptor (``TMA``) ignores ``live``. Pointers give 0 where ``live`` is false, unless ``WHOLE`` says that
    it never is.
    """
    if TMA:
        block = x.load([row0, head0, 0]).reshape(BLOCK_M, BLOCK_D)
    else:
        at = x + row0 * s0.to(tl.int64) + head0 * s1.to(tl.int64) + (row * s0 + head * s1)[:, None] + d[None, :]
        block = tl.load(at) if WHOLE else tl.load(at, mask=live, other=0.0)
    return block


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

"""The forward Triton kernel: one program per tile and KV head (or some of its query heads).

``PACK`` query heads of a KV head are packed into the rows of a tile: index m of ``BLOCK_M`` is row ``m // PACK`` and
head ``m % PACK``. So less of a diagonal is wasted, and keys are read once for all these heads. A program starts its
online softmax from the running output and LSE (maximum = LSE, sum = 1) or from nothing (``FRESH``), walks the tile's
entries, and stores both back.

Clear blocks of an entry need no mask. Edge blocks are masked, and no key beyond the entry's last is used, because
memory there may hold anything. The base of the logits and the width of blocks are those of all Triton kernels
(:mod:`flexcp.executor.kernels.triton.arithmetic`, :mod:`flexcp.executor.kernels.triton.programs`).
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl

from flexcp.executor.kernels.triton.arithmetic import added, base_of, power, tanh
from flexcp.executor.kernels.triton.programs import UNSPECIALISED, load_block, whose

LN2: tl.constexpr = tl.constexpr(0.6931471805599453)


@triton.jit(do_not_specialize=UNSPECIALISED)
def forward_kernel(
    q,
    k,
    v,
    out,
    lse,
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
    SHARE: tl.constexpr,
    PACK: tl.constexpr,
    D: tl.constexpr,
    V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SOFTCAP: tl.constexpr,
    FRESH: tl.constexpr,
    PRECISION: tl.constexpr,
    PERSISTENT: tl.constexpr,
    EDGE_STAGES: tl.constexpr,
    TMA: tl.constexpr,
    UNIT: tl.constexpr,
):
    """Compute the attention of tiles: one tile per program, or several one after the other (``PERSISTENT``).

    In one piece: its lines are the names of arguments, which are passed on in one of two places.
    """
    if PERSISTENT:
        for program in range(tl.program_id(0), n_programs, tl.num_programs(0)):
            _tile(
                program,
                q,
                k,
                v,
                out,
                lse,
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
                SHARE,
                PACK,
                D,
                V,
                BLOCK_D,
                BLOCK_V,
                BLOCK_M,
                BLOCK_N,
                SOFTCAP,
                FRESH,
                PRECISION,
                EDGE_STAGES,
                TMA,
                UNIT,
            )
    else:
        _tile(
            tl.program_id(0),
            q,
            k,
            v,
            out,
            lse,
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
            SHARE,
            PACK,
            D,
            V,
            BLOCK_D,
            BLOCK_V,
            BLOCK_M,
            BLOCK_N,
            SOFTCAP,
            FRESH,
            PRECISION,
            EDGE_STAGES,
            TMA,
            UNIT,
        )


@triton.jit
def _tile(
    program,
    q,
    k,
    v,
    out,
    lse,
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
    SHARE: tl.constexpr,
    PACK: tl.constexpr,
    D: tl.constexpr,
    V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SOFTCAP: tl.constexpr,
    FRESH: tl.constexpr,
    PRECISION: tl.constexpr,
    EDGE_STAGES: tl.constexpr,
    TMA: tl.constexpr,
    UNIT: tl.constexpr,
):
    """Compute one tile: rows of PACK query heads with all keys of its entries.

    In one piece: both loops over keys, of clear blocks and of edge blocks, carry maxima, sums and accumulators, and use
    most of the pointers and masks that the lines above them make.
    """
    tile, group = whose(program, n_tiles, groups, chunk)  # a group is PACK query heads
    row0, row1 = tl.load(tiles + tile * 4), tl.load(tiles + tile * 4 + 1)
    first, last = tl.load(tiles + tile * 4 + 2), tl.load(tiles + tile * 4 + 3)
    # Strides are in units of 16 or 8 elements, so that the compiler knows that rows are aligned without specialising.
    sq0, sq1, sk0, sk1 = sq0 * UNIT, sq1 * UNIT, sk0 * UNIT, sk1 * UNIT
    sv0, sv1, so0, so1 = sv0 * UNIT, sv1 * UNIT, so0 * UNIT, so1 * UNIT

    m = tl.arange(0, BLOCK_M)
    row, head = m // PACK, m % PACK
    live = row < row1 - row0
    if PACK * (BLOCK_M // PACK) != BLOCK_M:
        live = live & (row < BLOCK_M // PACK)
    d, e, n = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V), tl.arange(0, BLOCK_N)
    q += row0 * sq0.to(tl.int64) + group * PACK * sq1.to(tl.int64)
    out += row0 * so0.to(tl.int64) + group * PACK * so1.to(tl.int64)
    lse += row0 * sl0.to(tl.int64) + group * PACK * sl1.to(tl.int64)
    kv_head = group * PACK // SHARE
    d_live, e_live = (d < D)[None, :], (e < V)[None, :]

    q_MD = tl.load(q + (row * sq0 + head * sq1)[:, None] + d[None, :], mask=live[:, None] & d_live, other=0.0)
    if FRESH:
        top_M = tl.full([BLOCK_M], float("-inf"), tl.float32)
        sum_M = tl.zeros([BLOCK_M], tl.float32)
        acc_MV = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    else:
        top_M = tl.load(lse + row * sl0 + head * sl1, mask=live, other=float("-inf")).to(tl.float32) * base_of(
            PRECISION
        )
        sum_M = tl.where(top_M == float("-inf"), 0.0, 1.0)
        out_MV = out + (row * so0 + head * so1)[:, None] + e[None, :]
        # Rows that have seen no key are zero, so they are not read.
        old = live & (top_M > float("-inf"))
        acc_MV = tl.load(out_MV, mask=old[:, None] & e_live, other=0.0).to(tl.float32)

    for entry in range(first, last):
        at = entries + entry * 8
        k0, full0, full1, k1 = tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)
        lo, hi, q0, q1 = tl.load(at + 4), tl.load(at + 5), tl.load(at + 6), tl.load(at + 7)
        for key in range(full0, full1, BLOCK_N):
            keys_ND = load_block(k, key, kv_head, sk0, sk1, n, d, d_live, BLOCK_N, BLOCK_D, BLOCK_D == D, TMA)
            s_MN = tl.dot(q_MD, tl.trans(keys_ND), input_precision=PRECISION)
            s_MN, unit = _logits(s_MN, scale, softcap, SOFTCAP, PRECISION)
            top = tl.maximum(top_M, tl.max(s_MN, 1) * unit)
            p_MN = power(s_MN * unit - top[:, None], PRECISION)
            decay = power(top_M - top, PRECISION)
            values_NV = load_block(v, key, kv_head, sv0, sv1, n, e, e_live, BLOCK_N, BLOCK_V, BLOCK_V == V, TMA)
            sum_M = sum_M * decay + tl.sum(p_MN, 1)
            acc_MV = added(acc_MV * decay[:, None], p_MN.to(values_NV.dtype), values_NV, PRECISION)
            top_M = top
        before = (full0 - k0) // BLOCK_N
        for block in tl.range(0, before + tl.cdiv(k1 - full1, BLOCK_N), num_stages=EDGE_STAGES):
            key = tl.where(block < before, k0 + block * BLOCK_N, full1 + (block - before) * BLOCK_N)
            within = (key + n < k1)[:, None]
            keys_ND = load_block(k, key, kv_head, sk0, sk1, n, d, within & d_live, BLOCK_N, BLOCK_D, False, TMA)
            s_MN = tl.dot(q_MD, tl.trans(keys_ND), input_precision=PRECISION)
            s_MN, unit = _logits(s_MN, scale, softcap, SOFTCAP, PRECISION)
            query = row0 + row
            offset = (key + n)[None, :] - query[:, None]
            seen = (offset >= lo) & (offset <= hi) & (key + n < k1)[None, :] & ((query >= q0) & (query < q1))[:, None]
            s_MN = tl.where(seen, s_MN, float("-inf"))
            top = tl.maximum(top_M, tl.max(s_MN, 1) * unit)
            base = tl.where(top == float("-inf"), 0.0, top)  # rows that have seen no key yet
            p_MN = power(s_MN * unit - base[:, None], PRECISION)
            decay = power(top_M - base, PRECISION)
            values_NV = load_block(v, key, kv_head, sv0, sv1, n, e, within & e_live, BLOCK_N, BLOCK_V, False, TMA)
            if TMA:
                values_NV = tl.where(within, values_NV, 0.0)  # 0 * NaN is NaN
            sum_M = sum_M * decay + tl.sum(p_MN, 1)
            acc_MV = added(acc_MV * decay[:, None], p_MN.to(values_NV.dtype), values_NV, PRECISION)
            top_M = top

    share_M = 1.0 / tl.where(sum_M == 0.0, 1.0, sum_M)
    out_MV = out + (row * so0 + head * so1)[:, None] + e[None, :]
    tl.store(out_MV, (acc_MV * share_M[:, None]).to(out.dtype.element_ty), mask=live[:, None] & e_live)
    total_M = top_M + tl.log(sum_M) if PRECISION == "ieee" else (top_M + tl.log2(sum_M)) * LN2
    tl.store(lse + row * sl0 + head * sl1, total_M, mask=live)


@triton.jit
def _logits(s_MN, scale, softcap, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr):
    """Return logits as (s, unit), meaning ``s * unit``.

    The compiler fuses this product with the subtraction in the exponent.
    """
    if SOFTCAP:
        return tanh(s_MN * scale), softcap * base_of(PRECISION)
    return s_MN, scale

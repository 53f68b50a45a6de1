"""Row kernels: Triton kernels that copy, add and merge rows of messages and shelves, and compute delta.

All but the last take a table of row runs (:mod:`flexcp.executor.run.row_runs`), with one program per run (in a merge,
one for each run and a few of its heads), over tensors seen as flat memory. A launch has up to ``PAIRS`` pairs of a
source and a target tensor, and each run names its pair. The kernels take nothing but tables and addresses, so no batch
makes them compile again. Bytes are moved as integer words; reductions are computed in the target's dtype.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

PAIRS = 4
LONGEST_BLOCK = 1024
MERGE_HEADS, DELTA_HEADS = 2, 8
"""The heads that a program merges, and those that it computes delta of at once."""
WORDS = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64, 16: tl.int64}
NUMBERS = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32, torch.float64: tl.float64}

Pairs = list[tuple[Tensor, Tensor]]


def copy_rows(pairs: Pairs, table_7n: Tensor, word: int, longest: int) -> None:
    """Copy row runs (rows of equal length, at equal distances) between tensors, in words of ``word`` bytes.

    Each column of the table is a run: the index of its (source, target) pair, first word in the source, first word in
    the target, words of a row, number of rows, and the distances of rows in source and target. ``longest`` is the
    longest row in words.
    """
    if table_7n.shape[1]:
        kind, wide = WORDS[word], 2 if word == 16 else 1
        block = _block(longest * wide)
        _move[(table_7n.shape[1],)](
            *_addresses(pairs), table_7n, kind, kind, wide, block, num_warps=max(1, block // 256)
        )


def convert_rows(pairs: Pairs, table_7n: Tensor, source: torch.dtype, target: torch.dtype, longest: int) -> None:
    """Copy row runs like :func:`copy_rows`, but counted in elements and converted to the target's dtype."""
    if table_7n.shape[1]:
        block, kinds = _block(longest), (NUMBERS[source], NUMBERS[target])
        _move[(table_7n.shape[1],)](*_addresses(pairs), table_7n, *kinds, 1, block, num_warps=max(1, block // 256))


def add_rows(pairs: Pairs, table_8n: Tensor, source: torch.dtype, target: torch.dtype, longest: int) -> None:
    """Add row runs to the target, in the target's dtype.

    The table is that of :func:`copy_rows` in elements, with one more row: the number of runs in the chain that begins
    with a run, or 0 for one that is not the first of its chain. A program adds all runs of its chain, which lie side by
    side in the table, to the same rows of the target; runs of other chains must not touch these rows.
    """
    if table_8n.shape[1]:
        block, kinds = _block(longest), (NUMBERS[source], NUMBERS[target])
        _add[(table_8n.shape[1],)](*_addresses(pairs), table_8n, *kinds, block, num_warps=max(1, block // 256))


def merge_rows(
    source: Tensor, target: Tensor, source_lse: Tensor, target_lse: Tensor, table_11n: Tensor, heads: int, width: int
) -> None:
    """Merge rows of partial attention outputs, ``width`` elements per head, into the target by their LSEs, in place.

    Each column of the table is a run of rows: number of rows, heads of a row, the first element and the step from row
    to row of source, target, source LSE and target LSE, and the number of runs in its chain, as in :func:`add_rows`.
    ``heads`` is the most heads of any run.
    """
    if table_11n.shape[1]:
        tile = min(MERGE_HEADS, triton.next_power_of_2(heads))
        grid = (table_11n.shape[1], triton.cdiv(heads, tile))
        tensors = (source, target, source_lse, target_lse)
        # One warp per program: with several, a slow warp could load a row's LSEs after a fast one has overwritten them.
        _merge[grid](*tensors, table_11n, width, tile, triton.next_power_of_2(width), num_warps=1)


def delta_rows(do_THV: Tensor, out_THV: Tensor, dlse_TH: Tensor | None, delta_TH: Tensor) -> None:
    """Write ``rowsum(do * out) - dlse`` to ``delta``; without ``dlse`` nothing is subtracted."""
    tokens, heads, width = out_THV.shape
    if tokens:
        do_THV, out_THV = (x if x.stride(2) == 1 else x.contiguous() for x in (do_THV, out_THV))
        dlse = delta_TH if dlse_TH is None else dlse_TH
        _delta[(tokens,)](
            do_THV,
            out_THV,
            dlse,
            delta_TH,
            do_THV.stride(0),
            do_THV.stride(1),
            out_THV.stride(0),
            out_THV.stride(1),
            dlse.stride(0),
            dlse.stride(1),
            heads,
            width,
            dlse_TH is not None,
            DELTA_HEADS,
            triton.next_power_of_2(width),
        )


def _block(longest: int) -> int:
    """Return how many elements a launch moves at once, from its longest row: a power of two from 128 to 1024."""
    return int(min(LONGEST_BLOCK, max(128, triton.next_power_of_2(longest))))


def _addresses(pairs: Pairs) -> list[int]:
    """Return the addresses of the tensors as integers, filled up to ``PAIRS`` pairs.

    With integers, tensors of every dtype share one compiled kernel.
    """
    found = [x.data_ptr() for pair in pairs for x in pair]
    return found + found[:2] * (PAIRS - len(pairs))


@triton.jit(do_not_specialize=["s0", "t0", "s1", "t1", "s2", "t2", "s3", "t3"])
def _move(
    s0,
    t0,
    s1,
    t1,
    s2,
    t2,
    s3,
    t3,
    table,
    SOURCE: tl.constexpr,
    TARGET: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    run, n = table + tl.program_id(0), tl.num_programs(0)
    pair, rows = tl.load(run), tl.load(run + 4 * n)
    begin, to, count = tl.load(run + n) * WIDE, tl.load(run + 2 * n) * WIDE, tl.load(run + 3 * n) * WIDE
    step_from, step_to = tl.load(run + 5 * n) * WIDE, tl.load(run + 6 * n) * WIDE
    source = tl.where(pair == 0, s0, tl.where(pair == 1, s1, tl.where(pair == 2, s2, s3)))
    target = tl.where(pair == 0, t0, tl.where(pair == 1, t1, tl.where(pair == 2, t2, t3)))
    for row in range(rows):
        here = source.to(tl.pointer_type(SOURCE)) + begin + row * step_from
        there = target.to(tl.pointer_type(TARGET)) + to + row * step_to
        if WIDE == 2:  # words of 16 bytes, as two of 8
            here, there, count = tl.multiple_of(here, 16), tl.multiple_of(there, 16), tl.multiple_of(count, 2)
        for first in range(0, count, BLOCK):
            at = first + tl.arange(0, BLOCK)
            inside = at < count
            tl.store(there + at, tl.load(here + at, mask=inside).to(TARGET), mask=inside)


@triton.jit(do_not_specialize=["s0", "t0", "s1", "t1", "s2", "t2", "s3", "t3"])
def _add(
    s0,
    t0,
    s1,
    t1,
    s2,
    t2,
    s3,
    t3,
    table,
    SOURCE: tl.constexpr,
    TARGET: tl.constexpr,
    BLOCK: tl.constexpr,
):
    run, n = table + tl.program_id(0), tl.num_programs(0)
    pair, to, count = tl.load(run), tl.load(run + 2 * n), tl.load(run + 3 * n)
    rows, step_to, chain = tl.load(run + 4 * n), tl.load(run + 6 * n), tl.load(run + 7 * n)
    rows = tl.where(chain > 0, rows, 0)
    source = tl.where(pair == 0, s0, tl.where(pair == 1, s1, tl.where(pair == 2, s2, s3))).to(tl.pointer_type(SOURCE))
    target = tl.where(pair == 0, t0, tl.where(pair == 1, t1, tl.where(pair == 2, t2, t3))).to(tl.pointer_type(TARGET))
    for row in range(rows):
        there = target + to + row * step_to
        for first in range(0, count, BLOCK):
            at = first + tl.arange(0, BLOCK)
            inside = at < count
            value = tl.load(there + at, mask=inside)
            for part in range(chain):
                here = source + tl.load(run + n + part) + row * tl.load(run + 5 * n + part)
                value += tl.load(here + at, mask=inside).to(TARGET)
            tl.store(there + at, value, mask=inside)


@triton.jit
def _merge(
    source, target, source_lse, target_lse, table, WIDTH: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr
):
    run, n = table + tl.program_id(0), tl.num_programs(0)
    rows, heads, chain = tl.load(run), tl.load(run + n), tl.load(run + 10 * n)
    first = tl.program_id(1) * HEADS
    rows = tl.where((chain > 0) & (first < heads), rows, 0)
    target += tl.load(run + 4 * n)
    target_lse += tl.load(run + 8 * n)
    step, lse_step = tl.load(run + 5 * n), tl.load(run + 9 * n)
    column = tl.arange(0, BLOCK)[None, :]
    head = first + tl.arange(0, HEADS)
    there = head < heads
    at = head[:, None] * WIDTH + column
    inside = there[:, None] & (column < WIDTH)
    for row in range(rows):
        value = tl.load(target + row * step + at, mask=inside, other=0.0)
        lse = tl.load(target_lse + row * lse_step + head, mask=there, other=float("-inf"))
        for part in range(chain):
            here = source + tl.load(run + 2 * n + part) + row * tl.load(run + 3 * n + part)
            its_lse = source_lse + tl.load(run + 6 * n + part) + row * tl.load(run + 7 * n + part)
            more = tl.load(its_lse + head, mask=there, other=float("-inf"))
            new = tl.load(here + at, mask=inside, other=0.0).to(value.dtype)
            top = tl.maximum(lse, more)
            top = tl.where(top == float("-inf"), 0.0, top)
            total = top + tl.log(tl.exp(lse - top) + tl.exp(more - top))
            seen = tl.where(total == float("-inf"), 0.0, total)
            value = value * tl.exp(lse - seen)[:, None] + new * tl.exp(more - seen)[:, None]
            lse = total
        tl.store(target + row * step + at, value, mask=inside)
        tl.store(target_lse + row * lse_step + head, lse, mask=there)


@triton.jit(do_not_specialize=["heads"])
def _delta(
    do,
    out,
    dlse,
    delta,
    do_row,
    do_head,
    out_row,
    out_head,
    dlse_row,
    dlse_head,
    heads,
    WIDTH: tl.constexpr,
    LSE: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)[None, :]
    for first in range(0, heads, HEADS):
        head = first + tl.arange(0, HEADS)
        inside = (head[:, None] < heads) & (column < WIDTH)
        a = tl.load(do + row * do_row + head[:, None] * do_head + column, mask=inside, other=0.0)
        b = tl.load(out + row * out_row + head[:, None] * out_head + column, mask=inside, other=0.0)
        value = tl.sum(a.to(delta.dtype.element_ty) * b.to(delta.dtype.element_ty), 1)
        if LSE:
            value -= tl.load(dlse + row * dlse_row + head * dlse_head, mask=head < heads, other=0.0)
        tl.store(delta + row * heads + head, value, mask=head < heads)

"""Our list kernel beside the ways in which FlashAttention-4 can run the same work, on one GPU, in turns.

    python benchmarks/fa4_ways.py --plans plans.npz --write ways.json

The work is that of real plans (``plans.npz`` is made by ``python benchmarks/gpu.py --plans plans.npz --make-plans``)
and four sparse masks of 16,384 tokens. *Blocks* is FlashAttention-4 with block lists and a mask function that reads up
to four ranges of keys per row, one call for each list. *Varlen* (forward only; its backward would overwrite dk and dv
of keys that several items share) is its call for several documents: items are put into as few calls as keep rows apart,
and merging the results of several calls is not counted. Ours are the lists as the executor runs them, and for the
sparse masks :func:`flexcp.slice_attention`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import gpu
from flexcp.executor.kernels import Settings
from flexcp.measure.kernels import bench as b
from flexcp.measure.kernels.lists import SIZE, Listed, RankLists
from flexcp.measure.kernels.work import workload

BLOCK = 128
RANGES = (1, 2, 4)
SPARSE = ("docs64", "lambda", "question", "blockwise")
SEEDS, RANKS = (0, 1, 2), 2


def main() -> None:
    """Time all work and print a line of JSON for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", type=Path, required=True)
    parser.add_argument("--write", type=Path)
    asked = parser.parse_args()
    made, found = dict(np.load(asked.plans)), []
    work: list[Callable[[], dict[str, Any]]] = [partial(sparse_row, name) for name in SPARSE]
    work += [partial(plan_row, made, data, ranks) for data, ranks in gpu.DATA]
    for row in work:
        found.append(row())
        print(json.dumps(found[-1]), flush=True)
        if asked.write:
            asked.write.write_text(json.dumps(found, indent=1))


def sparse_row(name: str) -> dict[str, Any]:
    """Return TFLOP/s of one mask, forward and backward."""
    made, heads = workload(name, 16_384), b.Heads()
    x = b.random_tensors(made.tokens, heads, torch.device("cuda", 0))
    listed = Listed(made.slices(), made.tokens, made.tokens, 0, heads.heads, 0, heads.heads)
    ours, theirs = b._op_calls(made, x), BlockLists([listed])
    flops = heads.flops(made.pairs()) / 1e9
    row: dict[str, Any] = {"work": name, "difference": theirs.difference(ours)}
    for way, times in (("forward", 1.0), ("backward", b.BACKWARD)):
        ms = b.timed({"ours": getattr(ours, way), "blocks": getattr(theirs, way)}, 3)
        row[way] = {who: times * flops / t for who, t in ms.items()}
    return row


def plan_row(made: dict[str, Any], data: str, ranks: int) -> dict[str, Any]:
    """Return the mean TFLOP/s of some ranks of plans, forward and backward."""
    row: dict[str, Any] = {"work": data, "ranks": ranks}
    for backward, way in enumerate(("forward", "backward")):
        rates: dict[str, list[float]] = {}
        for seed in SEEDS:
            for rank in range(0, ranks, ranks // RANKS):
                lists = gpu.rank_lists(made, f"{data}/{ranks}/{seed}/{rank}/{backward}/")
                ours, blocks = RankLists("cute", lists, bool(backward)), BlockLists(lists)
                calls = {"ours": partial(ours.run, Settings(SIZE**-0.5)), "blocks": getattr(blocks, way)}
                if not backward:
                    calls["varlen"] = VarlenLists(lists).forward
                for who, ms in b.timed(calls, 2, 20.0).items():
                    rates.setdefault(who, []).append(ours.flops / ms / 1e9)
        row[way] = {who: float(np.mean(x)) for who, x in rates.items()}
        row[f"{way} samples"] = len(rates["ours"])
        best = np.max([rates[who] for who in rates if who != "ours"], axis=0)
        row[f"{way} ratio"] = float(np.mean(np.array(rates["ours"]) / best))
    return row


@dataclass(frozen=True)
class _Call:
    """A call of FlashAttention-4, ready to be timed."""

    forward: Callable[[], Any]
    backward: Callable[[], Any]


class BlockLists:
    """Work lists as calls of FlashAttention-4 with block lists, one for each list."""

    def __init__(self, lists: list[Listed]) -> None:
        self.calls = [_blocks_call(x) for x in lists if len(x.slices)]

    def forward(self) -> None:
        """Run all lists forward."""
        for call in self.calls:
            call.forward()

    def backward(self) -> None:
        """Run all lists backward."""
        for call in self.calls:
            call.backward()

    def difference(self, ours: b.Calls) -> float:
        """Return the largest difference of the first list's output from our op's, whose tensors have the same seed."""
        return float((self.calls[0].forward()[0].float() - ours.forward().float()).abs().max())


class VarlenLists:
    """Work lists as calls of FlashAttention-4 for several documents, forward only."""

    def __init__(self, lists: list[Listed]) -> None:
        self.calls = [call for x in lists for call in _varlen_calls(x)]

    def forward(self) -> None:
        """Run all calls."""
        for call in self.calls:
            call()


def _tensors(x: Listed) -> Any:
    """Return random tensors of a list's sizes; q, k and v require gradients."""
    heads, device = x.h1 - x.h0, torch.device("cuda", 0)
    queries = b.random_tensors(x.rows, b.Heads(heads, max(1, heads // 4), SIZE), device)
    keys = b.random_tensors(x.keys, b.Heads(heads, max(1, heads // 4), SIZE), device)
    return *(t.requires_grad_() for t in (queries.q, keys.k, keys.v)), queries.do


def _blocks_call(x: Listed) -> _Call:
    from flash_attn.cute.interface import flash_attn_func

    q, k, v, do = _tensors(x)
    ranges = key_ranges(x.slices, x.rows)
    width = next(n for n in RANGES if 2 * n >= ranges.shape[1])
    padded = np.zeros((x.rows + 2 * BLOCK, 2 * width), np.int32)
    padded[: x.rows, : ranges.shape[1]] = ranges
    seen = block_counts(ranges, x.rows, x.keys)
    options = {
        "mask_mod": _mask(width),
        "aux_tensors": [torch.from_numpy(padded).cuda()],
        "block_sparse_tensors": _block_lists(seen),
        "block_sparse_tensors_bwd": _block_lists(seen.T),
    }
    batch = tuple(t[None] for t in (q, k, v))

    def forward() -> Any:
        with torch.no_grad():
            return b._first(flash_attn_func(*batch, **options))

    out = b._first(flash_attn_func(*batch, **options))
    return _Call(forward, lambda: torch.autograd.grad(out, (q, k, v), do[None], retain_graph=True))


def key_ranges(slices: Any, rows: int) -> Any:
    """Return the keys of each row as disjoint ranges, ``[rows, 2 * ranges]``; unused ranges are empty."""
    first, last = [], []
    row = np.arange(rows)
    for q0, q1, k0, k1, lo, hi in slices.tolist():
        low, high = np.maximum(k0, row + lo), np.minimum(k1, row + hi + 1)
        empty = (row < q0) | (row >= q1) | (low >= high)
        first.append(np.where(empty, 1 << 30, low))
        last.append(np.where(empty, 1 << 30, high))
    low, high = np.array(first), np.array(last)
    order = np.argsort(low, axis=0)
    low, high = (np.take_along_axis(t, order, axis=0) for t in (low, high))
    for i in range(len(low) - 1, 0, -1):  # join ranges that touch
        touch = (low[i] <= high[i - 1]) & (low[i] < 1 << 30)
        high[i - 1] = np.where(touch, np.maximum(high[i], high[i - 1]), high[i - 1])
        low[i], high[i] = (np.where(touch, 1 << 30, t) for t in (low[i], high[i]))
    order = np.argsort(low, axis=0)
    low, high = (np.take_along_axis(t, order, axis=0) for t in (low, high))
    most = max(1, int((low < 1 << 30).sum(axis=0).max()))
    if most > RANGES[-1]:
        raise ValueError(f"a row has {most} ranges of keys; the mask function reads at most {RANGES[-1]}")
    found = np.zeros((rows, 2 * most), np.int32)
    for i in range(most):
        used = low[i] < 1 << 30
        found[:, 2 * i], found[:, 2 * i + 1] = np.where(used, low[i], 0), np.where(used, high[i], 0)
    return found


def block_counts(ranges: Any, rows: int, keys: int) -> Any:
    """Return how many pairs of each block of 128 x 128 attend, as a fraction of the block's."""
    down, across = -(-rows // BLOCK), -(-keys // BLOCK)
    edges = np.minimum(np.arange(across + 1) * BLOCK, keys)
    pairs = np.zeros((down * BLOCK, across), np.int64)
    for i in range(ranges.shape[1] // 2):
        low, high = ranges[:, 2 * i, None], ranges[:, 2 * i + 1, None]
        pairs[:rows] += np.maximum(0, np.minimum(high, edges[1:]) - np.maximum(low, edges[:-1]))
    return pairs.reshape(down, BLOCK, across).sum(axis=1) / (BLOCK * BLOCK)


def _block_lists(seen: Any) -> Any:
    """Return for each row of blocks the partly and the fully attended ones."""
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

    tables = []
    for chosen in ((seen > 0) & (seen < 1), seen == 1):
        count = chosen.sum(axis=1)
        index = np.argsort(~chosen, axis=1, kind="stable")
        tables += [torch.from_numpy(t.astype(np.int32))[None, None].contiguous().cuda() for t in (count, index)]
    return BlockSparseTensorsTorch(*tables, block_size=(BLOCK, BLOCK))


@cache
def _mask(width: int) -> Any:
    import cutlass
    from cutlass import cute
    from flash_attn.cute.utils import scalar_to_ssa

    @cute.jit
    def one(batch, head, row, key, info, aux):  # type: ignore[no-untyped-def]
        at = aux[0]
        low, high = (scalar_to_ssa(at[row[0], i], cutlass.Int32) for i in (0, 1))
        return (key >= low) & (key < high)

    @cute.jit
    def two(batch, head, row, key, info, aux):  # type: ignore[no-untyped-def]
        at = aux[0]
        a, z, c, d = (scalar_to_ssa(at[row[0], i], cutlass.Int32) for i in (0, 1, 2, 3))
        return ((key >= a) & (key < z)) | ((key >= c) & (key < d))

    @cute.jit
    def four(batch, head, row, key, info, aux):  # type: ignore[no-untyped-def]
        at = aux[0]
        a, z, c, d = (scalar_to_ssa(at[row[0], i], cutlass.Int32) for i in (0, 1, 2, 3))
        e, f, g, h = (scalar_to_ssa(at[row[0], i], cutlass.Int32) for i in (4, 5, 6, 7))
        first = ((key >= a) & (key < z)) | ((key >= c) & (key < d))
        return first | ((key >= e) & (key < f)) | ((key >= g) & (key < h))

    return {1: one, 2: two, 4: four}[width]


def _items(slices: Any) -> list[tuple[bool, tuple[int, int, int, int]]]:
    """Return slices as causal items, whose last row sees all of their keys, and full items: (causal, rows and keys)."""
    found = []
    for q0, q1, k0, k1, lo, hi in slices.tolist():
        if lo > k0 - (q1 - 1):
            raise ValueError(f"a slice with a lower limit of {lo} is neither causal nor full, as varlen calls are")
        middle = min(max(q0, k1 - hi - 1), q1)  # from here on rows see all keys
        if q0 < middle:
            found.append((True, (q0, middle, k0, middle + hi)))
        if middle < q1:
            found.append((False, (middle, q1, k0, k1)))
    return found


def _varlen_calls(x: Listed) -> list[Callable[[], Any]]:
    """Return the calls of one list: causal and full items apart, and in a call no row twice."""
    from flash_attn.cute.interface import flash_attn_varlen_func

    q, k, v, _ = _tensors(x)
    calls: list[tuple[bool, list[Any]]] = []
    for causal, item in sorted(_items(x.slices), key=lambda found: found[1][0]):
        room = next((c for c in calls if c[0] == causal and c[1][-1][1] <= item[0]), None)
        if room is None:
            calls.append((causal, [item]))
        else:
            room[1].append(item)
    made: list[Callable[[], Any]] = []
    for causal, items in calls:
        table = np.array(items)
        starts = [np.append(table[:, c], n).astype(np.int32) for c, n in ((0, x.rows), (2, x.keys))]
        used = [(table[:, c + 1] - table[:, c]).astype(np.int32) for c in (0, 2)]
        sizes = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), (torch.from_numpy(t).cuda() for t in starts), strict=True))
        sizes |= dict(zip(("seqused_q", "seqused_k"), (torch.from_numpy(t).cuda() for t in used), strict=True))
        most = {"max_seqlen_q": int(used[0].max()), "max_seqlen_k": int(used[1].max())}
        run = partial(flash_attn_varlen_func, q.detach(), k.detach(), v.detach(), causal=causal, **sizes, **most)
        made.append(run)
    return made


if __name__ == "__main__":
    main()

"""Our list kernel beside the ways in which FlashAttention-4 can run the same work, on one GPU, in turns.

    python benchmarks/fa4_ways.py --plans plans.npz --write ways.json

The work is that of real plans (``plans.npz`` is made by ``python benchmarks/gpu.py --plans plans.npz --make-plans``)
and four sparse masks of 16,384 tokens. *Blocks* is FlashAttention-4 with block lists and a mask function that reads up
to four ranges of keys per row, one call for each list. *Varlen* (forward only; its backward would overwrite dk and dv
of keys that several items share) is its call for several documents: items are put into as few calls as keep rows apart.
Ours are the lists as the executor runs them, and for the sparse masks :func:`flexcp.slice_attention`.

Our lists leave one result for each row. The calls of FlashAttention-4 leave as many as there are calls with keys for
the row, so each way is also timed with a launch that merges outputs by their LSEs, or adds up dq, in rows with several
results (:mod:`lib.partial_results`; *merged*). dk and dv, which different lists may have for the same keys, are not
added up here. Merged outputs are compared with those of our lists.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

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
    row: dict[str, Any] = {"work": name, "difference": theirs.difference_of_op(ours)}
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
                ours, settings = RankLists("cute", lists, bool(backward)), Settings(SIZE**-0.5)
                ways: dict[str, BlockLists | VarlenLists] = {"blocks": BlockLists(lists)}
                if not backward:
                    ways["varlen"] = VarlenLists(lists)
                    row["difference"] = max(row.get("difference", 0.0), *(x.difference(ours) for x in ways.values()))
                calls = {"ours": partial(ours.run, settings)}
                for who, x in ways.items():
                    calls |= {who: getattr(x, way), f"{who} merged": partial(x.merged, bool(backward))}
                for who, ms in b.timed(calls, 2, 20.0).items():
                    rates.setdefault(who, []).append(ours.flops / ms / 1e9)
        row[way] = {who: float(np.mean(x)) for who, x in rates.items()}
        row[f"{way} samples"] = len(rates["ours"])
        for name, chosen in (("ratio", ("blocks", "varlen")), ("ratio merged", ("blocks merged", "varlen merged"))):
            best = np.max([rates[who] for who in chosen if who in rates], axis=0)
            row[f"{way} {name}"] = float(np.mean(np.array(rates["ours"]) / best))
    return row


@dataclass(frozen=True)
class _Call:
    """A call of FlashAttention-4, ready to be timed; it writes to the same tensors every time.

    ``h0`` is its first head among those of the query shelf number ``shelf``, which has ``shelf_heads``. ``touched``
    says which rows it has results for.
    """

    forward: Callable[[], Any]
    backward: Callable[[], Any] | None
    shelf: int
    h0: int
    shelf_heads: int
    touched: Any
    out: Tensor
    lse: Tensor
    dq: Tensor | None

    def part(self, backward: bool) -> Any:
        """Return what the call leaves, as a partial result."""
        from lib.partial_results import Partial

        if backward:
            assert self.dq is not None
            return Partial(self.dq, None, self.h0, self.touched)
        return Partial(self.out, self.lse, self.h0, self.touched)


class _Lists:
    """Calls of FlashAttention-4 that compute all work lists of a rank."""

    def __init__(self, calls: list[_Call]) -> None:
        self.calls = calls

    def forward(self) -> None:
        """Run all calls forward."""
        for call in self.calls:
            call.forward()

    def merged(self, backward: bool) -> None:
        """Run all calls, and put the results of rows with several of them together."""
        for call in self.calls:
            run = call.backward if backward else call.forward
            assert run is not None
            run()
        for together in self._together[backward].values():
            together.run()

    def difference(self, ours: RankLists) -> float:
        """Return the largest difference of merged outputs from those of our lists.

        It is relative to the largest output if that is above 1. Raises AssertionError if it is more than bf16 allows.
        """
        ours.run(Settings(SIZE**-0.5))
        self.merged(False)
        worst = 0.0
        for shelf, together in self._together[0].items():
            together.copy_single()
            touched = np.zeros((together.out.shape[1], together.out.shape[0]), bool)
            for x in together.parts:
                touched[x.first_head : x.first_head + x.out.shape[1]] |= x.touched
            seen = torch.from_numpy(touched.T).to(together.out.device)
            expected = ours.result(shelf).float()
            error = (together.out.float() - expected).abs().amax(-1)
            largest = float(expected[seen].abs().max())
            worst = max(worst, float(error[seen].max()) / max(1.0, largest))
        if not worst <= b.ALLOWED_ERROR[torch.bfloat16]:
            raise AssertionError(f"merged outputs of FlashAttention-4 differ from ours by {worst}")
        return worst

    @cached_property
    def _together(self) -> list[dict[int, Any]]:
        """What puts the results of each query shelf together, forward and backward."""
        from lib.partial_results import TogetherInto

        found: list[dict[int, Any]] = [{}, {}]
        for backward in (False, True):
            for shelf in {x.shelf for x in self.calls if not backward or x.dq is not None}:
                mine = [x for x in self.calls if x.shelf == shelf]
                rows, heads, device = len(mine[0].touched), mine[0].shelf_heads, mine[0].out.device
                out = torch.zeros(rows, heads, SIZE, dtype=torch.bfloat16, device=device)
                lse = None if backward else torch.zeros(heads, rows, device=device)
                found[backward][shelf] = TogetherInto([x.part(backward) for x in mine], out, lse)
        return found


class BlockLists(_Lists):
    """Work lists as calls of FlashAttention-4 with block lists, one for each list."""

    def __init__(self, lists: list[Listed]) -> None:
        super().__init__([_blocks_call(x) for x in lists if len(x.slices)])

    def backward(self) -> None:
        """Run all lists backward."""
        for call in self.calls:
            assert call.backward is not None
            call.backward()

    def difference_of_op(self, ours: b.Calls) -> float:
        """Return the largest difference of the first list's output from our op's, whose tensors have the same seed."""
        self.calls[0].forward()
        return float((self.calls[0].out.float() - ours.forward().float()).abs().max())


class VarlenLists(_Lists):
    """Work lists as calls of FlashAttention-4 for several documents, forward only."""

    def __init__(self, lists: list[Listed]) -> None:
        super().__init__([call for x in lists for call in _varlen_calls(x)])


def _tensors(x: Listed) -> Any:
    """Return q, k, v and the output's gradient, with the numbers that our lists have (:class:`RankLists`)."""
    heads, device = x.h1 - x.h0, torch.device("cuda", 0)
    shelf = b.random_tensors(x.rows, b.Heads(x.shelf_heads, max(1, x.shelf_heads // 4), SIZE), device)
    if x.shelf_heads != heads or x.rows != x.keys:
        keys = b.random_tensors(x.keys, b.Heads(heads, max(1, heads // 4), SIZE), device)
    else:
        keys = shelf
    return (shelf.q[:, x.h0 : x.h1].contiguous(), keys.k, keys.v, shelf.do[:, x.h0 : x.h1].contiguous())


def _blocks_call(x: Listed) -> _Call:
    from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd

    q, k, v, do = (t[None] for t in _tensors(x))
    ranges = key_ranges(x.slices, x.rows)
    width = next(n for n in RANGES if 2 * n >= ranges.shape[1])
    padded = np.zeros((x.rows + 2 * BLOCK, 2 * width), np.int32)
    padded[: x.rows, : ranges.shape[1]] = ranges
    seen = block_counts(ranges, x.rows, x.keys)
    options = {"mask_mod": _mask(width), "aux_tensors": [torch.from_numpy(padded).cuda()]}
    blocks, blocks_bwd = _block_lists(seen), _block_lists(seen.T)
    out, dq = torch.empty_like(q), torch.empty_like(q)
    lse = torch.empty(1, q.shape[2], x.rows, device=q.device)

    def forward() -> None:
        _flash_attn_fwd(q, k, v, block_sparse_tensors=blocks, out=out, lse=lse, return_lse=True, **options)

    def backward() -> None:
        _flash_attn_bwd(q, k, v, out, do, lse, block_sparse_tensors=blocks_bwd, dq=dq, **options)

    forward()
    place = (x.shelf, x.h0, x.shelf_heads, (ranges[:, ::2] < ranges[:, 1::2]).any(axis=1))
    return _Call(forward, backward, *place, out[0], lse[0], dq[0])


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


def _varlen_calls(x: Listed) -> list[_Call]:
    """Return the calls of one list: causal and full items apart, and in a call no row twice."""
    from flash_attn.cute.interface import _flash_attn_fwd

    q, k, v, _ = _tensors(x)
    calls: list[tuple[bool, list[Any]]] = []
    for causal, item in sorted(_items(x.slices), key=lambda found: found[1][0]):
        room = next((c for c in calls if c[0] == causal and c[1][-1][1] <= item[0]), None)
        if room is None:
            calls.append((causal, [item]))
        else:
            room[1].append(item)
    made: list[_Call] = []
    for causal, items in calls:
        table = np.array(items)
        starts = [np.append(table[:, c], n).astype(np.int32) for c, n in ((0, x.rows), (2, x.keys))]
        used = [(table[:, c + 1] - table[:, c]).astype(np.int32) for c in (0, 2)]
        sizes = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), (torch.from_numpy(t).cuda() for t in starts), strict=True))
        sizes |= dict(zip(("seqused_q", "seqused_k"), (torch.from_numpy(t).cuda() for t in used), strict=True))
        most = {"max_seqlen_q": int(used[0].max()), "max_seqlen_k": int(used[1].max())}
        out, lse = torch.empty_like(q), torch.empty(q.shape[1], x.rows, device=q.device)
        results = {"out": out, "lse": lse, "return_lse": True}
        run = partial(_flash_attn_fwd, q, k, v, causal=causal, **sizes, **most, **results)
        touched = np.zeros(x.rows, bool)
        for q0, q1, *_ in items:
            touched[q0:q1] = True
        made.append(_Call(run, None, x.shelf, x.h0, x.shelf_heads, touched, out, lse, None))
    return made


if __name__ == "__main__":
    main()

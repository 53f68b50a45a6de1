"""Runs the Triton kernel's cases in Triton's interpreter.

Run by test_kernels_triton.py in a process of its own, because the interpreter must be chosen before Triton is imported
and would affect other tests. ``make test-all`` adds the long cases, each of whose features also occurs in a short one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from flexcp import masks
from flexcp.executor.kernels import Settings, reference
from flexcp.executor.kernels.triton import kernel as triton_kernel
from flexcp.executor.kernels.triton import turns
from flexcp.executor.kernels.triton import work as triton_work
from flexcp.executor.kernels.triton.block_sizes import forward_blocks, keys_blocks, queries_blocks
from flexcp.masks import Mask


@dataclass(frozen=True)
class Case:
    """Documents with their masks, the heads, and options of the call."""

    name: str
    documents: tuple[tuple[int, Mask], ...]
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    v_head_dim: int = 64
    dtype: torch.dtype = torch.float32
    softcap: float | None = None
    descriptors: bool = False
    calls: int = 1
    margin: int = 0
    fresh: bool = False
    deterministic: bool = False  # key tiles are not split
    wide: bool = False  # q, k, v are views of wider tensors; heads and rows not used hold NaN
    # Tiles that a group of heads processes in one turn, and blocks in the shortest part of a tile of keys. With the
    # kernel's own values it takes hundreds of tokens before groups take turns or tiles are split.
    chunk: int = turns.CHUNK
    shortest: int = triton_work.SHORTEST_PART
    long: bool = False  # only with --long


C, F = masks.causal(), masks.full()
CASES = (
    Case("share 1", ((40, C), (1, C)), 2, 2),
    Case("share 2, full", ((21, F), (30, C)), long=True),
    Case("share 3", ((37, C),), 3, 1, long=True),
    Case("share 4, window, accumulated", ((50, masks.window(9, 3)), (20, C)), 4, 1, calls=2),
    Case("share 7, softcap", ((33, C),), 7, 1, softcap=3.0),
    Case("share 8, lambda", ((70, masks.lambda_(3, 17)),), 8, 1, long=True),
    Case("share 72: heads in two chunks", ((3, C),), 72, 1),
    Case("head sizes 96 and 192", ((34, C), (9, F)), 2, 1, 96, 192, long=True),
    Case("head sizes 256 and 128", ((20, C),), 2, 2, 256, 128),
    Case("float16", ((60, C), (40, masks.shared_question())), dtype=torch.float16, long=True),
    Case("descriptors", ((90, C), (40, masks.window(20, 5))), dtype=torch.float16, descriptors=True),
    Case("descriptors, share 3, head size 96", ((60, C),), 3, 1, 96, 64, torch.float16, descriptors=True, long=True),
    Case("head sizes 80 and 72, wide", ((40, C), (15, masks.prefix(7))), 4, 2, 80, 72, softcap=3.0, wide=True),
    Case("head sizes 8 and 40, fresh", ((100, C),), 2, 1, 8, 40, torch.float16, fresh=True, long=True),
    Case("descriptors, 72 and 80, wide", ((70, C), (30, F)), 4, 2, 72, 80, torch.float16, descriptors=True, wide=True),
    Case("blockwise", ((80, masks.causal_blockwise(16, 2)),), 4, 1, long=True),
    Case("rows without keys", ((30, masks.from_slices(30, [(10, 30, 0, 15, None, -1), (10, 30, 15, 30, -3, 5)])),)),
    Case("fresh", ((33, C), (15, C)), fresh=True, long=True),
    Case("fresh, float16", ((33, C), (15, F)), dtype=torch.float16, fresh=True),
    Case("a margin makes programs persistent", ((45, C), (30, C)), margin=1),
    Case("wide", ((40, C), (25, masks.prefix(7))), wide=True, long=True),
    Case("wide, descriptors", ((40, C), (25, C)), dtype=torch.float16, descriptors=True, wide=True, long=True),
    Case("groups in turn", ((22, masks.causal_blockwise(8, 1)),), 16, 2, chunk=4),
    Case(
        "groups in turn, persistent", ((70, masks.causal_blockwise(8, 1)),), 8, 2, margin=1, deterministic=True, chunk=2
    ),
    Case("split key tiles", ((100, masks.window(80, 0)), (20, F)), 2, 1, shortest=2),
    Case("nothing to do", ()),
)


def all_shares(group: object, long: bool) -> dict[str, dict[str, float]]:
    """Return, for each case by its name, each result's error divided by the allowed error."""
    return {case.name: shares(case) for case in CASES if long or not case.long}


def shares(case: Case) -> dict[str, float]:
    """Return error / allowed error of each result; allowed is twice the reference kernel's error plus one rounding."""
    slices, tokens = _slices(case)
    inputs = _inputs(case, tokens)
    with (
        patch.object(turns, "CHUNK", case.chunk),
        patch.object(triton_kernel, "CHUNK", case.chunk),
        patch.object(triton_work, "SHORTEST_PART", case.shortest),
    ):
        mine = _run(case, inputs, slices)
    clean = [torch.where(torch.isnan(x), 0.0, x) for x in inputs]
    own = _run(replace(case, calls=1, fresh=False), clean, slices, reference)
    exact = _run(replace(case, calls=1, fresh=False), [x.double() for x in clean], slices, reference)
    eps = torch.finfo(case.dtype).eps
    return {n: _error(mine[n], exact[n]) / (2 * _error(own[n], exact[n]) + eps) for n in exact}


def _slices(case: Case) -> tuple[np.ndarray, int]:
    parts, at = [np.zeros((0, 6), np.int64)], 0
    for length, mask in case.documents:
        parts.append(masks.shift(mask.slices(length), at, at))
        at += length
    return np.concatenate(parts), at + 70


def _inputs(case: Case, tokens: int) -> list[Tensor]:
    """Return q, k, v and do; no slice contains the last 70 rows."""
    generator = torch.Generator().manual_seed(0)
    sizes = ((case.heads, case.head_dim), (case.kv_heads, case.head_dim), (case.kv_heads, case.v_head_dim))
    made = []
    for heads, size in (*sizes, (case.heads, case.v_head_dim)):
        wide = torch.randn(tokens, heads + 3 * case.wide, size, generator=generator).to(case.dtype)
        if case.wide:
            wide[tokens - 70 :] = wide[:, :2] = wide[:, -1:] = torch.nan
        made.append(wide[:, 2:-1] if case.wide else wide)
    return made


def _run(case: Case, inputs: list[Tensor], slices: np.ndarray, kernel: Any = triton_kernel) -> dict[str, Tensor]:
    q, k, v, do = inputs
    precise = torch.float64 if q.dtype == torch.float64 else torch.float32
    settings = Settings(q.shape[2] ** -0.5, case.softcap, case.deterministic, case.margin)
    out, lse = torch.zeros(do.shape, dtype=precise), torch.full(q.shape[:2], -torch.inf, dtype=precise)
    dq, dk, dv = (torch.zeros(x.shape, dtype=precise) for x in (q, k, v))
    if case.fresh:  # out, lse and dq start with arbitrary values, out and dq in the model's dtype
        out, dq = out.to(q.dtype), dq.to(q.dtype)
        for x in (out, lse, dq):
            x[: len(x) - 70] = 7.0
    fresh = replace(settings, fresh=case.fresh)
    sizes = (case.heads, case.kv_heads, case.head_dim, case.v_head_dim, q.device)
    works = [kernel.prepare(slices[i :: case.calls], *sizes) for i in range(case.calls)]
    for work in works:
        if kernel is triton_kernel:
            blocks = replace(forward_blocks(work, q.dtype), tma=case.descriptors)
            kernel.launch_forward(q, k, v, work, fresh, out, lse, blocks)
        else:
            kernel.forward(q, k, v, work, settings, out, lse)
    delta = torch.where(torch.isnan(do), 0.0, do).to(precise).mul(out).sum(-1)
    for work in works:
        if kernel is triton_kernel:
            sides = [f(work, q.dtype) for f in (keys_blocks, queries_blocks)]
            _assert_taken_apart(case, work, *sides)
            sides = [replace(b, tma=case.descriptors) for b in sides]
            kernel.launch_backward(q, k, v, do, lse, delta, work, fresh, dq, dk, dv, *sides)
        else:
            kernel.backward(q, k, v, do, lse, delta, work, settings, dq, dk, dv)
    return {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}


def _assert_taken_apart(case: Case, work: Any, keys: Any, queries: Any) -> None:
    """Check that a case with its own ``chunk`` has several turns, the last one short, and one with its own ``shortest``
    has split tiles of keys.
    """
    if case.chunk != Case.chunk:
        tiles = len(work.rows(queries))
        assert tiles > case.chunk and tiles % case.chunk, tiles
        assert len(work.keys(keys)) > case.chunk or not case.deterministic
    if case.shortest != Case.shortest:
        assert len(work.split_keys(keys)) > 2 * len(work.keys(keys))


def _error(x: Tensor, exact: Tensor) -> float:
    finite = torch.isfinite(exact)
    if not torch.equal(finite, torch.isfinite(x)):
        return float("inf")
    if not finite.any():
        return 0.0
    return float((x.double() - exact)[finite].abs().max() / max(1.0, float(exact[finite].abs().max())))

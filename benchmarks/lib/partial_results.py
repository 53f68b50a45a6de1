"""Partial results: put the results of several attention calls over the same rows together, in one Triton launch.

A call leaves an output and an LSE, or a dq, for its rows and heads. Rows of a head with several results are merged by
their LSEs, or added up if there are none; rows with one result are where they should be and are not touched. A launch
is for heads with the same calls, and reads every result once.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

AT_ONCE = 8
"""Rows of a head that a Triton program puts together."""


@dataclass(frozen=True)
class Partial:
    """What one call leaves: ``out`` is ``[rows, heads, size]``, ``lse`` is ``[heads, rows]`` or None if results add up.

    Its heads are those from ``first_head`` on, and it has results of the rows that ``touched`` says.
    """

    out: Tensor
    lse: Tensor | None
    first_head: int
    touched: NDArray[np.bool_]


@dataclass(frozen=True)
class _Launch:
    heads: tuple[int, int]
    rows: Tensor
    which: Tensor
    outs: Tensor
    lses: Tensor
    strides: Tensor
    count: int


class TogetherInto:
    """The launches that put partial results of one set of rows together into ``out`` (and ``lse``, ``[heads, rows]``).

    ``out`` is ``[rows, heads, size]``. Memory is that of the partial results, which must stay where they are.
    """

    def __init__(self, parts: Sequence[Partial], out: Tensor, lse: Tensor | None) -> None:
        self.parts, self.out, self.lse = parts, out, lse
        borders = sorted({h for x in parts for h in (x.first_head, x.first_head + x.out.shape[1])})
        found = (self._launch(a, b) for a, b in pairwise(borders))
        self.launches = [x for x in found if x is not None]

    def run(self) -> None:
        """Put all rows with several results together."""
        for x in self.launches:
            grid = (triton.cdiv(len(x.rows), AT_ONCE), x.heads[1] - x.heads[0])
            lse = self.out if self.lse is None else self.lse
            _together[grid](
                x.outs,
                x.lses,
                x.strides,
                x.rows,
                x.which,
                len(x.rows),
                self.out[:, x.heads[0] :],
                lse if self.lse is None else lse[x.heads[0] :],
                *self.out.stride()[:2],
                lse.stride(0),
                x.count,
                self.lse is not None,
                self.out.shape[2],
                AT_ONCE,
                num_warps=4,
            )

    def copy_single(self) -> None:
        """Copy rows with one result too, so that ``out`` holds everything; not part of what is timed."""
        for x in self.parts:
            heads = slice(x.first_head, x.first_head + x.out.shape[1])
            rows = torch.from_numpy(np.flatnonzero(x.touched)).to(x.out.device)
            self.out[rows, heads] = x.out[rows]
        self.run()

    def _launch(self, h0: int, h1: int) -> _Launch | None:
        """Return the launch for some heads, over the rows with several results; None if there are none."""
        here = [x for x in self.parts if x.first_head <= h0 and x.first_head + x.out.shape[1] >= h1]
        if len(here) < 2:
            return None
        touched = np.array([x.touched for x in here])
        rows = np.flatnonzero(touched.sum(axis=0) > 1)
        if not len(rows):
            return None
        bits = (touched[:, rows].astype(np.int64) << np.arange(len(here))[:, None]).sum(axis=0)
        outs = [x.out[:, h0 - x.first_head :].data_ptr() for x in here]
        lses = [0 if x.lse is None else x.lse[h0 - x.first_head :].data_ptr() for x in here]
        strides = [[*x.out.stride()[:2], 0 if x.lse is None else x.lse.stride(0)] for x in here]
        tables: tuple[Any, ...] = (rows, bits, outs, lses, strides)
        at, which, *others = (torch.tensor(np.array(t), device=self.out.device) for t in tables)
        return _Launch((h0, h1), at, which, others[0], others[1], others[2], len(here))


@triton.jit
def _together(
    outs,
    lses,
    strides,
    rows,
    which,
    n,
    out,
    lse,
    out_row,
    out_head,
    lse_head,
    COUNT: tl.constexpr,
    WEIGH: tl.constexpr,
    SIZE: tl.constexpr,
    AT: tl.constexpr,
):
    at, head = tl.program_id(0) * AT + tl.arange(0, AT), tl.program_id(1)
    row = tl.load(rows + at, mask=at < n, other=0)
    bits = tl.load(which + at, mask=at < n, other=0)
    column = tl.arange(0, SIZE)
    top = tl.full([AT], float("-inf"), tl.float32)
    if WEIGH:
        for i in range(COUNT):
            there = tl.load(lses + i).to(tl.pointer_type(tl.float32)) + head * tl.load(strides + 3 * i + 2) + row
            top = tl.maximum(top, tl.load(there, mask=(bits >> i) % 2 == 1, other=float("-inf")))
    total = tl.zeros([AT], tl.float32)
    sums = tl.zeros([AT, SIZE], tl.float32)
    for i in range(COUNT):
        has = (bits >> i) % 2 == 1
        weight = has.to(tl.float32)
        if WEIGH:
            there = tl.load(lses + i).to(tl.pointer_type(tl.float32)) + head * tl.load(strides + 3 * i + 2) + row
            found = tl.load(there, mask=has, other=float("-inf"))
            weight = tl.exp(found - tl.where(top == float("-inf"), 0.0, top))
        base = tl.load(outs + i).to(tl.pointer_type(out.dtype.element_ty)) + head * tl.load(strides + 3 * i + 1)
        there = base + row[:, None] * tl.load(strides + 3 * i) + column[None, :]
        part = tl.load(there, mask=has[:, None], other=0.0).to(tl.float32)
        sums += weight[:, None] * part
        total += weight
    if WEIGH:
        sums = sums / tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(lse + head * lse_head + row, top + tl.log(total), mask=at < n)
    to = out + head * out_head + row[:, None] * out_row + column[None, :]
    tl.store(to, sums.to(out.dtype.element_ty), mask=(at < n)[:, None])

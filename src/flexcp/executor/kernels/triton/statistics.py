"""Statistics: LSE and delta, copied into the order in which the kernels of dk and dv (Triton's and Hopper's) read them.

These kernels walk blocks of packed queries (a token and one of the query heads that share a tile). A copy in the order
``[2, head chunk, row, head of the chunk]``, with LSEs in the base of the logits, makes the numbers of a block adjacent.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexcp.executor.kernels.triton.arguments import strides

PACK_BLOCK = 1024


def pack_statistics(lse_TH: Tensor, delta_TH: Tensor, pack: int, base: float) -> Tensor:
    """Return LSE times ``base``, and delta, as a flat float32 tensor in the order ``[2, heads / pack, rows, pack]``.

    So the numbers of a block of packed queries are adjacent. The tensor is a little longer than that, because a block
    may reach past the last row.
    """
    rows, heads = lse_TH.shape
    packed = torch.empty(2 * rows * heads + PACK_BLOCK, dtype=torch.float32, device=lse_TH.device)
    pack_kernel[(triton.cdiv(rows * pack, PACK_BLOCK), heads // pack)](
        lse_TH, delta_TH, packed, rows, *strides(lse_TH, delta_TH), PACK=pack, BLOCK=PACK_BLOCK, BASE=base
    )
    return packed


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

"""Proves, in Triton's interpreter, that partial results are merged by their LSEs, or added up, in the rows and heads
that have several of them, and that all others are left alone.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from triton_interpreter import interpreting_pool

ROWS, HEADS, SIZE, BEFORE = 50, 4, 16, 7.0
PARTS = [(0, 4, 0, 50), (0, 2, 10, 30), (1, 4, 20, 45)]  # first head, last head + 1, first row, last row + 1


def together(group: Any, weigh: bool) -> tuple[Tensor, Tensor, list[tuple[Tensor, Tensor]]]:
    """Return output and LSE after the launches, and the partial results; rows without a result are NaN."""
    from lib.partial_results import Partial, TogetherInto

    generator = torch.Generator().manual_seed(0)
    parts = []
    for h0, h1, first, last in PARTS:
        out = torch.full((ROWS, h1 - h0, SIZE), torch.nan)
        lse = torch.full((h1 - h0, ROWS), torch.nan)
        out[first:last] = torch.randn(last - first, h1 - h0, SIZE, generator=generator)
        lse[:, first:last] = torch.randn(h1 - h0, last - first, generator=generator)
        touched = np.zeros(ROWS, bool)
        touched[first:last] = True
        parts.append(Partial(out, lse if weigh else None, h0, touched))
    out, lse = torch.full((ROWS, HEADS, SIZE), BEFORE), torch.full((HEADS, ROWS), BEFORE)
    TogetherInto(parts, out, lse if weigh else None).run()
    return out, lse, [(x.out, lse if x.lse is None else x.lse) for x in parts]


@pytest.mark.parametrize("weigh", [True, False])
def test_rows_with_several_results_are_put_together(weigh: bool) -> None:
    with interpreting_pool(1) as pool:
        out, lse, parts = pool.run(together, weigh)[0]
    for row in range(ROWS):
        for head in range(HEADS):
            mine = [
                (o[row, head - h0], s[head - h0, row])
                for (o, s), (h0, h1, first, last) in zip(parts, PARTS, strict=True)
                if first <= row < last and h0 <= head < h1
            ]
            if len(mine) == 1:
                assert (out[row, head] == BEFORE).all() and lse[head, row] == BEFORE
                continue
            outs, lses = (torch.stack(x) for x in zip(*mine, strict=True))
            weights = torch.softmax(lses, 0) if weigh else torch.ones(len(mine))
            assert torch.allclose(out[row, head], (weights[:, None] * outs).sum(0), atol=1e-5)
            assert lse[head, row] == (pytest.approx(float(torch.logsumexp(lses, 0)), abs=1e-5) if weigh else BEFORE)

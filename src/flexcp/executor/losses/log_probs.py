"""Log probs: log-probabilities of next tokens, without a second tensor of the logits' size in the forward.

Logits are read in chunks of rows and widened to at least float32. Besides its inputs, the forward saves one number per
row; the backward allocates nothing but the gradient of the logits, and fills it chunk by chunk. A row may have any
number of next tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flexcp.executor.first_derivatives import only_first

CHUNK = 1 << 24
"""The most logits that are widened at a time; at least one row is."""


def log_probs(logits: Tensor, rows: Tensor, labels: Tensor) -> Tensor:
    """Return ``log_softmax(logits, 1)[rows, labels]`` for logits ``[tokens, vocabulary]``, in float32 or wider.

    ``rows`` must be ascending, and may repeat. Differentiable once.
    """
    found: Tensor = _LogProbs.apply(logits, rows, labels)
    return found


def _chunks(logits: Tensor) -> list[tuple[int, int]]:
    """Return (first row, one past the last row) of each chunk of rows."""
    rows = max(1, CHUNK // max(1, logits.shape[1]))
    return [(a, min(a + rows, len(logits))) for a in range(0, len(logits), rows)]


class _LogProbs(torch.autograd.Function):
    """The autograd function of :func:`log_probs`."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, rows: Tensor, labels: Tensor) -> Tensor:
        wide = torch.promote_types(logits.dtype, torch.float32)
        totals = torch.empty(len(logits), dtype=wide, device=logits.device)
        for a, b in _chunks(logits):
            totals[a:b] = torch.logsumexp(logits[a:b].to(wide), 1)
        ctx.save_for_backward(logits, rows, labels, totals)
        return logits[rows, labels].to(wide) - totals[rows]

    @staticmethod
    @only_first("step.log_probs")
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        logits, rows, labels, totals = ctx.saved_tensors
        grad = grads[0].contiguous()
        of_rows = torch.zeros_like(totals).index_add_(0, rows, grad)
        out = torch.empty_like(logits)
        chunks = _chunks(logits)
        borders = torch.tensor([b for _, b in chunks], device=rows.device)
        edges = [0, *torch.searchsorted(rows, borders).tolist()]
        for number, (a, b) in enumerate(chunks):
            part = (
                logits[a:b].to(totals.dtype).sub_(totals[a:b, None])
                if logits.dtype != totals.dtype
                else logits[a:b] - totals[a:b, None]
            )
            part.exp_().mul_(-of_rows[a:b, None])
            mine = slice(edges[number], edges[number + 1])
            part.index_put_((rows[mine] - a, labels[mine]), grad[mine], accumulate=True)
            out[a:b] = part
        return out, None, None

"""Sinks and delta: what attention does to a rank's own rows after the forward's kernels and before the backward's.

A sink is one more logit per head that takes part in the softmax but has no value. It is added to the finished output
and LSE on the rank that keeps the rows. Its gradient follows from the LSE and ``delta = rowsum(do * out) - dlse``.
Delta also carries the gradient of the LSE.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from flexcp.executor.kernels import has_triton


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Return output and LSE after adding one more logit per head, ``sinks``, that has no value."""
    total = torch.logaddexp(lse, sinks.to(lse.dtype).expand_as(lse))
    return out * torch.exp(lse - _finite(total))[..., None], total


@dataclass(frozen=True)
class OutputGradient:
    """The gradients of an attention's output (``do``) and LSE (``dlse``, None if it has none), and the output itself.

    Delta is computed when it is first read: a kernel that takes the output computes delta by itself.
    """

    do: Tensor
    out: Tensor | None
    """None if ``known_delta`` replaces it."""
    dlse: Tensor | None
    dtype: torch.dtype
    """The dtype of delta."""
    known_delta: Tensor | None = None

    @cached_property
    def delta(self) -> Tensor:
        """``rowsum(do * out) - dlse``, or ``known_delta`` if that is given."""
        if self.known_delta is not None:
            return self.known_delta
        assert self.out is not None
        return delta_of(self.do, self.out, self.dlse, self.dtype)

    def in_order(self, reorder: Callable[[Tensor], Tensor]) -> OutputGradient:
        """Return the same gradient with its rows reordered by ``reorder``.

        Delta replaces the output, because it is smaller.
        """
        return OutputGradient(reorder(self.do), None, None, self.dtype, reorder(self.delta))


def delta_of(do: Tensor, out: Tensor, dlse: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return ``rowsum(do * out) - dlse`` in ``dtype``, ``[tokens, heads]``."""
    if do.device.type == "cuda" and has_triton():
        from flexcp.executor.kernels.row_kernels import delta_rows

        delta = torch.empty(out.shape[:2], dtype=dtype, device=out.device)
        delta_rows(do, out, dlse, delta)
        return delta
    delta = (do.to(dtype) * out.to(dtype)).sum(-1)
    return delta if dlse is None else delta - dlse


def sinks_gradient(sinks: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """Return the gradient of each head's sink, summed over this rank's rows.

    The sum is taken in float64, because it is over all rows and its terms cancel.
    """
    terms = torch.exp(sinks.double() - _finite(lse).double()) * delta.double()
    return -terms.sum(0).to(sinks.dtype)


def _finite(lse: Tensor) -> Tensor:
    """Return the LSE with -inf replaced by 0 (rows that see no key), so that exp(-inf - LSE) is 0 and not NaN."""
    return torch.where(lse == -torch.inf, 0.0, lse)

"""Sinks and delta: what attention does to rows before and after its kernels, wherever the kernels ran.

A sink is one more logit per head that takes probability and gives no value. It is added at home, to the finished output
and LSE, and its gradient follows from the LSE and ``delta = rowsum(do * out) - dlse``, which also holds the gradient of
the LSE itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from flexcp.executor.kernels import has_triton


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Output and LSE with one more logit per head that brings no value."""
    total = torch.logaddexp(lse, sinks.to(lse.dtype).expand_as(lse))
    return out * torch.exp(lse - _finite(total))[..., None], total


@dataclass(frozen=True)
class OutputGradient:
    """What comes back to attention: the gradients of its output and LSE, and the output they belong to.

    Delta is computed when somebody asks: a kernel that is given the output does it itself.
    """

    do: Tensor
    out: Tensor | None
    """None where only ``known_delta`` is left of it."""
    dlse: Tensor | None
    dtype: torch.dtype
    """Of delta."""
    known_delta: Tensor | None = None

    @cached_property
    def delta(self) -> Tensor:
        """``rowsum(do * out) - dlse``."""
        if self.known_delta is not None:
            return self.known_delta
        assert self.out is not None
        return delta_of(self.do, self.out, self.dlse, self.dtype)

    def in_order(self, reorder: Callable[[Tensor], Tensor]) -> OutputGradient:
        """The same with its rows reordered; of the output only delta, which is smaller."""
        return OutputGradient(reorder(self.do), None, None, self.dtype, reorder(self.delta))


def delta_of(do: Tensor, out: Tensor, dlse: Tensor | None, dtype: torch.dtype) -> Tensor:
    """``rowsum(do * out) - dlse`` in ``dtype``."""
    if do.device.type == "cuda" and has_triton():
        from flexcp.executor.kernels.row_kernels import delta_rows

        delta = torch.empty(out.shape[:2], dtype=dtype, device=out.device)
        delta_rows(do, out, dlse, delta)
        return delta
    delta = (do.to(dtype) * out.to(dtype)).sum(-1)
    return delta if dlse is None else delta - dlse


def sinks_gradient(sinks: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """Each sink's probability times its logit's gradient, over this rank's rows.

    Summed in float64: one number a head from all rows, whose terms cancel.
    """
    terms = torch.exp(sinks.double() - _finite(lse).double()) * delta.double()
    return -terms.sum(0).to(sinks.dtype)


def _finite(lse: Tensor) -> Tensor:
    """An LSE to subtract: 0 for rows that see nothing, so that exp(-inf - 0) is 0 and not NaN."""
    return torch.where(lse == -torch.inf, 0.0, lse)

"""Finite: look for NaN and Inf in results without making the host wait.

The largest magnitude of a tensor is NaN or infinite exactly if one of its elements is, and takes one reduction. On a
GPU these few numbers are copied to pinned memory asynchronously, and read in a later call, once they have arrived.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from math import isfinite

import torch
from torch import Tensor


@dataclass(frozen=True)
class NotFinite:
    """A result with NaN or Inf: the attention call, in words, and the names of this rank's tensors that have some."""

    call: str
    tensors: tuple[str, ...]

    def __str__(self) -> str:
        where = ", ".join(self.tensors)
        inputs = [name for name in self.tensors if name != "out"]
        blame = "it came in with this rank's inputs" if inputs else "this rank's own inputs are finite"
        return f"NaN or Inf in {where} of {self.call}; {blame}"


class FiniteWatch:
    """Looks for NaN and Inf in the results given to :meth:`look`; :meth:`found` reports them as soon as known."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[str, tuple[str, ...], Tensor, torch.cuda.Event | None]] = deque()

    def look(self, call: str, tensors: dict[str, Tensor]) -> None:
        """Start to compute the largest magnitude of each tensor of a call; do not pass LSEs, in which -inf is valid."""
        sizes = [
            torch.linalg.vector_norm(x, float("inf"), dtype=_wide(x)) if x.numel() else x.new_zeros((), dtype=_wide(x))
            for x in tensors.values()
        ]
        largest, event = torch.stack(sizes), None
        if largest.device.type == "cuda":
            host = torch.empty(largest.shape, dtype=largest.dtype, pin_memory=True)
            host.copy_(largest, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            largest = host
        self._waiting.append((call, tuple(tensors), largest, event))

    def found(self) -> NotFinite | None:
        """Return the next result with NaN or Inf in the tensor ``out``, among those known by now, or None.

        Each result is reported once.
        """
        while self._waiting and (self._waiting[0][3] is None or self._waiting[0][3].query()):
            call, names, largest, _ = self._waiting.popleft()
            bad = tuple(n for n, x in zip(names, largest.tolist(), strict=True) if not isfinite(x))
            if "out" in bad:
                return NotFinite(call, bad)
        return None


def _wide(x: Tensor) -> torch.dtype:
    """Return the dtype of the magnitudes: float64 for float64 tensors, else float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32

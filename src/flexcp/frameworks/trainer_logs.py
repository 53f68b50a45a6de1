"""Trainer logs: how fast tokens go by and how even the ranks' parts are, for the logs of a trainer."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from flexcp.executor.step import Step


@dataclass
class SharedBatches:
    """The batches that ranks shared since the last entry of a log."""

    began: float | None = None
    tokens: int = 0
    work: list[float] = field(default_factory=list)
    """The most attention of a rank / the mean of all ranks, of each batch; likewise for tokens."""
    rows: list[float] = field(default_factory=list)

    def note(self, step: Step) -> None:
        """Count a batch; the first one starts the clock."""
        self.began = time.perf_counter() if self.began is None else self.began
        plan = step.plan
        self.tokens += plan.batch.tokens
        self.work.append(_unevenness(plan.work_of_layers()))
        self.rows.append(_unevenness(plan.placement.tokens))

    def entries(self) -> dict[str, float]:
        """What to log of them, and a new start. Balances are 1.0 where every rank has as much as any other."""
        if self.began is None:
            return {}
        found = {
            "tokens_per_second": self.tokens / (time.perf_counter() - self.began),
            "attention_balance": sum(self.work) / len(self.work),
            "token_balance": sum(self.rows) / len(self.rows),
        }
        self.began, self.tokens, self.work, self.rows = None, 0, [], []
        return found


def _unevenness(counts: NDArray[np.int64]) -> float:
    """The most / the mean; 1.0 where there is nothing."""
    total = int(counts.sum())
    return int(counts.max()) * len(counts) / total if total else 1.0

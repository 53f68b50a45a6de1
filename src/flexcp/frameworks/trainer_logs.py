"""Numbers for a trainer's logs: tokens per second, and the balance of ranks."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from flexcp.executor.step import Step


@dataclass
class SharedBatches:
    """What was counted of the batches that ranks shared since the last entry of the log.

    ``began`` is the time of the first batch (``perf_counter``), None before it; ``tokens`` are those of all ranks.
    """

    began: float | None = None
    tokens: int = 0
    work: list[float] = field(default_factory=list)
    """For each batch the attention work of the busiest rank, divided by the mean of all ranks."""
    rows: list[float] = field(default_factory=list)
    """For each batch the most tokens of a rank, divided by the mean of all ranks."""

    def note(self, step: Step) -> None:
        """Count a batch; the first one starts the clock."""
        self.began = time.perf_counter() if self.began is None else self.began
        plan = step.plan
        self.tokens += plan.batch.tokens
        self.work.append(_unevenness(plan.work_of_layers()))
        self.rows.append(_unevenness(plan.placement.tokens))

    def entries(self) -> dict[str, float]:
        """Return the numbers to log, and start anew; {} if there was no batch.

        A balance is the mean over batches of the busiest rank / the mean of all ranks: 1.0 if all ranks have the same.
        """
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
    """Return the largest count divided by the mean; 1.0 if all are 0."""
    total = int(counts.sum())
    return int(counts.max()) * len(counts) / total if total else 1.0

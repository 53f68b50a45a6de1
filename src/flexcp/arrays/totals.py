"""Totals: values added up by an index, and how uneven they are."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


def imbalance(values: Ints) -> float:
    """Largest over mean; 1 when there is nothing."""
    total = int(values.sum())
    return float(int(values.max()) * len(values) / total) if total else 1.0


def sums(index: Ints, values: Ints, size: int) -> Ints:
    """``values`` added up by ``index``."""
    total = np.zeros(size, np.int64)
    np.add.at(total, index, values)
    return total

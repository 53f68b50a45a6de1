"""Totals: sum up values by an index, and measure how uneven totals are."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


def imbalance(values: Ints) -> float:
    """Return the largest value divided by the mean; 1 if all values are 0."""
    total = int(values.sum())
    return float(int(values.max()) * len(values) / total) if total else 1.0


def sums(index: Ints, values: Ints, size: int) -> Ints:
    """Return an array of ``size`` sums; entry i is the sum of the values whose index is i."""
    total = np.zeros(size, np.int64)
    np.add.at(total, index, values)
    return total

"""Order: the order in which an epoch visits a dataset, and the number of batches it makes.

The order is a sort of hashed sample numbers, so a seed gives the same order on every machine, with every NumPy version
and on any number of ranks, and a place in the order is one integer. Batches are filled in this order up to the token
budget. The content of a batch follows from the place where it begins, so a state only has to store a place.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
_WORD = (1 << 64) - 1


def epoch_order(samples: int, shuffle: bool, seed: int, epoch: int) -> Ints:
    """Return the sample numbers ``0 <= i < samples`` in the order of an epoch: ascending, or with ``shuffle`` mixed."""
    if not shuffle:
        return np.arange(samples, dtype=np.int64)
    start = _mixed(np.array([_mixed_integer(seed, epoch)], np.uint64))[0]
    keys = _mixed(start + np.arange(samples, dtype=np.uint64))
    return np.argsort(keys, kind="stable")


def _mixed_integer(seed: int, epoch: int) -> int:
    """Return a 64-bit number for a seed and an epoch."""
    return (seed * 0x9E3779B97F4A7C15 + epoch * 0xD1B54A32D192ED03) & _WORD


def _mixed(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Hash 64-bit words; different words have different hashes."""
    x = x * np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(30)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x9E3779B97F4A7C15)
    return x ^ (x >> np.uint64(31))


def count_batches(lengths: Ints, budget: int, drop_last: bool) -> int:
    """Return how many batches of at most ``budget`` tokens the documents fill, in their order.

    No document may be longer than ``budget``. With ``drop_last``, a last batch of fewer tokens is not counted.
    """
    ends = np.cumsum(lengths)
    count, place, before = 0, 0, 0
    while place < len(lengths):
        stop = int(np.searchsorted(ends, before + budget, side="right"))
        if stop == len(lengths) and drop_last and int(ends[-1]) - before < budget:
            break
        count, place, before = count + 1, stop, int(ends[stop - 1])
    return count

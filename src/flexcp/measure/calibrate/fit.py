"""Fits: the cost model's numbers from measured times, and how wrong they are on times they did not see.

Relative errors are what counts, so every fit divides by what was measured. Attention takes
``a * (pairs + c * row tiles) * heads + k`` nanoseconds, with an own ``a`` for each direction, one ``c`` (in pairs) and
one ``k`` (the start of a kernel) for both: for a given c that is linear, and c is searched on a grid. A time on a link
is its latency and its bytes at a bandwidth.

Every third sample of the sorted list is *held out*: it takes no part in the fit, and errors are those on the held-out
ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from flexcp.calibration import Errors

T = TypeVar("T")
Floats = NDArray[np.float64]
HOLD_EVERY = 3
TILE_PRICES = (0, *(round(1024 * 2 ** (i / 6)) for i in range(49)))
"""Pairs that 128 rows may cost besides their own, up to 256 of them against 1,024 keys."""


@dataclass(frozen=True)
class Sample:
    """One measured kernel: pairs and tiles of 128 rows (both over all query heads), direction, nanoseconds."""

    name: str
    pairs: int
    tiles: int
    backward: bool
    ns: float


@dataclass(frozen=True)
class KernelFit:
    """Nanoseconds of a pair forward and backward, pairs of a row tile, nanoseconds of a launch."""

    forward: float
    backward: float
    tile_pairs: int
    kernel_ns: float

    def ns(self, sample: Sample) -> float:
        each = self.backward if sample.backward else self.forward
        return each * (sample.pairs + self.tile_pairs * sample.tiles) + self.kernel_ns


def split(samples: Sequence[T]) -> tuple[list[T], list[T]]:
    """(fitted, held out)."""
    held = list(samples[1::HOLD_EVERY])
    return [s for i, s in enumerate(samples) if i % HOLD_EVERY != 1], held


def fit_kernels(samples: Sequence[Sample], launch: bool = True) -> KernelFit:
    """The fit with the least mean square of relative errors; without ``launch`` kernels start for free.

    Where no launch that costs something leaves pairs a positive time (a busy machine can measure less work as slower),
    kernels start for free too: samples that fit nothing then show in the errors of those held out, which a calibration
    states.
    """
    if not {s.backward for s in samples} == {False, True} or len(samples) < 4:
        raise ValueError(f"a fit needs at least 4 samples with both directions; got {len(samples)}")
    way = np.array([s.backward for s in samples])
    pairs, tiles = (np.array([getattr(s, f) for s in samples], float) for f in ("pairs", "tiles"))
    ns = np.array([s.ns for s in samples])
    fits: list[tuple[float, KernelFit]] = []
    for price in TILE_PRICES:
        work = pairs + price * tiles
        columns = [np.where(way, 0, work), np.where(way, work, 0)]
        found = _solved(np.stack([*columns, np.ones_like(ns)], axis=1), ns) if launch else None
        if found is None or found[2] < 0 or min(found[:2]) <= 0:
            found = np.append(_solved(np.stack(columns, axis=1), ns), 0.0)
        made = KernelFit(float(found[0]), float(found[1]), price, float(found[2]))
        fits.append((float(np.mean([(made.ns(s) / s.ns - 1) ** 2 for s in samples])), made))
    return min(fits, key=lambda fit: fit[0])[1]


def fit_link(size: Sequence[int], ns: Sequence[float]) -> tuple[float, float]:
    """(latency in nanoseconds, nanoseconds of a byte) of times of messages."""
    a = np.stack([np.ones(len(size)), np.array(size, float)], axis=1)
    latency, each = _solved(a, np.array(ns, float))
    if latency < 0:
        latency, each = 0.0, float(_solved(a[:, 1:], np.array(ns, float))[0])
    return float(latency), max(float(each), 1e-9)


def errors(predicted: Sequence[float], measured: Sequence[float]) -> Errors:
    """Relative errors of predictions."""
    off = np.abs(np.array(predicted) / np.array(measured) - 1)
    return Errors(len(off), *(round(float(x), 5) for x in (np.median(off), np.quantile(off, 0.9), off.max())))


def _solved(a: Floats, y: Floats) -> Floats:
    """Least squares of relative errors."""
    found, *_ = np.linalg.lstsq(a / y[:, None], np.ones(len(y)), rcond=None)
    return np.asarray(found)

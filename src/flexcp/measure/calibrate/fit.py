"""Fits of the cost model's numbers to measured times, and their errors on held-out times.

Relative errors count, so every fit divides by the measured time. Attention takes ``a * (pairs + c * row tiles) * heads
+ k`` nanoseconds: each direction has its own ``a``, and both share ``c`` (in pairs) and ``k`` (the start of a kernel).
For a given c this is linear, and c is searched on a grid. A message takes the latency plus its bytes over the bandwidth
of the link.

Every third sample of the sorted list is *held out*: it takes no part in the fit, and errors are computed on these.

A document shorter than a row tile is counted as a whole tile, but costs a GPU kernel less, because query heads share
its tiles. A few such samples would set the price of all tiles too low, so on GPUs they are not fitted, and their errors
are stated separately.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from flexcp.calibration import SHORT_DOCUMENTS, Errors

T = TypeVar("T")
Floats = NDArray[np.float64]
HOLD_EVERY = 3
TILE_PRICES = (0, *(round(1024 * 2 ** (i / 6)) for i in range(49)))
"""Candidates for the fixed cost of a tile of 128 rows, in pairs: 0, and 1,024 to 256 x 1,024."""


@dataclass(frozen=True)
class Sample:
    """One measured kernel: (query, key) pairs and tiles of 128 rows, its direction, and its nanoseconds.

    Pairs and tiles are counted for all query heads. ``short`` says that the mean document is shorter than a row tile.
    """

    name: str
    pairs: int
    tiles: int
    backward: bool
    ns: float
    short: bool = False


@dataclass(frozen=True)
class KernelFit:
    """What kernels cost: nanoseconds of a (query, key) pair of one head in each direction, and of a launch.

    ``tile_pairs`` is the cost of a tile of 128 rows, in pairs.
    """

    forward: float
    backward: float
    tile_pairs: int
    kernel_ns: float

    def ns(self, sample: Sample) -> float:
        """Return the nanoseconds that the fit gives for a sample's work."""
        each = self.backward if sample.backward else self.forward
        return each * (sample.pairs + self.tile_pairs * sample.tiles) + self.kernel_ns


def split(samples: Sequence[T]) -> tuple[list[T], list[T]]:
    """Split samples into (fitted, held out); every third one is held out, from the second on."""
    held = list(samples[1::HOLD_EVERY])
    return [s for i, s in enumerate(samples) if i % HOLD_EVERY != 1], held


def fit_and_judge(samples: Sequence[Sample], gpu: bool) -> tuple[KernelFit, dict[str, Errors]]:
    """Return (the fit, its errors on held-out samples: ``kernels`` and, on a GPU, those of short documents)."""
    # Sorted by time, so that held-out samples lie between fitted ones.
    fitted, held = split(sorted(samples, key=lambda s: s.ns))
    made = fit_kernels([s for s in fitted if not (gpu and s.short)])
    kinds = {"kernels": [s for s in held if not (gpu and s.short)]}
    kinds |= {SHORT_DOCUMENTS: [s for s in held if gpu and s.short]}
    found = {name: errors([made.ns(s) for s in each], [s.ns for s in each]) for name, each in kinds.items() if each}
    return made, found


def fit_kernels(samples: Sequence[Sample], launch: bool = True) -> KernelFit:
    """Return the fit with the least mean square of relative errors; without ``launch`` kernels start for free.

    If a launch with a positive cost would leave pairs without a positive time (on a busy machine less work can be
    measured as slower), or if the cost of a launch would be negative, kernels start for free too. Samples that fit
    badly then show in the held-out errors of the calibration. Raise ValueError for fewer than 4 samples or a single
    direction.
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
    """Fit the times ``ns`` of messages of ``size`` bytes, and return (latency in nanoseconds, nanoseconds per byte)."""
    a = np.stack([np.ones(len(size)), np.array(size, float)], axis=1)
    latency, each = _solved(a, np.array(ns, float))
    if latency < 0:
        latency, each = 0.0, float(_solved(a[:, 1:], np.array(ns, float))[0])
    return float(latency), max(float(each), 1e-9)


def errors(predicted: Sequence[float], measured: Sequence[float]) -> Errors:
    """Return count, median, 90th percentile and worst of the relative errors of predictions."""
    off = np.abs(np.array(predicted) / np.array(measured) - 1)
    return Errors(len(off), *(round(float(x), 5) for x in (np.median(off), np.quantile(off, 0.9), off.max())))


def _solved(a: Floats, y: Floats) -> Floats:
    """Solve ``a @ x = y`` for the least squares of relative errors."""
    found, *_ = np.linalg.lstsq(a / y[:, None], np.ones(len(y)), rcond=None)
    return np.asarray(found)

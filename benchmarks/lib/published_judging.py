"""Judging simulated figures: how far each is from the published one,
and whether systems come out in the published order.

The error of a figure is simulated / published - 1. Figures of one setting that differ in system and method make
*pairs*; of those whose published values differ by ``APART`` or more, the order is right when the simulated values
differ to the same side, and the error of their ratio is judged like a figure's.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations

from lib.published_figures import Figure

APART = 1.10
MISS = 0.15
"""An error beyond this is a miss, and needs a reason."""


@dataclass(frozen=True)
class Result:
    """A figure and what was simulated for it, or why nothing was."""

    line: int
    figure: Figure
    simulated: float | None
    method: str = ""
    """Which of the figure's methods it is, where there are several."""
    refused: str = ""

    @property
    def error(self) -> float:
        assert self.simulated is not None
        return self.simulated / self.figure.value - 1

    @property
    def is_miss(self) -> bool:
        return self.simulated is None or abs(self.error) > MISS


@dataclass(frozen=True)
class Pair:
    """Two figures of one setting, the larger published value first."""

    first: Result
    second: Result

    @property
    def published(self) -> float:
        return self.first.figure.value / self.second.figure.value

    @property
    def simulated(self) -> float:
        assert self.first.simulated is not None and self.second.simulated is not None
        return self.first.simulated / self.second.simulated

    @property
    def is_right(self) -> bool:
        return self.simulated > 1

    @property
    def error(self) -> float:
        return self.simulated / self.published - 1


@dataclass(frozen=True)
class Spread:
    """Absolute errors: how many, the median, the 90th percentile and the largest."""

    count: int
    median: float
    p90: float
    worst: float


def spread(errors: Iterable[float]) -> Spread | None:
    """The spread of errors; None of none."""
    found = sorted(abs(e) for e in errors)
    if not found:
        return None
    ninth = found[min(len(found) - 1, -(-9 * len(found) // 10) - 1)]
    return Spread(len(found), statistics.median(found), ninth, found[-1])


def pairs(results: Sequence[Result]) -> list[Pair]:
    """All pairs of one setting that are apart; a ratio is a pair already, and makes none."""
    groups: dict[tuple[object, ...], list[Result]] = defaultdict(list)
    for each in results:
        if each.simulated is not None and each.figure.unit != "ratio":
            groups[each.figure.setting].append(each)
    found = []
    for group in groups.values():
        for one, other in combinations(group, 2):
            first, second = sorted((one, other), key=lambda r: -r.figure.value)
            if first.figure.value / second.figure.value >= APART:
                found.append(Pair(first, second))
    return found

"""Judgement of simulated figures: their errors against the published ones,
and whether systems come out in the published order.

The error of a figure is simulated / published - 1. Figures of one setting that differ in system and method form
*pairs*. Pairs whose published values differ by ``APART`` or more are judged: the order is right if the simulated values
differ in the same direction, and the error of their ratio is judged like that of a figure.
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
"""An error above this is a miss, and needs a reason."""


@dataclass(frozen=True)
class Result:
    """A figure with its simulated value, or the reason why there is none."""

    line: int
    figure: Figure
    simulated: float | None
    method: str = ""
    """The simulated method, if the figure lists several."""
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
    """Absolute errors: count, median, 90th percentile and largest."""

    count: int
    median: float
    p90: float
    worst: float


def spread(errors: Iterable[float]) -> Spread | None:
    """Return the spread of errors, or None if there are none."""
    found = sorted(abs(e) for e in errors)
    if not found:
        return None
    ninth = found[min(len(found) - 1, -(-9 * len(found) // 10) - 1)]
    return Spread(len(found), statistics.median(found), ninth, found[-1])


def pairs(results: Sequence[Result]) -> list[Pair]:
    """Return all pairs of one setting that are far enough apart; ratios form no pairs."""
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

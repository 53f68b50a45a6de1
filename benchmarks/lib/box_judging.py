"""Judgement of the box's steps: errors of their predictions,
and whether strategies were measured in the predicted order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from lib.box_calibration import Port

APART = 1.10


@dataclass(frozen=True)
class BoxStep:
    """One strategy on one batch at one load: measured and predicted milliseconds of attention, forward and backward."""

    batch: str
    load: float
    strategy: str
    share: float
    """The time that its busiest port is busy over the compute time of its slowest rank."""
    measured_ms: float
    predicted_ms: float

    @property
    def error(self) -> float:
        """Predicted over measured time, minus one."""
        return self.predicted_ms / self.measured_ms - 1

    def cells(self) -> list[str]:
        """Return the row of a table."""
        found = [self.batch, f"{self.load:g}", self.strategy, f"{self.share:.2f}", f"{self.measured_ms:.0f}"]
        return [*found, f"{self.predicted_ms:.0f}", f"{self.error:+.0%}"]


@dataclass(frozen=True)
class Calibrated:
    """The ports for one batch and load: the speed they were set to, and what was measured."""

    batch: str
    load: float
    mbit: int
    inside: Port
    across: Port


@dataclass(frozen=True)
class Order:
    """Pairs of strategies predicted clearly apart, and how many of them were measured in the predicted order."""

    pairs: int
    right: int


def order(steps: Sequence[BoxStep]) -> Order:
    """Judge the order of strategies of one batch and load that are predicted more than 10 % apart."""
    pairs = right = 0
    for one, other in combinations(steps, 2):
        slow, fast = sorted((one, other), key=lambda step: -step.predicted_ms)
        if (one.batch, one.load) == (other.batch, other.load) and slow.predicted_ms > APART * fast.predicted_ms:
            pairs += 1
            right += slow.measured_ms > fast.measured_ms
    return Order(pairs, right)


def regrets(steps: Sequence[BoxStep]) -> list[float]:
    """Return for each batch and load the measured time of ``auto``'s choice over that of the best strategy."""
    found = []
    for key in dict.fromkeys((step.batch, step.load) for step in steps):
        some = [step for step in steps if (step.batch, step.load) == key]
        autos = [step.measured_ms for step in some if step.strategy.split(" = ")[0] == "auto"]
        found += [auto / min(step.measured_ms for step in some) for auto in autos]
    return found

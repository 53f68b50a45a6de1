"""Steps of the box, judged: how far predictions are from what was measured,
and whether strategies come out in the predicted order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from lib.box_calibration import Port

APART = 1.10


@dataclass(frozen=True)
class BoxStep:
    """One strategy on one batch at one load, milliseconds of forward and backward of attention."""

    batch: str
    load: float
    strategy: str
    share: float
    """Time that its busiest port is busy over the time that its slowest rank computes."""
    measured_ms: float
    predicted_ms: float

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted_ms / self.measured_ms - 1

    def cells(self) -> list[str]:
        """A row of a table."""
        found = [self.batch, f"{self.load:g}", self.strategy, f"{self.share:.2f}", f"{self.measured_ms:.0f}"]
        return [*found, f"{self.predicted_ms:.0f}", f"{self.error:+.0%}"]


@dataclass(frozen=True)
class Calibrated:
    """The ports of one machine: what they were told to carry and what was measured."""

    batch: str
    load: float
    mbit: int
    inside: Port
    across: Port


@dataclass(frozen=True)
class Order:
    """Pairs of one batch and load that are predicted apart, and how many of them are measured in that order."""

    pairs: int
    right: int


def order(steps: Sequence[BoxStep]) -> Order:
    """The order of strategies predicted more than 10 % apart."""
    pairs = right = 0
    for one, other in combinations(steps, 2):
        slow, fast = sorted((one, other), key=lambda step: -step.predicted_ms)
        if (one.batch, one.load) == (other.batch, other.load) and slow.predicted_ms > APART * fast.predicted_ms:
            pairs += 1
            right += slow.measured_ms > fast.measured_ms
    return Order(pairs, right)


def regrets(steps: Sequence[BoxStep]) -> list[float]:
    """The measured time of what ``auto`` took over that of the best strategy, for each batch and load."""
    found = []
    for key in dict.fromkeys((step.batch, step.load) for step in steps):
        some = [step for step in steps if (step.batch, step.load) == key]
        autos = [step.measured_ms for step in some if step.strategy.split(" = ")[0] == "auto"]
        found += [auto / min(step.measured_ms for step in some) for auto in autos]
    return found

"""Corrections: from which step on the planner takes ranks for how fast. Integers only; no clock, no torch.

A correction is (epoch, step, speeds): from that step of that epoch on, rank r computes at ``speeds[r]`` per mille of
the cluster's speed. Corrections are numbered by their place in the list. A step's plan depends on the last one that is
not after it, and on nothing that was measured since, so that a list of them replays a run: the same steps, planned with
the same corrections, have the same hashes.

:func:`agreed_speeds` makes one of what all ranks measured, by the same integer arithmetic on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flexcp.clusters import NOMINAL_SPEED
from flexcp.io.plain_values import shown

STEP = 10
"""Speeds are rounded to this many per mille: finer ones are noise."""
LEAST_CHANGE = 30
"""Per mille by which a rank must differ from what it is taken for before there is a new correction."""
SLOWEST, FASTEST = 100, 10_000
"""A rank that seems slower or faster than these per mille of the others has something else wrong, which no plan mends.
"""


@dataclass(frozen=True)
class Correction:
    """From ``step`` of ``epoch`` on, ranks have these speeds in per mille."""

    epoch: int
    step: int
    speeds: tuple[int, ...]

    def plain(self) -> list[Any]:
        """As plain values, for a state."""
        return [self.epoch, self.step, list(self.speeds)]


def read_corrections(values: Sequence[Any], ranks: int) -> list[Correction]:
    """Corrections of a state; those for another number of ranks say nothing about these and are left out."""
    found = []
    try:
        for epoch, step, speeds in values:
            if len(speeds) == ranks:
                found.append(Correction(int(epoch), int(step), tuple(int(speed) for speed in speeds)))
                if min(found[-1].speeds) < 1:
                    raise ValueError("a speed is at least 1")
    except (TypeError, ValueError, OverflowError):
        raise ValueError(
            f"this state of a Loader is damaged: its speeds are {shown(values)}; load the one that state_dict() gave"
        ) from None
    return found


def speeds_at(corrections: Sequence[Correction], epoch: int, step: int) -> tuple[int, ...] | None:
    """The speeds in force at a step; None before the first correction."""
    found = None
    for correction in corrections:
        if (correction.epoch, correction.step) <= (epoch, step):
            found = correction.speeds
    return found


def agreed_speeds(measured: Sequence[tuple[int, int]], taken: Sequence[int]) -> tuple[int, ...] | None:
    """New speeds of all ranks, or None where what they are taken for is near enough.

    ``measured`` is, of each rank, the nanoseconds its work takes by the cost model at nominal speed, and those it took.
    The cost model's own error is in all ranks alike, so speeds are relative: the rank in the middle gets the middle one
    of those they are taken for. A rank that did nothing keeps its own.
    """
    scale = NOMINAL_SPEED * NOMINAL_SPEED
    rates = [max(1, scale * expected // took) if expected and took else 0 for expected, took in measured]
    known = sorted(rate for rate in rates if rate)
    if len(known) < 2:
        return None
    middle, base = known[len(known) // 2], sorted(taken)[len(taken) // 2]
    found = []
    for rate, speed in zip(rates, taken, strict=True):
        exact = base * rate // middle if rate else speed
        found.append(min(FASTEST, max(SLOWEST, (exact + STEP // 2) // STEP * STEP)))
    if all(abs(new - old) * NOMINAL_SPEED < LEAST_CHANGE * old for new, old in zip(found, taken, strict=True)):
        return None
    return tuple(found)

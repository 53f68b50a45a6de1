"""Corrections: the speeds of ranks that the planner assumes from a given step on. Integers only; no clock, no torch.

A correction is (epoch, step, speeds): from that step of that epoch on, the planner assumes that rank r computes at
``speeds[r]`` per mille of the cluster's speed. The plan of a step depends on the last correction at or before it, and
on no other measurement. So the list of corrections is enough to repeat a run: the same steps, planned with the same
corrections, have plans with the same hashes.

:func:`agreed_speeds` makes a correction from the measurements of all ranks, with the same integer arithmetic on every
rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from flexcp.clusters import NOMINAL_SPEED
from flexcp.io.plain_values import shown

STEP = 10
"""Speeds are rounded to multiples of this many per mille: smaller differences are noise."""
LEAST_CHANGE = 30
"""A new correction is made only if a rank differs from its assumed speed by at least this many per mille."""
SLOWEST, FASTEST = 100, 10_000
"""Limits of a speed in per mille: a rank beyond them has a problem that a plan cannot solve."""


@dataclass(frozen=True)
class Correction:
    """From ``step`` of ``epoch`` on, the planner assumes these speeds of the ranks, in per mille of nominal speed."""

    epoch: int
    step: int
    speeds: tuple[int, ...]

    def plain(self) -> list[Any]:
        """Return the correction as a list of plain values, ``[epoch, step, speeds]``, for a loader's state."""
        return [self.epoch, self.step, list(self.speeds)]


def read_corrections(values: Sequence[Any], ranks: int) -> list[Correction]:
    """Read the corrections in a loader's state; those for another number of ranks do not apply and are left out.

    Raise ValueError if the values are not corrections.
    """
    try:
        read = [Correction(epoch, step, tuple(speeds)) for epoch, step, speeds in values]
        numbers = [n for each in read for n in (each.epoch, each.step, *each.speeds)]
        ordered = all((a.epoch, a.step) <= (b.epoch, b.step) for a, b in pairwise(read))
        # Speeds that are rounded or put in order here would plan other steps than those of the run that saved them.
        right = ordered and all(type(n) is int and n >= 0 for n in numbers) and all(min(each.speeds) for each in read)
    except (TypeError, ValueError):
        right = False
    if not right:
        raise ValueError(
            f"this state of a Loader is damaged: its speeds are {shown(values)}; load the one that state_dict() gave"
        )
    return [each for each in read if len(each.speeds) == ranks]


def speeds_at(corrections: Sequence[Correction], epoch: int, step: int) -> tuple[int, ...] | None:
    """Return the speeds, in per mille, that the planner assumes at a step; None before the first correction.

    ``corrections`` are in the order of their steps.
    """
    found = None
    for correction in corrections:
        if (correction.epoch, correction.step) <= (epoch, step):
            found = correction.speeds
    return found


def agreed_speeds(measured: Sequence[tuple[int, int]], taken: Sequence[int]) -> tuple[int, ...] | None:
    """Return new speeds of all ranks in per mille, or None if the assumed speeds ``taken`` are to be kept.

    ``measured`` holds, for each rank, the nanoseconds that the cost model expects for its work at nominal speed, and
    the nanoseconds that it took. The cost model's own error is the same on all ranks, so speeds are relative: of the
    ranks with measurements, the one with the median rate gets the median of their assumed speeds. A rank without work
    keeps its speed. The assumed speeds are kept if no rank differs by :data:`LEAST_CHANGE` or more, or if fewer than
    two ranks have measurements.
    """
    scale = NOMINAL_SPEED * NOMINAL_SPEED
    rates = [max(1, scale * expected // took) if expected and took else 0 for expected, took in measured]
    known = sorted(rate for rate in rates if rate)
    if len(known) < 2:
        return None
    # Both medians are of the same ranks: one rank without work must not make all others faster or slower than it.
    assumed = sorted(speed for rate, speed in zip(rates, taken, strict=True) if rate)
    middle, base = known[len(known) // 2], assumed[len(assumed) // 2]
    found = []
    for rate, speed in zip(rates, taken, strict=True):
        exact = base * rate // middle if rate else speed
        found.append(min(FASTEST, max(SLOWEST, (exact + STEP // 2) // STEP * STEP)))
    if all(abs(new - old) * NOMINAL_SPEED < LEAST_CHANGE * old for new, old in zip(found, taken, strict=True)):
        return None
    return tuple(found)

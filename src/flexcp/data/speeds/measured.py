"""Measured work: how long this rank computed attention, by telemetry, and how long it should have at nominal speed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from flexcp.telemetry.records import StepRecord
from flexcp.telemetry.telemetry import Telemetry


class MeasuredWork:
    """Sums up the attention times of the steps that a telemetry recorded, each step once."""

    def __init__(self, telemetry: Telemetry) -> None:
        self.telemetry = telemetry
        self._next = 0

    def since_last(self) -> tuple[int, int]:
        """Return (expected, taken) nanoseconds of the steps since the last call; (0, 0) if there are none.

        This function does not wait for the device: it stops at the first step that is not finished, and the next call
        counts from there.
        """
        expected = took = 0
        for record in self.telemetry.steps:
            passes = list(record.passes)
            if record.number < self._next or record.rank is None or not passes:
                continue
            if not all(p.finished() for p in passes):
                break
            expected += expected_ns(record)
            took += record.times().compute
            self._next = record.number + 1
        return expected, took

    def forget(self) -> None:
        """Ignore all steps that were measured until now."""
        self._next = max((record.number + 1 for record in self.telemetry.steps), default=self._next)


def expected_ns(record: StepRecord) -> int:
    """Return the nanoseconds that the cost model expects for a rank's attention passes of a step, at nominal speed."""
    plan, rank = record.plan, record.rank or 0
    machine = replace(plan.cluster, speeds=())
    found = 0
    for number, mask in enumerate(plan.batch.masks):
        work = plan.work(number)
        for backward in (False, True):
            count = sum(p.mask == mask.name and p.backward == backward and p.done for p in list(record.passes))
            if count:
                found += count * int(plan.cost.attention_ns(np.asarray(work), plan.shape, machine, backward)[rank])
    return found

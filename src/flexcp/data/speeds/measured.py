"""Measured work: what telemetry knows of how long this rank computed,
beside how long it should have at nominal speed.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from flexcp.telemetry.records import StepRecord
from flexcp.telemetry.telemetry import Telemetry


class MeasuredWork:
    """Sums up the steps of a telemetry that were not summed up before."""

    def __init__(self, telemetry: Telemetry) -> None:
        self.telemetry = telemetry
        self._next = 0

    def since_last(self) -> tuple[int, int]:
        """Nanoseconds expected and taken in the steps since the last call; of those that the device is through with,
        which it does not wait for. (0, 0) where there is none.
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
        """Leave out what was measured until now."""
        self._next = max((record.number + 1 for record in self.telemetry.steps), default=self._next)


def expected_ns(record: StepRecord) -> int:
    """Nanoseconds of this rank's passes by the cost model, were it of nominal speed."""
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

"""Lost time: the time of a simulated plan beyond perfectly divided compute, in six terms.

The same plan is simulated as it is, without contention, and without contention and copies. *Busy* time is the time in
which a rank copies and computes. The terms are

    pieces      mean busy time without contention and copies, over perfect compute: row tiles and kernels, more where
                documents are cut
    copies      packing and merging of messages
    contention  slowdown of work by transfers, and the margins that work leaves to them
    imbalance   busy time of the busiest rank beyond the mean
    exposed     the rest: waiting for messages, and for ranks that are later in some layer or direction but not in all
    sync        collectives of weights and gradients that no rank hides

They add up: a plan's time is perfect compute plus these six.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, fields

import numpy as np
from numpy.typing import NDArray

from flexcp.plan.plan import Plan
from flexcp.simulator.passes import Rules
from flexcp.simulator.step_parts import Training
from flexcp.simulator.training import simulate

Ints = NDArray[np.int64]
FREE = Rules(contention=False, copy_mbps=0)


@dataclass(frozen=True)
class LostTime:
    """Nanoseconds of each term; see the module."""

    pieces: int
    copies: int
    contention: int
    imbalance: int
    exposed: int
    sync: int

    @classmethod
    def names(cls) -> list[str]:
        return [field.name for field in fields(cls)]

    def shares(self, of: int) -> list[float]:
        """Return every term as a share of ``of``."""
        return [value / of for value in astuple(self)]


def lost_time(plan: Plan, training: Training | None, perfect: int) -> LostTime:
    """Split a plan's time beyond ``perfect`` compute: of a whole step with ``training``, else of attention."""
    total, busy, sync = _times(plan, training, Rules())
    _, calm, _ = _times(plan, training, Rules(contention=False))
    _, bare, _ = _times(plan, training, FREE)
    mean, without, least = (int(each.mean()) for each in (busy, calm, bare))
    most = int(busy.max())
    return LostTime(least - perfect, without - least, mean - without, most - mean, total - sync - most, sync)


def _times(plan: Plan, training: Training | None, rules: Rules) -> tuple[int, Ints, int]:
    """Return the total nanoseconds, the busy ones of each rank, and those of exposed sync."""
    found = simulate(plan, rules=rules, training=training)
    if found.step is not None:
        attention, _, rest, sync = found.step.ranks
        return found.step.total_ns, attention + rest, int(sync.min())
    busy = sum(m.layers * p.compute_ns for m, pair in zip(plan.batch.masks, found.passes, strict=True) for p in pair)
    return found.attention_ns, np.asarray(busy), 0

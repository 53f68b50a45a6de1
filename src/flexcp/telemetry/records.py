"""Records: what is kept of a step and of each of its passes.
A few numbers a slot, and never more than ``PASSES`` passes a step.

A pass has a stamp where it begins, three in every slot (transfers in, next transfers posted, work done) and one at its
end. So the number of stamps says where it is, and the gaps between them say how long it waited, packed and computed. A
rank that needs nobody has one slot without transfers, and only the first and the last stamp.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from flexcp.arrays.totals import imbalance
from flexcp.plan.plan import Plan
from flexcp.telemetry.timestamps import Stamp, gaps, passed

PASSES = 1024
IN_SLOT = ("wait", "pack", "compute")
DOING = ("waits for the transfers of stage {0}", "packs what leaves for stage {1}", "computes slot {0}")

Messages = list[tuple[int, int]]
"""(peer, bytes) of each message."""


class Times(NamedTuple):
    """Nanoseconds this rank's passes waited for transfers, packed and unpacked, and computed."""

    wait: int
    pack: int
    compute: int

    @property
    def total(self) -> int:
        return sum(self)


@dataclass(eq=False)
class PassRecord:
    """One pass: which, its stamps so far, the error that ended it."""

    mask: str
    backward: bool
    number: int
    """Counts the passes of its step."""
    slots: int
    stamp: Callable[[], Stamp]
    on_error: Callable[[PassRecord, BaseException], None]
    stamps: list[Stamp] = field(default_factory=list)
    done: bool = False
    error: str = ""

    def mark(self) -> None:
        self.stamps.append(self.stamp())

    @contextmanager
    def running(self) -> Iterator[None]:
        self.mark()
        try:
            yield
        except BaseException as error:
            self.error = f"{type(error).__name__}: {error}"
            self.on_error(self, error)
            raise
        self.mark()
        self.done = True

    @property
    def name(self) -> str:
        return f"{'backward' if self.backward else 'forward'} {self.mask}"

    def finished(self) -> bool:
        """Whether the device is through with it."""
        return self.done and passed(self.stamps) == len(self.stamps)

    def spans(self) -> list[tuple[int, str]]:
        """(slot, what is done there) of each gap between stamps."""
        if self.done and len(self.stamps) == 2:
            return [(0, "compute")]
        found = [(slot, what) for slot in range(self.slots) for what in IN_SLOT]
        return [*found, (self.slots - 1, "wait")]

    def times(self) -> Times:
        """Sums over the slots the device has passed."""
        totals = dict.fromkeys(IN_SLOT, 0)
        for (_, what), gap in zip(self.spans(), gaps(self.stamps[: passed(self.stamps)]), strict=False):
            totals[what] += gap
        return Times(**totals)

    def reached(self) -> str:
        """Where the device is in this pass, in words."""
        count = passed(self.stamps)
        if self.done and count == len(self.stamps):
            return "done"
        if count == 0:
            return "not begun"
        slot, place = divmod(count - 1, 3)
        if count == 1:
            return "begins"
        if slot < self.slots:
            return DOING[place].format(slot, slot + 1)
        return "waits until all it sent has left"


@dataclass(eq=False)
class StepRecord:
    """One bind: its plan, how long the loop waited for that plan, and its passes."""

    number: int
    plan: Plan
    planning_wait: int
    rank: int | None = None
    """This rank in the group; None until the step's first pass."""
    owner: Callable[[], object] | None = None
    """The step, weakly; None until its first pass."""
    error: str = ""
    count: int = 0
    passes: deque[PassRecord] = field(default_factory=lambda: deque(maxlen=PASSES))
    _messages: dict[tuple[str, bool], list[tuple[Messages, Messages]]] = field(default_factory=dict)

    @cached_property
    def compute_balance(self) -> float:
        """Largest / mean over ranks of area x query heads, masks weighted by their layers."""
        return imbalance(self.plan.work_of_layers())

    @property
    def token_balance(self) -> float:
        """Largest / mean over ranks of kept tokens."""
        return imbalance(self.plan.placement.tokens)

    def messages(self, mask: str, backward: bool) -> list[tuple[Messages, Messages]]:
        """By stage: what this rank sends and receives in a pass, one message a peer."""
        key = (mask, backward)
        if key not in self._messages:
            self._messages[key] = _messages(self.plan, self.rank or 0, mask, backward)
        return self._messages[key]

    def sent_bytes(self) -> int:
        """What this rank sent in the passes kept here, all of which are as the plan says."""
        kept = [self.messages(p.mask, p.backward) for p in list(self.passes) if p.done]
        return sum(size for stages in kept for sends, _ in stages for _, size in sends)

    def times(self) -> Times:
        each = [p.times() for p in list(self.passes)]
        return Times(*(sum(t[i] for t in each) for i in range(3)))


def _messages(plan: Plan, rank: int, mask: str, backward: bool) -> list[tuple[Messages, Messages]]:
    number = [m.name for m in plan.batch.masks].index(mask)
    program = plan.programs[number][backward]
    t, size = program.transfers, program.transfers.bytes(plan.shape)
    found = []
    for stage in range(program.stages):
        sides = []
        for here, there in ((t.source, t.target), (t.target, t.source)):
            mine = (t.stage == stage) & (here == rank) & (there != rank)
            peers = np.unique(there[mine])
            sides.append([(int(p), int(size[mine & (there == p)].sum())) for p in peers])
        found.append((sides[0], sides[1]))
    return found

"""Records: what telemetry remembers of a step and of each of its passes.

A pass is one direction of one attention layer. It runs in slots: each waits for transfers, posts later ones and
computes. A record holds a few numbers per slot, and at most ``PASSES`` passes per step. A pass has a time stamp at its
beginning, three in every slot (transfers arrived, later transfers posted, work done) and one at its end. So the number
of stamps says where the pass is, and the gaps between them say how long it waited, packed and computed. A pass that is
a single kernel launch has only the first and the last stamp.
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
from flexcp.plan.program import Program
from flexcp.telemetry.timestamps import Stamp, gaps, passed

PASSES = 1024
IN_SLOT = ("wait", "pack", "compute")
DOING = ("waits for the transfers of stage {0}", "packs what leaves for stage {1}", "computes slot {0}")

Messages = list[tuple[int, int]]
"""A list with (peer, bytes) of each message."""


class Times(NamedTuple):
    """Nanoseconds that passes of this rank waited for transfers, packed and unpacked messages, and computed."""

    wait: int
    pack: int
    compute: int

    @property
    def total(self) -> int:
        return sum(self)


@dataclass(eq=False)
class PassRecord:
    """One pass (one direction of one attention layer): its stamps so far, and the error that ended it.

    ``mask`` is the mask's name and ``slots`` the number of slots. ``stamp`` takes a time stamp, and ``on_error`` is
    called with this record and the error. ``done`` says that the host has queued the whole pass; ``error`` is empty
    without one.
    """

    mask: str
    backward: bool
    number: int
    """The number of the pass in its step, from 0."""
    slots: int
    stamp: Callable[[], Stamp]
    on_error: Callable[[PassRecord, BaseException], None]
    stamps: list[Stamp] = field(default_factory=list)
    done: bool = False
    error: str = ""

    def mark(self) -> None:
        """Append a time stamp: on a GPU an event that is queued, not the time of this call.

        The docstring of this module says at which points of a pass this is called.
        """
        self.stamps.append(self.stamp())

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run a pass inside this context: take its first and last stamp, and record its error."""
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
        """Return whether the device has finished the pass."""
        return self.done and passed(self.stamps) == len(self.stamps)

    def spans(self) -> list[tuple[int, str]]:
        """Return (slot, activity) of each gap between the stamps of a complete pass.

        An activity is one of ``IN_SLOT``.
        """
        if self.done and len(self.stamps) == 2:
            return [(0, "compute")]
        found = [(slot, what) for slot in range(self.slots) for what in IN_SLOT]
        return [*found, (self.slots - 1, "wait")]

    def times(self) -> Times:
        """Return the times of the pass, summed over the gaps between stamps that the device has reached."""
        totals = dict.fromkeys(IN_SLOT, 0)
        for (_, what), gap in zip(self.spans(), gaps(self.stamps[: passed(self.stamps)]), strict=False):
            totals[what] += gap
        return Times(**totals)

    def reached(self) -> str:
        """Describe in words how far the device is in this pass."""
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
    """One step: its plan and its last passes.

    ``number`` counts the steps of this telemetry from 0. ``planning_wait`` is how many nanoseconds the training loop
    waited for the plan. ``error`` is the error of binding the plan, empty if there was none, and ``count`` the number
    of passes so far.
    """

    number: int
    plan: Plan
    planning_wait: int
    rank: int | None = None
    """This rank in the group; None until the step's first pass."""
    owner: Callable[[], object] | None = None
    """A weak reference to the step; None until its first pass."""
    error: str = ""
    count: int = 0
    passes: deque[PassRecord] = field(default_factory=lambda: deque(maxlen=PASSES))
    _messages: dict[tuple[str, bool], list[tuple[Messages, Messages]]] = field(default_factory=dict)

    @cached_property
    def compute_balance(self) -> float:
        """Largest / mean work of the ranks, in (query, key) pairs x query heads over all layers."""
        return imbalance(self.plan.work_of_layers())

    @property
    def token_balance(self) -> float:
        """Largest / mean number of tokens that the ranks keep."""
        return imbalance(self.plan.placement.tokens)

    def messages(self, mask: str, backward: bool) -> list[tuple[Messages, Messages]]:
        """Return, for each stage of a pass, the messages that this rank sends and those that it receives.

        A stage is the transfers that one slot waits for. There is at most one message per peer and direction.
        """
        key = (mask, backward)
        if key not in self._messages:
            self._messages[key] = _messages(self.plan, self.rank or 0, mask, backward)
        return self._messages[key]

    def ahead(self, mask: str, backward: bool) -> list[int]:
        """Return how many slots ahead of its own slot each stage of a pass is posted, as the plan says."""
        ahead: list[int] = _program(self.plan, mask, backward).execution.ahead.tolist()
        return ahead

    def sent_bytes(self) -> int:
        """Return the bytes that this rank sent in the finished passes of this record, according to the plan."""
        kept = [self.messages(p.mask, p.backward) for p in list(self.passes) if p.done]
        return sum(size for stages in kept for sends, _ in stages for _, size in sends)

    def times(self) -> Times:
        """Return the times of all passes of this record, summed up."""
        each = [p.times() for p in list(self.passes)]
        return Times(*(sum(t[i] for t in each) for i in range(3)))


def _program(plan: Plan, mask: str, backward: bool) -> Program:
    """Return a plan's program for the mask of this name and one direction."""
    return plan.programs[[m.name for m in plan.batch.masks].index(mask)][backward]


def _messages(plan: Plan, rank: int, mask: str, backward: bool) -> list[tuple[Messages, Messages]]:
    """Return, for each stage, the messages that a rank sends and those that it receives; ``mask`` is a name."""
    program = _program(plan, mask, backward)
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

"""Collectives: what the ranks of a group tell each other outside attention,
every call with a time limit and the name of its place.

Rows that change ranks (``step.roll``), sums and gathers are exchanges of one stage
(:mod:`flexcp.executor.exchange.transports`): they wait, fail and explain themselves as attention's do. On the host a
sum or a gather is made of messages between pairs too, because those say who is missing, and leave no thread of the
transport behind that would wait on. On a device they are the group's own collectives, queued like any other work;
nothing waits on the host there.

The n-th call of a place is the same call on all ranks. Places count for themselves: a rank that has nothing to exchange
in one may leave it out.
"""

from __future__ import annotations

import pickle
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flexcp.executor.exchange.arena import Buffers
from flexcp.executor.exchange.failure_notes import FailureNotes, grace_of
from flexcp.executor.exchange.rank_calls import Call, MessageRange
from flexcp.executor.exchange.transports import Wire, packed_tag, transport_for


@dataclass(frozen=True)
class Occasion:
    """The n-th call of a place, in the step of this number (0: of no step)."""

    place: str
    number: int
    step: int

    def tag(self, stage: int, call: int) -> int:
        """As :meth:`flexcp.executor.exchange.transports.PassLabel.tag`, apart from all passes."""
        return packed_tag(((1, 1), (self.step, 5), (self.number, 10), (zlib.crc32(self.place.encode()), 15)))

    @property
    def stamp(self) -> int:
        """As :meth:`flexcp.executor.exchange.transports.PassLabel.stamp`, apart from all passes."""
        return packed_tag(((1, 1), (self.step, 14), (self.number, 16), (zlib.crc32(self.place.encode()), 32)))

    def where(self, stage: int) -> str:
        """For an error."""
        return str(self)

    def __str__(self) -> str:
        return f"{self.place} (call {self.number}{f' of step {self.step}' if self.step else ''})"


class Collectives:
    """The ranks of one group, or one rank alone; ``step`` is the number of the bind, the same on all ranks, or 0."""

    def __init__(self, group: dist.ProcessGroup | None, timeout: timedelta, step: int = 0) -> None:
        self.group, self.timeout, self.step = group, timeout, step
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)
        self.notes = None if group is None else FailureNotes(group, step, self.rank)
        self.failure: str | None = None
        self._calls: Counter[str] = Counter()
        self._warned = False

    @property
    def others(self) -> list[int]:
        """All ranks but this one, from the next on, so that they do not all begin with the same one."""
        return [(self.rank + i) % self.size for i in range(1, self.size)]

    def wire(self, sent: list[int]) -> Wire:
        """What an exchange talks over; ``sent`` counts the bytes to each rank. Refused after a failure."""
        self.check_usable()
        if self._warned and self.notes is not None:
            self.notes.withdraw(grace_of(self.timeout))
            self._warned = False
        return Wire(self.group, sent, self.timeout, self.notes, self._fail)

    def check_usable(self) -> None:
        """Raise after an exchange that broke off."""
        if self.failure is not None:
            what = "this step" if self.step else "this group"
            raise RuntimeError(
                f"{what} is unusable since an earlier failure; make a new group and bind again. {self.failure}"
            )

    @contextmanager
    def checking(self, place: str) -> Iterator[None]:
        """Around what is checked before an exchange: the ranks that wait
        for this one then learn why it does not come.
        """
        try:
            yield
        except Exception as error:
            if self.notes is not None and self.failure is None:
                self.notes.leave(f"{place} ended with {error!r}", None, grace_of(self.timeout))
                self._warned = True
            raise

    def exchange(self, place: str, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]) -> None:
        """Send tensors to ranks and fill those that come from ranks. Empty ones do not travel."""
        self._calls[place] += 1
        leaving, arriving = ({peer: x for peer, x in side.items() if x.numel()} for side in (sends, receives))
        if not leaving and not arriving:
            return
        parts = [tuple(MessageRange(p, 0, x.nbytes) for p, x in side.items()) for side in (arriving, leaving)]
        kind = transport_for(next(iter((leaving or arriving).values())).device)
        occasion = Occasion(place, self._calls[place], self.step)
        with kind(self.wire([0] * self.size), occasion, ((Call(0, parts[0], parts[1]),),)) as exchange:
            exchange.post(0, Buffers.holding(leaving), Buffers.holding(arriving))
            exchange.arrived(0)
            exchange.finish()

    def gathered(self, place: str, x: Tensor) -> list[Tensor]:
        """A tensor of every rank, all of one shape and dtype, in rank order."""
        if self.size == 1:
            return [x]
        x = x.contiguous()
        found = [x if rank == self.rank else torch.empty_like(x) for rank in range(self.size)]
        if not transport_for(x.device).own_collectives:
            self.exchange(place, dict.fromkeys(self.others, x), {rank: found[rank] for rank in self.others})
        else:
            self.check_usable()
            found[self.rank] = torch.empty_like(x)
            dist.all_gather(found, x, group=self.group)
        return found

    def summed(self, place: str, x: Tensor) -> Tensor:
        """The sum of every rank's tensor, added in rank order on the host."""
        if self.size == 1:
            return x
        if not transport_for(x.device).own_collectives:
            parts = self.gathered(place, x)
            total = parts[0].clone()
            for part in parts[1:]:
                total += part
            return total
        self.check_usable()
        total = x.clone()
        dist.all_reduce(total, group=self.group)
        return total

    def told(self, place: str, value: Any, device: torch.device) -> list[Any]:
        """What every rank says, in rank order: picklable values, which travel by way of ``device``."""
        if self.size == 1:
            return [value]
        if transport_for(device).own_collectives:
            self.check_usable()
            told: list[Any] = [None] * self.size
            dist.all_gather_object(told, value, group=self.group)
            return told
        mine = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        sizes = [int(size) for size in self.gathered(f"{place}, sizes", torch.tensor(len(mine)))]
        found = {rank: torch.empty(sizes[rank], dtype=torch.uint8) for rank in self.others}
        self.exchange(place, dict.fromkeys(self.others, mine), found)
        found[self.rank] = mine
        return [pickle.loads(found[rank].numpy().tobytes()) for rank in range(self.size)]

    def _fail(self, reason: str) -> None:
        self.failure = self.failure or reason

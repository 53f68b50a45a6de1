"""Transports: messages between ranks, as bytes. What is in them is :mod:`flexcp.executor.run.packing`'s job.

:class:`Exchange` is what a transport must do; :class:`DeviceExchange` (NCCL) and :class:`HostExchange` (gloo) are the
two there are, and :func:`transport_for` is the one place that chooses. A new transport is a third class and a line of
that function.

A stage's messages leave in the calls of :mod:`flexcp.executor.exchange.rank_calls`. Receives and sends of a call are
posted together and never wait for each other, and every rank posts calls in the same order, so no order of arrival can
deadlock. Receives come first: on gloo two ranks that send to each other get only half of a link otherwise (measured,
benchmarks/box.py).

Several stages may be under way at once: a stage is posted as many slots ahead as the plan says, and stages are posted
in order. Who asks for what arrived in a stage waits for all messages of its own in it, those it sends too: a grouped
call of NCCL's is over when all its transfers are, and CPU ranks do the same.

On a device (NCCL) the calls of a stage are queued one after the other and nothing waits on the host: a handle's
``wait()`` only orders the current stream after the transfer, and memory is kept until then, so the allocator may reuse
it in stream order. Who is late is NCCL's own watchdog's to say. NCCL has no tags, so the first message of a pass to a
peer is preceded by a *stamp*, 8 bytes that say which pass it is. The device compares the stamps of a stage with its own
pass before anything reads what came, and stops at an assertion where they differ: ranks that make different calls of
the same sizes never compute with each other's bytes. The host hears of it at its next synchronisation.

On the host (gloo) the transport's own thread moves the bytes of a call while this one computes. Where a stage has
several calls, a thread of ours waits for each before it posts the next. Every wait has a time limit; one that fails
says which rank was waited for and in which stage, and asks the others why
(:mod:`flexcp.executor.exchange.failure_notes`). A message carries the number of its pass in its tag, so ranks that make
different calls wait in vain instead of taking each other's bytes: gloo fills a longer receive with a shorter message
and says nothing.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import ClassVar, Protocol, Self

import torch
import torch.distributed as dist
from torch import Tensor

from flexcp.executor.exchange.arena import Buffers
from flexcp.executor.exchange.failure_notes import FailureNotes, grace_of
from flexcp.executor.exchange.rank_calls import Call, MessageRange


class ExchangeError(RuntimeError):
    """A rank did not send or take in what the plan says; the message names it and the stage."""


class Subject(Protocol):
    """What messages belong to: both sides must agree on it, and errors name it."""

    def tag(self, stage: int, call: int) -> int:
        """What tells messages apart."""

    @property
    def stamp(self) -> int:
        """What tells passes apart, in 63 bits."""

    def where(self, stage: int) -> str:
        """What an error says of a stage."""


def packed_tag(widths: tuple[tuple[int, int], ...]) -> int:
    """A tag of (value, bits) pairs, of each value its lowest bits."""
    found = 0
    for value, bits in widths:
        found = found << bits | value % (1 << bits)
    return found


@dataclass(frozen=True)
class PassLabel:
    """Which pass of which step messages belong to: what both sides must agree on, and what an error says."""

    step: int
    number: int
    mask: int
    mask_name: str
    backward: bool
    stages: int

    def tag(self, stage: int, call: int) -> int:
        """31 bits in which passes, masks, directions, stages and calls differ from their neighbours."""
        widths = ((0, 1), (self.step, 5), (self.number, 10), (self.backward, 1), (self.mask, 3), (stage, 7), (call, 4))
        return packed_tag(widths)

    @property
    def stamp(self) -> int:
        """Step, pass, direction and mask."""
        return packed_tag(((0, 1), (self.step, 24), (self.number, 28), (self.backward, 1), (self.mask, 9)))

    def where(self, stage: int) -> str:
        """For an error."""
        return f"stage {stage} of {self.stages} of {self}"

    def __str__(self) -> str:
        direction = "backward" if self.backward else "forward"
        return f"the {direction} of mask {self.mask_name!r} (pass {self.number} of step {self.step})"


@dataclass(frozen=True)
class Wire:
    """What an exchange talks over: the group (None for one rank), the counter of bytes sent to each rank,
    patience, notes on failures.

    ``failed`` is told the reason when a pass breaks off, for whatever reason: nothing can be exchanged after that.
    """

    group: dist.ProcessGroup | None
    sent: list[int]
    timeout: timedelta
    notes: FailureNotes | None
    failed: Callable[[str], None]


class Exchange:
    """The messages of one pass: ``post`` stages in order, then ask for what ``arrived`` in each; ``finish`` at the end.
    Use as a context manager.
    """

    own_collectives: ClassVar[bool]
    """Whether sums and gathers outside attention are the group's own collectives;
    else they are made of messages between pairs.
    """

    def __init__(self, wire: Wire, this: Subject, calls: tuple[tuple[Call, ...], ...]) -> None:
        self.wire, self.this, self.calls = wire, this, calls
        self._arriving: dict[int, Buffers] = {}

    def post(self, stage: int, sends: Buffers, receives: Buffers) -> None:
        """Start all transfers of a stage."""
        raise NotImplementedError

    def arrived(self, stage: int) -> Buffers | None:
        """Wait until a stage's messages have come and those of this rank have left;
        the former, peer by peer (None: never posted).
        """
        raise NotImplementedError

    def finish(self) -> None:
        """Wait until everything sent has left."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if value is None or self.wire.group is None:  # one rank alone agrees with itself
            return
        reason = str(value) if isinstance(value, ExchangeError) else f"{self.this} ended with {value!r}"
        self.wire.failed(reason)
        if self.wire.notes is not None and not isinstance(value, ExchangeError):
            self.wire.notes.leave(reason, None, grace_of(self.wire.timeout))


class DeviceExchange(Exchange):
    """Calls queued on the device, NCCL's way."""

    own_collectives = True

    def __init__(self, wire: Wire, this: Subject, calls: tuple[tuple[Call, ...], ...]) -> None:
        super().__init__(wire, this, calls)
        self._receiving: dict[int, list[dist.Work]] = {}
        self._sending: list[tuple[dist.Work, Tensor]] = []
        self._stamps: dict[int, list[Tensor]] = {}
        self._own_stamps: list[Tensor] = []
        self._stamped: tuple[set[int], set[int]] = (set(), set())

    def post(self, stage: int, sends: Buffers, receives: Buffers) -> None:
        self._arriving[stage] = receives
        posted = self._receiving.setdefault(stage, [])
        out, into = dict(sends.messages), dict(receives.messages)
        for call in self.calls[stage]:
            operations = self._stamp(stage, call, next(iter((into or out).values())).device)
            operations += [self._operation(dist.irecv, into, part) for part in call.receives]
            operations += [self._operation(dist.isend, out, part) for part in call.sends]
            for part in call.sends:
                self.wire.sent[part.peer] += part.stop - part.start
            try:
                works = dist.batch_isend_irecv(operations)
            except RuntimeError as error:
                raise ExchangeError(f"{self.this.where(stage)}: {error}") from error
            posted += works
            self._sending += [(work, sends.memory) for work in works]

    def arrived(self, stage: int) -> Buffers | None:
        for work in self._receiving.pop(stage, []):
            work.wait()
        for stamps in self._stamps.pop(stage, []):
            torch._assert_async((stamps == self.this.stamp).all(), self._mixed_up(stage))
        return self._arriving.pop(stage, None)

    def finish(self) -> None:
        for work, _ in self._sending:
            work.wait()
        self._sending, self._own_stamps = [], []

    def _stamp(self, stage: int, call: Call, device: torch.device) -> list[dist.P2POp]:
        """Stamps to and from the peers of a call that had none in this pass."""
        new: list[list[int]] = []
        for side, done in zip((call.receives, call.sends), self._stamped, strict=True):
            new.append([peer for peer in dict.fromkeys(part.peer for part in side) if peer not in done])
            done.update(new[-1])
        from_, to = new
        operations = []
        if from_:
            arriving = torch.empty(len(from_), dtype=torch.int64, device=device)
            self._stamps.setdefault(stage, []).append(arriving)
            operations += [self._point(dist.irecv, arriving[i : i + 1], peer) for i, peer in enumerate(from_)]
        if to:
            mine = torch.full((1,), self.this.stamp, dtype=torch.int64, device=device)
            self._own_stamps.append(mine)
            operations += [self._point(dist.isend, mine, peer) for peer in to]
        return operations

    def _mixed_up(self, stage: int) -> str:
        """What the device says when it stops, in the 255 characters it has."""
        return f"flexcp: ranks are out of step: messages of another call arrived in {self.this.where(stage)}"[:255]

    def _point(self, kind: Callable[..., dist.Work | None], message: Tensor, peer: int) -> dist.P2POp:
        return dist.P2POp(kind, message, group=self.wire.group, group_peer=peer)

    def _operation(
        self, kind: Callable[..., dist.Work | None], messages: dict[int, Tensor], part: MessageRange
    ) -> dist.P2POp:
        return self._point(kind, messages[part.peer][part.start : part.stop], part.peer)


@dataclass(frozen=True)
class _Leg:
    """One side of a message: with whom, in which stage, which way."""

    peer: int
    stage: int
    sends: bool


_Legs = list[tuple[_Leg, dist.Work]]


class HostExchange(Exchange):
    """Calls between CPU ranks, every wait with a time limit.
    Tests slow it down by overriding ``send`` and ``receive``.
    """

    own_collectives = False

    def __init__(self, wire: Wire, this: Subject, calls: tuple[tuple[Call, ...], ...]) -> None:
        super().__init__(wire, this, calls)
        self._patience = wire.timeout.total_seconds() - grace_of(wire.timeout)
        self._receiving: dict[int, _Legs] = {}
        self._sending: dict[int, _Legs] = {}
        self._couriers: dict[int, threading.Thread] = {}
        self._waiting_for: dict[int, _Leg] = {}
        self._broken: Exception | None = None

    def post(self, stage: int, sends: Buffers, receives: Buffers) -> None:
        self._arriving[stage] = receives
        self._receiving[stage], self._sending[stage] = [], []
        calls, messages = self.calls[stage], (dict(receives.messages), dict(sends.messages))
        if calls:
            self._post(stage, calls[0], messages)
        if len(calls) > 1:
            courier = self._couriers[stage] = threading.Thread(
                target=self._carry, args=(stage, calls, messages), daemon=True, name="flexcp-calls"
            )
            courier.start()

    def arrived(self, stage: int) -> Buffers | None:
        deadline = time.monotonic() + self._patience
        courier = self._couriers.pop(stage, None)
        if courier is not None:
            courier.join(self._patience)
            if courier.is_alive():  # in a wait of its own, begun before this one; it is left behind
                raise self._error(self._waiting_for[stage], f"not done within {self._patience:g} s")
            if self._broken is not None:
                raise self._broken
        self._wait(self._receiving.pop(stage, []), deadline)
        self._wait(self._sending.pop(stage, []), deadline)
        return self._arriving.pop(stage, None)

    def finish(self) -> None:
        deadline = time.monotonic() + self._patience
        for legs in self._sending.values():
            self._wait(legs, deadline)

    def send(self, message: Tensor, peer: int, tag: int) -> dist.Work:
        """Start to send a message."""
        work = dist.isend(message, group=self.wire.group, tag=tag, group_dst=peer)
        assert work is not None
        return work

    def receive(self, message: Tensor, peer: int, tag: int) -> dist.Work:
        """Start to receive a message."""
        work = dist.irecv(message, group=self.wire.group, tag=tag, group_src=peer)
        assert work is not None
        return work

    def _carry(self, stage: int, calls: tuple[Call, ...], messages: tuple[dict[int, Tensor], ...]) -> None:
        """The courier's way: every call when the one before it is done."""
        try:
            for call in calls[1:]:
                deadline = time.monotonic() + self._patience
                self._wait(self._receiving[stage], deadline)
                self._wait(self._sending[stage], deadline)
                self._post(stage, call, messages)
            self._wait(self._receiving[stage], time.monotonic() + self._patience)
        except Exception as error:  # raised where the pass waits for it
            self._broken = error

    def _post(self, stage: int, call: Call, messages: tuple[dict[int, Tensor], ...]) -> None:
        tag = self.this.tag(stage, call.number)
        receiving, sending = self._receiving[stage], self._sending[stage]
        sides = ((self.receive, call.receives, receiving), (self.send, call.sends, sending))
        for (start, parts, posted), of_peer, sends in zip(sides, messages, (False, True), strict=True):
            for part in parts:
                leg = _Leg(part.peer, stage, sends)
                try:
                    posted.append((leg, start(of_peer[part.peer][part.start : part.stop], part.peer, tag)))
                except RuntimeError as error:
                    raise self._error(leg, str(error)) from error
                if sends:
                    self.wire.sent[part.peer] += part.stop - part.start

    def _wait(self, posted: _Legs, deadline: float) -> None:
        """Until all of these are done, however many they are, before the deadline; they are forgotten then."""
        for leg, work in posted:
            self._waiting_for[leg.stage] = leg
            try:
                work.wait(timedelta(seconds=max(0.01, deadline - time.monotonic())))
            except RuntimeError as error:
                raise self._error(leg, str(error)) from error
        posted.clear()

    def _error(self, leg: _Leg, reason: str) -> ExchangeError:
        """What to raise: who, where, why, and what the others say."""
        wish = f"send to rank {leg.peer}" if leg.sends else f"receive from rank {leg.peer}"
        text = f"could not {wish} in {self.this.where(leg.stage)}"
        limit = f"{self._patience:g} s (of {self.wire.timeout.total_seconds():g} s, the rest is for asking why)"
        # Of gloo's words only the first sentence says something, after the place in its source.
        words = re.sub(r"^\[[^]]*\] ", "", reason).split(". ")[0]
        why = f"nothing within {limit}" if "Timed out" in reason or "not done" in reason else words
        notes, said = self.wire.notes, ""
        if notes is not None:
            grace = grace_of(self.wire.timeout)
            notes.leave(f"{text}: {why}", leg.peer, grace / 2)
            said = f". {notes.explain(leg.peer, grace / 2)}"
        me = "" if notes is None else f"rank {notes.rank} "
        return ExchangeError(
            f"{me}{text}: {why}{said}. The group is broken; end the job, or make a new group and bind again"
        )


def transport_for(device: torch.device, host: type[HostExchange] = HostExchange) -> type[Exchange]:
    """The transport of messages that lie on this device; tests put another ``host``."""
    return host if device.type == "cpu" else DeviceExchange

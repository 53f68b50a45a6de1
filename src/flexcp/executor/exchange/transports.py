"""Transports: send messages between ranks as bytes. :mod:`flexcp.executor.run.packing` fills and reads the messages.

:class:`Exchange` is the interface of a transport. There are two, :class:`DeviceExchange` (NCCL) and
:class:`HostExchange` (gloo), and :func:`transport_for` chooses between them. To add a transport, write a third class
and add it to that function.

The messages of a stage are posted in the calls of :mod:`flexcp.executor.exchange.rank_calls`. The receives and sends of
a call are posted together and never wait for each other, and every rank posts its calls in the same order, so there can
be no deadlock. Receives are posted first: with gloo, two ranks that send to each other otherwise get only half of a
link (measured by benchmarks/box.py).

Several stages may be in flight at once: stages are posted in order, each as many slots ahead as the plan says.
``arrived`` waits for all of a stage's messages that this rank receives or sends: NCCL completes a grouped call as a
whole, and CPU ranks do the same.

On a device (NCCL) the calls of a stage are queued one after the other, and the host never waits: a handle's ``wait()``
only makes the current CUDA stream wait for the transfer. Memory is kept until then, so the allocator may reuse it in
stream order. Late ranks are reported by NCCL's own watchdog. NCCL has no tags, so the first message of a pass to a peer
is preceded by a *stamp*, 8 bytes that identify the pass. Before anything reads the messages of a stage, the device
compares their stamps with its own pass, and stops at an assertion if they differ. So ranks that make different calls of
the same sizes never compute with each other's bytes. The host learns of it at its next synchronisation.

On the host (gloo) the transport's own thread moves the bytes of a call while this thread computes. If a stage has
several calls, another thread, the *courier*, waits for each call before it posts the next. Every wait has a time limit;
on failure the error names the rank and the stage that were waited for, and says why, as far as other ranks left notes
(:mod:`flexcp.executor.exchange.failure_notes`). The tag of a message contains the number of its pass. Ranks that make
different calls therefore time out instead of taking each other's bytes, which gloo would not notice: it silently fills
a longer receive with a shorter message.
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
from flexcp.executor.exchange.grouped_calls import Message, start_together
from flexcp.executor.exchange.rank_calls import Call


class ExchangeError(RuntimeError):
    """A rank did not send or receive what the plan says; the message names the rank and the stage."""


class Subject(Protocol):
    """What an exchange is for: a pass of attention, or a collective call outside attention.

    Both ranks of a message must agree on it, and errors name it.
    """

    def tag(self, stage: int, call: int) -> int:
        """Return the tag of the messages of a stage's call; only gloo uses tags."""

    @property
    def stamp(self) -> int:
        """A number of 63 bits that identifies the pass, or the call outside attention."""

    def where(self, stage: int) -> str:
        """Return a description of a stage for error messages."""


def packed_tag(widths: tuple[tuple[int, int], ...]) -> int:
    """Return a tag made of the lowest bits of each value, given as (value, bits), the first value in the highest bits.

    ``((1, 1), (5, 3))`` gives ``0b1101``.
    """
    found = 0
    for value, bits in widths:
        found = found << bits | value % (1 << bits)
    return found


@dataclass(frozen=True)
class PassLabel:
    """The pass and step that messages belong to; a :class:`Subject`.

    ``number`` is the number of the pass in its step, ``mask`` the index of its mask in the plan, and ``stages`` the
    number of stages of the pass.
    """

    step: int
    number: int
    mask: int
    mask_name: str
    backward: bool
    stages: int

    def tag(self, stage: int, call: int) -> int:
        """Return a tag of 31 bits that tells apart neighbouring steps, passes, directions, masks, stages and calls."""
        widths = ((0, 1), (self.step, 5), (self.number, 10), (self.backward, 1), (self.mask, 3), (stage, 7), (call, 4))
        return packed_tag(widths)

    @property
    def stamp(self) -> int:
        """A number of 63 bits made of step, pass, direction and mask."""
        return packed_tag(((0, 1), (self.step, 24), (self.number, 28), (self.backward, 1), (self.mask, 9)))

    def where(self, stage: int) -> str:
        """Return a description of a stage of this pass for error messages."""
        return f"stage {stage} of {self.stages} of {self}"

    def __str__(self) -> str:
        direction = "backward" if self.backward else "forward"
        return f"the {direction} of mask {self.mask_name!r} (pass {self.number} of step {self.step})"


@dataclass(frozen=True)
class Wire:
    """What an exchange needs to talk to other ranks: the group (None for one rank), and what to do on failure.

    ``sent`` has the bytes sent to each rank so far; exchanges add to it. ``timeout`` limits each wait between CPU
    ranks. ``notes`` are the failure notes of all ranks. ``failed`` is called with the reason when an exchange of
    several ranks ends with any error; nothing can be exchanged after that.
    """

    group: dist.ProcessGroup | None
    sent: list[int]
    timeout: timedelta
    notes: FailureNotes | None
    failed: Callable[[str], None]


class Exchange:
    """The messages of one pass, or of one collective call.

    Use it as a context manager: ``post`` the stages in order, call ``arrived`` for each stage, and ``finish`` at the
    end.
    """

    own_collectives: ClassVar[bool]
    """Whether sums and gathers outside attention use the group's own collectives.

    Otherwise they are made of messages between pairs of ranks.
    """

    def __init__(self, wire: Wire, this: Subject, calls: tuple[tuple[Call, ...], ...]) -> None:
        self.wire, self.this, self.calls = wire, this, calls
        self._arriving: dict[int, Buffers] = {}

    def post(self, stage: int, sends: Buffers, receives: Buffers) -> None:
        """Start all transfers of a stage: send the messages of ``sends`` and fill those of ``receives``."""
        raise NotImplementedError

    def arrived(self, stage: int) -> Buffers | None:
        """Wait until the messages of a stage have arrived and those that this rank sends in it have left.

        Returns the messages that arrived, or None if the stage was never posted. On a GPU only the current CUDA stream
        waits.
        """
        raise NotImplementedError

    def finish(self) -> None:
        """Wait until all messages of this rank have left (on a GPU, only the current CUDA stream waits)."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if value is None or self.wire.group is None:  # a single rank cannot disagree with others
            return
        reason = str(value) if isinstance(value, ExchangeError) else f"{self.this} ended with {value!r}"
        self.wire.failed(reason)
        if self.wire.notes is not None and not isinstance(value, ExchangeError):
            self.wire.notes.leave(reason, None, grace_of(self.wire.timeout))


class DeviceExchange(Exchange):
    """An exchange by NCCL, whose calls are queued on the device."""

    own_collectives = True

    def __init__(self, wire: Wire, this: Subject, calls: tuple[tuple[Call, ...], ...]) -> None:
        super().__init__(wire, this, calls)
        self._posted: dict[int, list[dist.Work]] = {}
        """The handles of stages not waited for yet; callers keep the memory of a stage until it has arrived."""
        self._stamps: dict[int, list[Tensor]] = {}
        self._own_stamp: Tensor | None = None
        self._stamped: tuple[set[int], set[int]] = (set(), set())

    def post(self, stage: int, sends: Buffers, receives: Buffers) -> None:
        self._arriving[stage] = receives
        works: list[dist.Work] = []
        self._posted[stage] = works
        for call in self.calls[stage]:
            into = [(receives.part(part.peer, part.start, part.stop), part.peer) for part in call.receives]
            out = [(sends.part(part.peer, part.start, part.stop), part.peer) for part in call.sends]
            stamps_into, stamps_out = self._stamp(stage, call, (into or out)[0][0].device)
            for part in call.sends:
                self.wire.sent[part.peer] += part.stop - part.start
            try:
                works += start_together(self.wire.group, stamps_into + into, stamps_out + out)
            except RuntimeError as error:
                raise ExchangeError(f"{self.this.where(stage)}: {error}") from error

    def arrived(self, stage: int) -> Buffers | None:
        for work in self._posted.pop(stage, []):
            work.wait()
        for stamps in self._stamps.pop(stage, []):
            torch._assert_async((stamps == self.this.stamp).all(), self._mixed_up(stage))
        return self._arriving.pop(stage, None)

    def finish(self) -> None:
        for works in self._posted.values():
            for work in works:
                work.wait()
        self._posted.clear()

    def _stamp(self, stage: int, call: Call, device: torch.device) -> tuple[list[Message], list[Message]]:
        """Return the stamps to receive and those to send: one for each peer of a call that had none in this pass yet.

        A stamp is a number of 8 bytes that identifies the pass; ``arrived`` compares received ones with this rank's.
        """
        new: list[list[int]] = []
        for side, done in zip((call.receives, call.sends), self._stamped, strict=True):
            new.append([peer for peer in dict.fromkeys(part.peer for part in side) if peer not in done])
            done.update(new[-1])
        from_, to = new
        into: list[Message] = []
        if from_:
            arriving = torch.empty(len(from_), dtype=torch.int64, device=device)
            self._stamps.setdefault(stage, []).append(arriving)
            into = [(stamp, peer) for stamp, peer in zip(arriving.split(1), from_, strict=True)]
        if to and self._own_stamp is None:
            self._own_stamp = torch.full((1,), self.this.stamp, dtype=torch.int64, device=device)
        out = [] if self._own_stamp is None else [(self._own_stamp, peer) for peer in to]
        return into, out

    def _mixed_up(self, stage: int) -> str:
        """Return the message of the device's assertion on a wrong stamp; it may have at most 255 characters."""
        return f"flexcp: ranks are out of step: messages of another call arrived in {self.this.where(stage)}"[:255]


@dataclass(frozen=True)
class _Leg:
    """One posted send or receive: the peer, the stage, and whether it sends."""

    peer: int
    stage: int
    sends: bool


_Legs = list[tuple[_Leg, dist.Work]]


class HostExchange(Exchange):
    """An exchange between CPU ranks, by gloo; every wait has a time limit.

    A failed send or receive raises :class:`ExchangeError`. Tests slow it down by overriding ``send`` and ``receive``.
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
        calls = self.calls[stage]
        if calls:
            self._post(stage, calls[0], sends, receives)
        if len(calls) > 1:
            courier = self._couriers[stage] = threading.Thread(
                target=self._carry, args=(stage, calls, sends, receives), daemon=True, name="flexcp-calls"
            )
            courier.start()

    def arrived(self, stage: int) -> Buffers | None:
        deadline = time.monotonic() + self._patience
        courier = self._couriers.pop(stage, None)
        if courier is not None:
            courier.join(self._patience)
            if courier.is_alive():  # it is still in a wait of its own, and is abandoned
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
        """Start to send a message to a peer, and return the handle to wait for."""
        work = dist.isend(message, group=self.wire.group, tag=tag, group_dst=peer)
        assert work is not None
        return work

    def receive(self, message: Tensor, peer: int, tag: int) -> dist.Work:
        """Start to receive a message from a peer, and return the handle to wait for."""
        work = dist.irecv(message, group=self.wire.group, tag=tag, group_src=peer)
        assert work is not None
        return work

    def _carry(self, stage: int, calls: tuple[Call, ...], sends: Buffers, receives: Buffers) -> None:
        """Post the second and later calls of a stage, each when the one before it is done; runs in a thread of its own.

        Errors are stored, and ``arrived`` raises them.
        """
        try:
            for call in calls[1:]:
                deadline = time.monotonic() + self._patience
                self._wait(self._receiving[stage], deadline)
                self._wait(self._sending[stage], deadline)
                self._post(stage, call, sends, receives)
            self._wait(self._receiving[stage], time.monotonic() + self._patience)
        except Exception as error:  # ``arrived`` raises it
            self._broken = error

    def _post(self, stage: int, call: Call, sends: Buffers, receives: Buffers) -> None:
        """Start all receives and sends of one call."""
        tag = self.this.tag(stage, call.number)
        receiving, sending = self._receiving[stage], self._sending[stage]
        sides = (
            (self.receive, call.receives, receives, receiving, False),
            (self.send, call.sends, sends, sending, True),
        )
        for start, parts, messages, posted, leaves in sides:
            for part in parts:
                leg = _Leg(part.peer, stage, leaves)
                try:
                    message = messages.part(part.peer, part.start, part.stop)
                    posted.append((leg, start(message, part.peer, tag)))
                except RuntimeError as error:
                    raise self._error(leg, str(error)) from error
                if leaves:
                    self.wire.sent[part.peer] += part.stop - part.start

    def _wait(self, posted: _Legs, deadline: float) -> None:
        """Wait until all posted sends or receives are done, at most until the deadline, and empty the list.

        ``deadline`` is a time of ``time.monotonic()``. Raises :class:`ExchangeError` if one fails or takes too long.
        """
        for leg, work in posted:
            self._waiting_for[leg.stage] = leg
            try:
                work.wait(timedelta(seconds=max(0.01, deadline - time.monotonic())))
            except RuntimeError as error:
                raise self._error(leg, str(error)) from error
        posted.clear()

    def _error(self, leg: _Leg, reason: str) -> ExchangeError:
        """Leave a failure note and return the error to raise.

        Its message has the peer, the stage, the reason, and what other ranks' notes say.
        """
        wish = f"send to rank {leg.peer}" if leg.sends else f"receive from rank {leg.peer}"
        text = f"could not {wish} in {self.this.where(leg.stage)}"
        limit = f"{self._patience:g} s (of {self.wire.timeout.total_seconds():g} s, the rest is for asking why)"
        # Keep only the first sentence of gloo's message, without the source location in front of it.
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
    """Return the transport for messages that lie on this device; ``host`` is the one for CPU tensors."""
    return host if device.type == "cpu" else DeviceExchange

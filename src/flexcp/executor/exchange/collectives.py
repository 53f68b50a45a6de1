"""Collectives: what the ranks of a group exchange outside attention, with a time limit and clear errors.

Each call names its *place*, such as ``step.roll``. Moving rows between ranks is an exchange of one stage
(:mod:`flexcp.executor.exchange.transports`), with the same time limits and error messages as attention. On CPU ranks
sums and gathers are made of messages between pairs of ranks too, because these can tell which rank is missing, and
leave no thread of the transport waiting after an error. On a device, sums and gathers are the group's own collectives,
queued like any other work, and the host does not wait.

The n-th call of a place is the same call on all ranks. Each place has its own count, so a rank that has nothing to
exchange in one place may skip it.

Ranks must pass tensors of the same dtype and row size. Where tensors come from the user, CPU ranks first tell each
other theirs (the *form*) and raise if they differ: gloo would fill a longer tensor with a shorter one's bytes, end the
process where a tensor is too short, and read the bytes of one dtype as another. On a device, stamps depend on the form.
"""

from __future__ import annotations

import pickle
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flexcp.executor.exchange.arena import Buffers
from flexcp.executor.exchange.failure_notes import FailureNotes, grace_of
from flexcp.executor.exchange.rank_calls import Call, MessageRange
from flexcp.executor.exchange.transports import Wire, packed_tag, transport_for

FORM_BYTES = 128
"""The length of a message that tells a form; longer ones are cut."""


@dataclass(frozen=True)
class Occasion:
    """One call of a collective: the ``number``-th call of a place such as ``step.roll``, counted from 1.

    ``step`` is the number of the step that the place belongs to, 0 outside of steps. ``form`` describes the tensors, if
    that is known, and ``tells_form`` marks the messages in which CPU ranks tell it. It is a
    :class:`flexcp.executor.exchange.transports.Subject`.
    """

    place: str
    number: int
    step: int
    form: str = ""
    tells_form: bool = False

    def tag(self, stage: int, call: int) -> int:
        """Return a tag of 31 bits for this call's messages, different from the tags of all passes.

        The arguments are unused.
        """
        place = zlib.crc32(self.place.encode())
        return packed_tag(((1, 1), (self.tells_form, 1), (self.step, 5), (self.number, 9), (place, 15)))

    @property
    def stamp(self) -> int:
        """A number of 63 bits that identifies this call and differs from the stamps of all passes."""
        tensors = zlib.crc32(f"{self.place}: {self.form}".encode())
        return packed_tag(((1, 1), (self.step, 14), (self.number, 16), (tensors, 32)))

    def where(self, stage: int) -> str:
        """Return a description of the call for error messages; ``stage`` is unused."""
        return str(self)

    def __str__(self) -> str:
        return f"{self.place} (call {self.number}{f' of step {self.step}' if self.step else ''})"


class Collectives:
    """Exchanges among the ranks of one group, or of a single rank (``group`` is None).

    ``timeout`` is the time limit of each exchange between CPU ranks. ``step`` is the number of the bind, the same on
    all ranks, or 0 outside of steps.
    """

    def __init__(self, group: dist.ProcessGroup | None, timeout: timedelta, step: int = 0) -> None:
        self.group, self.timeout, self.step = group, timeout, step
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)
        self.notes = None if group is None else FailureNotes(group, step, self.rank)
        self.failure: str | None = None
        self._calls: Counter[str] = Counter()
        self._left_note = False

    @property
    def others(self) -> list[int]:
        """All ranks but this one, beginning with the next, so that not all ranks talk to the same one first."""
        return [(self.rank + i) % self.size for i in range(1, self.size)]

    def wire(self, sent: list[int]) -> Wire:
        """Return what an exchange needs to talk to the group; raise RuntimeError after a failure.

        Bytes sent to each rank will be added to ``sent``. A note that :meth:`checking` left is withdrawn first.
        """
        self.check_usable()
        if self._left_note and self.notes is not None:
            self.notes.withdraw(grace_of(self.timeout))
            self._left_note = False
        return Wire(self.group, sent, self.timeout, self.notes, self._fail)

    def check_usable(self) -> None:
        """Raise RuntimeError if an earlier exchange of this group or step failed."""
        if self.failure is not None:
            what = "this step" if self.step else "this group"
            raise RuntimeError(
                f"{what} is unusable since an earlier failure; make a new group and bind again. {self.failure}"
            )

    @contextmanager
    def checking(self, place: str) -> Iterator[None]:
        """Run checks in the ``with`` block; if they raise, leave a note for the ranks that wait for this one.

        The exception passes on. ``place`` names the call in the note.
        """
        try:
            yield
        except Exception as error:
            if self.notes is not None and self.failure is None:
                self.notes.leave(f"{place} ended with {error!r}", None, grace_of(self.timeout))
                self._left_note = True
            raise

    def exchange(self, place: str, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor], form: str = "") -> None:
        """Send the tensors ``sends`` and fill the tensors ``receives``, both by peer; empty tensors are not sent.

        All tensors must be contiguous and on one device. ``form`` describes what they must have in common
        (:func:`row_form`); if it is given, ranks with another form raise ValueError. Raises ExchangeError if a CPU rank
        does not get or send them in time.
        """
        self._calls[place] += 1
        leaving, arriving = ({peer: x for peer, x in side.items() if x.numel()} for side in (sends, receives))
        if not leaving and not arriving:
            return
        occasion = Occasion(place, self._calls[place], self.step, form)
        if form and not transport_for(next(iter((leaving or arriving).values())).device).own_collectives:
            self._compare_forms(occasion, list(leaving), list(arriving))
        self._move(occasion, leaving, arriving)

    def _move(self, occasion: Occasion, leaving: dict[int, Tensor], arriving: dict[int, Tensor]) -> None:
        """Send and receive tensors, all of which have elements."""
        parts = [tuple(MessageRange(p, 0, x.nbytes) for p, x in side.items()) for side in (arriving, leaving)]
        kind = transport_for(next(iter((leaving or arriving).values())).device)
        with kind(self.wire([0] * self.size), occasion, ((Call(0, parts[0], parts[1]),),)) as exchange:
            exchange.post(0, Buffers.holding(leaving), Buffers.holding(arriving))
            exchange.arrived(0)
            exchange.finish()

    def _compare_forms(self, occasion: Occasion, to: list[int], from_: list[int]) -> None:
        """Tell the ranks ``to`` this rank's form; raise ValueError if one of the ranks ``from_`` tells another one."""
        mine = occasion.form.encode()[:FORM_BYTES].ljust(FORM_BYTES)
        told = {peer: torch.empty(FORM_BYTES, dtype=torch.uint8, device="cpu") for peer in from_}
        sent = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        self._move(replace(occasion, tells_form=True), dict.fromkeys(to, sent), told)
        for peer, text in told.items():
            theirs = bytes(text.tolist())
            if theirs != mine:
                reason = (
                    f"rank {peer} passes {theirs.decode(errors='replace').strip()} to {occasion}, and rank {self.rank} "
                    f"{occasion.form}; pass tensors of the same dtype and row size on all ranks"
                )
                self._fail(reason)
                raise ValueError(reason)

    def gathered(self, place: str, x: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks in rank order; they must have the same shape and dtype on all ranks.

        On CPU ranks other tensors raise ValueError.
        """
        return self._gathered(place, x, f"{_dtype(x)} of shape {list(x.shape)}")

    def _gathered(self, place: str, x: Tensor, form: str = "") -> list[Tensor]:
        """Return the tensors of all ranks; CPU ranks compare their forms if one is given."""
        if self.size == 1:
            return [x]
        x = x.contiguous()
        found = [x if rank == self.rank else torch.empty_like(x) for rank in range(self.size)]
        if not transport_for(x.device).own_collectives:
            self.exchange(place, dict.fromkeys(self.others, x), {rank: found[rank] for rank in self.others}, form)
        else:
            self.check_usable()
            found[self.rank] = torch.empty_like(x)
            dist.all_gather(found, x, group=self.group)
        return found

    def summed(self, place: str, x: Tensor) -> Tensor:
        """Return the sum of all ranks' tensors; on CPU ranks they are added in rank order."""
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
        """Return the values of all ranks, in rank order; ``device`` decides by which transport they travel, pickled."""
        if self.size == 1:
            return [value]
        if transport_for(device).own_collectives:
            self.check_usable()
            told: list[Any] = [None] * self.size
            dist.all_gather_object(told, value, group=self.group)
            return told
        mine = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        sizes = [int(size) for size in self._gathered(f"{place}, sizes", torch.tensor(len(mine), device="cpu"))]
        found = {rank: torch.empty(sizes[rank], dtype=torch.uint8, device="cpu") for rank in self.others}
        self.exchange(place, dict.fromkeys(self.others, mine), found)
        found[self.rank] = mine
        return [pickle.loads(found[rank].numpy().tobytes()) for rank in range(self.size)]

    def _fail(self, reason: str) -> None:
        """Record the first failure; the group, or the step, cannot be used after it."""
        self.failure = self.failure or reason


def row_form(x: Tensor) -> str:
    """Return the form of a tensor of rows, whose number may differ between ranks: its dtype and the shape of a row."""
    return f"rows of {_dtype(x)} of shape {list(x.shape[1:])}"


def _dtype(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")

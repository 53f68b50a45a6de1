"""Failure notes: what ranks tell each other through the group's store when something went wrong,
always within a time limit.

A rank that fails leaves one note: whom it waited for, if anybody, and what happened. A rank that waits in vain for a
peer looks whether the peer left a note, then whether the one blamed there did, and so finds the rank where the trouble
began. That one left none, because it died or stands still, or blames somebody who waits for it, because ranks made
different calls.

The store may live in the very process that stands still, and then answers nothing, ever. So every question is asked in
a thread that may be left behind.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")
GRACE_SECONDS = 2.0
"""Of a time limit, up to a quarter and no more than this is kept for asking why."""

ASK_EVERY_SECONDS = 0.05


def grace_of(timeout: timedelta) -> float:
    """Seconds that are kept for notes."""
    return min(GRACE_SECONDS, timeout.total_seconds() / 4)


def within(seconds: float, function: Callable[[], T]) -> T:
    """The function's result or exception; TimeoutError when it takes longer than so many seconds,
    and it is left behind then.
    """
    found: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            found.append(function())
        except BaseException as error:  # handed over
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True, name="flexcp-store")
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not found:
        raise TimeoutError(f"no answer within {seconds:g} s")
    return found[0]


def through_store(timeout: timedelta, function: Callable[[], T]) -> T:
    """What a function finds in the group's store; RuntimeError when the store itself stands still.

    It has a second more than its own limit, because its own message says more.
    """
    try:
        return within(timeout.total_seconds() + 1, function)
    except TimeoutError as error:
        raise RuntimeError(
            f"the group's store does not answer within {timeout.total_seconds():g} s: the process that keeps it (often "
            "rank 0's) died or stands still"
        ) from error


@dataclass(frozen=True)
class FailureNotes:
    """The notes of one step's ranks."""

    group: dist.ProcessGroup
    step: int
    rank: int

    def leave(self, text: str, blamed: int | None, seconds: float) -> None:
        """Say what happened here; a store that cannot be reached is no reason for another error."""
        note = json.dumps({"text": text, "blamed": blamed})
        try:
            within(seconds, lambda: self.group.get_group_store().set(self._key(self.rank), note))
        except (TimeoutError, RuntimeError):
            return

    def withdraw(self, seconds: float) -> None:
        """Take back what was said: the rank goes on after all."""
        try:
            within(seconds, lambda: self.group.get_group_store().delete_key(self._key(self.rank)))
        except (TimeoutError, RuntimeError):
            return

    def explain(self, blamed: int, seconds: float) -> str:
        """What the ranks say, from the blamed one on, until one that says nothing or blames nobody."""
        deadline = time.monotonic() + seconds
        said: list[str] = []
        asked = [self.rank]
        while True:
            if blamed in asked:
                said.append("They wait for each other: the ranks made different calls, or made them in another order")
                break
            asked.append(blamed)
            try:
                note = self._read(blamed, max(0.05, deadline - time.monotonic()))
            except (TimeoutError, RuntimeError):
                said.append(
                    f"What rank {blamed} says is unknown, because the group's store does not answer: the process that "
                    "keeps it, often rank 0's, died or stands still"
                )
                break
            if note is None:
                said.append(f"Rank {blamed} left no word: it died, stands still, or is in another call")
                break
            said.append(f"Rank {blamed} says: {note['text']}")
            if note["blamed"] is None:
                break
            blamed = int(note["blamed"])
        return ". ".join(said)

    def _read(self, rank: int, seconds: float) -> dict[str, Any] | None:
        key = self._key(rank)

        def read() -> dict[str, Any] | None:
            store, deadline = self.group.get_group_store(), time.monotonic() + seconds
            while not store.check([key]):  # the store's own wait complains on stderr
                if time.monotonic() > deadline:
                    return None
                time.sleep(ASK_EVERY_SECONDS)
            note: dict[str, Any] = json.loads(store.get(key))
            return note

        return within(seconds + 0.1, read)

    def _key(self, rank: int) -> str:
        return f"flexcp/note/{self.step}/{rank}"

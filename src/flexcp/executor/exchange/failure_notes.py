"""Failure notes: what ranks tell each other through the group's store after a failure.

A rank that fails leaves one note: what happened, and the rank it was waiting for, if any (the *blamed* rank). A rank
that waited in vain for a peer reads the peer's note, then the note of the rank blamed there, and so on, until it finds
the rank where the trouble began. That rank either left no note, because it died or hangs, or is blamed in a circle,
because ranks made different calls.

The store may live in the process that hangs, and then it never answers. So every access to the store runs in a thread
with a time limit, which is abandoned if it takes longer.
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
from torch._C._distributed_c10d import Store

T = TypeVar("T")
GRACE_SECONDS = 2.0
"""The most seconds of a time limit that are reserved for reading notes, unless a quarter of the limit is less."""

ASK_EVERY_SECONDS = 0.05


def grace_of(timeout: timedelta) -> float:
    """Return the seconds of a time limit that are reserved for reading notes."""
    return min(GRACE_SECONDS, timeout.total_seconds() / 4)


def within(seconds: float, function: Callable[[], T]) -> T:
    """Call the function in a thread and return its result or raise its exception.

    If it takes longer than ``seconds``, the thread is abandoned and TimeoutError is raised.
    """
    found: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            found.append(function())
        except BaseException as error:  # raised in the calling thread
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
    """Call a function that uses the group's store, and return its result.

    Raises RuntimeError if the store fails or does not answer; other exceptions of the function pass through. The
    function has a second more than ``timeout``, so that its own timeout, whose message says more, comes first.
    """
    try:
        return within(timeout.total_seconds() + 1, function)
    except TimeoutError as error:
        raise RuntimeError(
            f"the group's store does not answer within {timeout.total_seconds():g} s: the process that keeps it (often "
            "rank 0's) died or stands still"
        ) from error
    except dist.DistError as error:  # the store's own: its disk is full, or its process is gone
        raise RuntimeError(
            f"the group's store failed: {str(error).partition(chr(10))[0]}; look after the process or the disk that "
            "keeps it, and start all ranks again"
        ) from error


def wait_for(store: Store, keys: list[str], limit: timedelta) -> None:
    """Wait until all ``keys`` are in the store; raise DistStoreError, whatever the store, if they are not in time."""
    _store_error(lambda: store.wait(keys, limit))


def read_key(store: Store, key: str) -> bytes:
    """Return the value of a key of the store; raise DistError, whatever the store, if it has none or fails."""
    return _store_error(lambda: store.get(key))


def _store_error(call: Callable[[], T]) -> T:
    """Call the store, and turn a bare RuntimeError into DistStoreError.

    Torch's FileStore raises RuntimeError("Wait timeout") where other stores raise DistStoreError, and callers could not
    tell it from their own messages, which are RuntimeErrors too.
    """
    try:
        return call()
    except dist.DistError:
        raise
    except RuntimeError as error:
        raise dist.DistStoreError(str(error)) from error


@dataclass(frozen=True)
class FailureNotes:
    """The notes that the ranks of one step leave in the group's store; ``rank`` is this rank."""

    group: dist.ProcessGroup
    step: int
    rank: int

    def leave(self, text: str, blamed: int | None, seconds: float) -> None:
        """Write this rank's note; do nothing if the store fails or does not answer within ``seconds``.

        ``text`` says what happened, and ``blamed`` is the rank that this one was waiting for, if any.
        """
        note = json.dumps({"text": text, "blamed": blamed})
        try:
            within(seconds, lambda: self.group.get_group_store().set(self._key(self.rank), note))
        except (TimeoutError, RuntimeError):
            return

    def withdraw(self, seconds: float) -> None:
        """Delete this rank's note, because the rank goes on after all; give up after ``seconds``."""
        try:
            within(seconds, lambda: self.group.get_group_store().delete_key(self._key(self.rank)))
        except (TimeoutError, RuntimeError):
            return

    def explain(self, blamed: int, seconds: float) -> str:
        """Return, as text, the notes of rank ``blamed``, of the rank that it blames, and so on.

        The chain ends at a rank that left no note or blames none, or when ranks blame each other in a circle. Notes are
        waited for up to ``seconds`` in all.
        """
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
        """Return the note of a rank, waiting up to ``seconds`` for it; None if there is none by then.

        Raises TimeoutError or RuntimeError if the store does not answer or fails.
        """
        key = self._key(rank)

        def read() -> dict[str, Any] | None:
            store, deadline = self.group.get_group_store(), time.monotonic() + seconds
            while not store.check([key]):  # store.wait would print a warning to stderr
                if time.monotonic() > deadline:
                    return None
                time.sleep(ASK_EVERY_SECONDS)
            note: dict[str, Any] = json.loads(store.get(key))
            return note

        return within(seconds + 0.1, read)

    def _key(self, rank: int) -> str:
        return f"flexcp/note/{self.step}/{rank}"

"""A watch that ends all ranks soon after one of them fails, with one line that names the failed rank.

Every rank writes its current step to the store. A thread watches three things: the time limit, a signal to stop
(torchrun sends one when another rank of the host died), and once a second whether another rank has reported trouble.
When one of them happens, or the work raises, the rank writes a last *word* to the store and waits a moment for the
words of the others. Ranks that left no word died or hang; if all left one, the rank whose trouble came first is blamed.
The lowest rank that left a word prints the line, and all ranks exit.

The thread has its own connection to the store, because the work may be blocked on the other one.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any, Self

from torch._C._distributed_c10d import Store

from flexcp.executor.exchange.failure_notes import within
from flexcp.measure.accept.rank_cards import ASK_EVERY_SECONDS, rank_words

LOOK_EVERY_SECONDS = 1.0
GRACE_SECONDS = 5.0
"""How many seconds to wait for the last words of other ranks."""


@dataclass(frozen=True)
class Word:
    """A rank's last message: number and name of its step, what happened, and whether the error was its own."""

    number: int
    step: str
    what: str
    own: bool


class Watch:
    """Watches the steps of this rank, and ends all ranks if one fails; used as a context manager around the steps.

    A step may take ``step_seconds`` and all of them ``all_seconds``. If a rank fails, ``tell`` is called on one rank
    with a line that names the failed one, and ``leave`` with the exit status on all. ``store`` connects the ranks.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        ranks: int,
        step_seconds: float,
        all_seconds: float,
        tell: Callable[[str], None],
        leave: Callable[[int], Any] = os._exit,
    ) -> None:
        self.store: Store = store.clone()  # type: ignore[attr-defined]
        self.rank, self.ranks = rank, ranks
        self.step_seconds, self.tell, self.leave = step_seconds, tell, leave
        self.names: Mapping[int, str] = {}
        """Names of the ranks for messages, set once their hosts are known."""
        self._last = time.monotonic() + all_seconds
        self._number, self._step, self._deadline = 0, "start", self._last
        self._ending, self._done = threading.Lock(), threading.Event()
        self._signals, self._writes = socket.socketpair()
        self._thread = threading.Thread(target=self._look, daemon=True, name="flexcp-watch")

    def begin(self, step: str) -> None:
        """Begin the next step, which has its own time limit."""
        self._number, self._step = self._number + 1, step
        self._deadline = min(self._last, time.monotonic() + self.step_seconds)
        self.store.set(f"at/{self.rank}", json.dumps([self._number, step]))

    def failed(self, what: str) -> None:
        """Report that something went wrong on this rank, and end all ranks."""
        self._end(what, own=True)

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            # Python runs signal handlers only between its own instructions, and the work may be blocked inside a
            # library. The wakeup descriptor reaches the thread at once.
            self._writes.setblocking(False)
            signal.signal(signal.SIGTERM, lambda *_: None)
            signal.set_wakeup_fd(self._writes.fileno())
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(value, Exception):
            self.failed(f"{type(value).__name__}: {' '.join(str(value).split())}")
        self._done.set()
        if threading.current_thread() is threading.main_thread():
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _look(self) -> None:
        """Watch for a signal to stop, the time limit and trouble of other ranks until the end; runs in a thread."""
        while not self._done.is_set():
            told, _, _ = select.select([self._signals], [], [], LOOK_EVERY_SECONDS)
            if self._done.is_set():
                return
            if told and signal.SIGTERM in self._signals.recv(64):
                self._end("was told to stop", own=False)
            elif time.monotonic() > self._deadline:
                self._end("ran out of time", own=False)
            elif self._trouble() is not None:
                self._end("heard of trouble", own=False)

    def _trouble(self) -> int | None:
        """Return the rank whose trouble came first; None if there is none, or the store does not answer."""
        try:
            return within(
                GRACE_SECONDS, lambda: int(self.store.get("trouble")) if self.store.check(["trouble"]) else None
            )
        except (TimeoutError, RuntimeError):
            return None

    def _end(self, what: str, own: bool) -> None:
        """Agree with the other ranks on a line that names the failed rank, let one rank print it, and leave."""
        if not self._ending.acquire(blocking=False):
            self._done.wait()  # another thread is already ending
            return
        try:
            line, teller = within(4 * GRACE_SECONDS, lambda: self._agreed(Word(self._number, self._step, what, own)))
        except (TimeoutError, RuntimeError):
            line, teller = (
                f"the store does not answer in step {self._step!r} (rank {self.rank} {what}): the process that keeps "
                "it, torchrun's on the first host, died or stands still; see that host's log",
                True,
            )
        try:
            if teller:
                self.tell(line)
                with suppress(TimeoutError, RuntimeError):
                    within(GRACE_SECONDS, lambda: self.store.set("told", line))
        finally:  # also where the line cannot be printed, because nobody reads the pipe any more
            self._done.set()
            self.leave(1)

    def _agreed(self, word: Word) -> tuple[str, bool]:
        """Return the line to print, and whether this rank prints it; if another rank does, wait until it has."""
        self.store.set(f"word/{self.rank}", json.dumps(asdict(word)))
        first = int(self.store.compare_set("trouble", "", str(self.rank)))
        words = self._words()
        line = blame(words, self._places(), self.ranks, first, self.names, self.step_seconds)
        if self.rank != min(words):
            deadline = time.monotonic() + GRACE_SECONDS
            while not self.store.check(["told"]) and time.monotonic() < deadline:
                time.sleep(ASK_EVERY_SECONDS)
            return line, False
        return line, True

    def _words(self) -> dict[int, Word]:
        """Return the last words of all ranks, or of those that left one within ``GRACE_SECONDS``."""
        deadline = time.monotonic() + GRACE_SECONDS
        found: dict[int, Word] = {}
        while True:
            for rank in set(range(self.ranks)) - set(found):
                if self.store.check([f"word/{rank}"]):
                    found[rank] = Word(**json.loads(self.store.get(f"word/{rank}")))
            if len(found) == self.ranks or time.monotonic() > deadline:
                return found
            time.sleep(ASK_EVERY_SECONDS)

    def _places(self) -> dict[int, tuple[int, str]]:
        """Return the number and name of the step that each rank wrote last."""
        keys = {rank: f"at/{rank}" for rank in range(self.ranks)}
        return {rank: tuple(json.loads(self.store.get(key))) for rank, key in keys.items() if self.store.check([key])}


def blame(
    words: Mapping[int, Word],
    places: Mapping[int, tuple[int, str]],
    ranks: int,
    first: int,
    names: Mapping[int, str],
    seconds: float,
) -> str:
    """Return one line that names the failed rank, what happened to it, and what to do.

    ``words`` are the last words of ranks, and ranks without one died or hang. ``places`` are (number, name) of the step
    that each rank began last, ``first`` is the rank whose trouble came first, and ``seconds`` the time limit of a step.
    """
    silent = [rank for rank in range(ranks) if rank not in words]
    if silent:
        who, one = _who(silent, names), len(silent) == 1
        if silent[0] not in places:
            return (
                f"{who} of {ranks} did not come; see that torchrun runs on every host with the same --nnodes, "
                "--nproc-per-node and --rdzv-endpoint"
            )
        hosts = "that host" if one else "those hosts"
        return (
            f"{who} died or {'stands' if one else 'stand'} still in step {places[silent[0]][1]!r}; look at the log, "
            f"dmesg and nvidia-smi of {hosts}, or run without {hosts}"
        )
    word, who = words[first], _who([first], names)
    if word.own:
        return f"{who} failed in step {word.step!r}: {word.what}"
    latest = max(word.number for word in words.values())
    behind = [rank for rank, word in words.items() if word.number < latest]
    if behind:
        return (
            f"{_who(behind, names)} did not get beyond step {words[behind[0]].step!r} in {seconds:g} s; look at that "
            "host, or give more time with --timeout"
        )
    way = f"give more time than {seconds:g} s with --timeout"
    return f"{who} {word.what} in step {word.step!r}, with all ranks in it; {way}"


def _who(ranks: list[int], names: Mapping[int, str]) -> str:
    return names.get(ranks[0], f"rank {ranks[0]}") if len(ranks) == 1 else rank_words(ranks)

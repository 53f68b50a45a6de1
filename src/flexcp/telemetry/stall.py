"""Stall: a thread that notices when nothing moves.

On gloo a rank that waits too long raises by itself. On NCCL the host never waits: work is queued, the device hangs, and
after its own limit NCCL ends the process without a word about stages. This thread looks, several times within the
limit, at how far the passes got; when one that has begun stays where it is for the whole limit, it says so once, from
outside. It only asks, and never touches the passes.
"""

from __future__ import annotations

import sys
import threading
import traceback
import weakref
from collections.abc import Callable
from time import monotonic
from typing import Any

LOOKS = 4
"""How often the thread looks within the limit."""

Progress = tuple[object, ...]
"""Where things stand; equal when nothing moved. Empty when nothing is under way."""


class StallWatch:
    """Calls ``stalled()`` of its owner once for each place where ``progress()`` stays equal for ``limit`` seconds.

    The owner is held weakly: when it goes, so does the thread.
    """

    def __init__(
        self, owner: Any, limit: float, progress: Callable[[Any], Progress], stalled: Callable[[Any], None]
    ) -> None:
        self._owner, self._limit = weakref.ref(owner), limit
        self._progress, self._stalled = progress, stalled
        self._end = threading.Event()
        threading.Thread(target=self._run, name="flexcp stall watch", daemon=True).start()

    def close(self) -> None:
        self._end.set()

    def _run(self) -> None:
        seen: Progress = ()
        since, told = monotonic(), False
        while not self._end.wait(self._limit / LOOKS):
            owner = self._owner()
            if owner is None:
                return
            now = self._progress(owner)
            if now != seen:
                seen, since, told = now, monotonic(), False
            elif now and not told and monotonic() - since >= self._limit:
                told = True
                self._stalled(owner)
            del owner


def thread_stacks() -> dict[str, list[str]]:
    """What every thread of this process is doing, as lines of text."""
    names = {t.ident: t.name for t in threading.enumerate()}
    return {
        f"{names.get(number, 'unknown')} {number}": [line.rstrip() for line in traceback.format_stack(frame)]
        for number, frame in sys._current_frames().items()
    }

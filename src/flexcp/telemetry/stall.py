"""Stall: a thread that notices when passes make no progress.

With gloo, a rank that waits too long raises an error itself. With NCCL the host does not wait: work is queued, the
device hangs, and after its own time limit NCCL ends the process without saying in which stage it hung. This thread
checks the progress of passes several times within its limit. If a pass that has begun makes no progress for the whole
limit, the thread reports it once. It only reads the records and never touches the passes.
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
"""How often the thread checks the progress within the limit."""

Progress = tuple[object, ...]
"""How far the passes are: equal values mean that nothing moved, an empty one that no pass is under way."""


class StallWatch:
    """A thread that calls ``stalled(owner)`` when ``progress(owner)`` has not changed for ``limit`` seconds.

    It calls once per stall, and again only after there was progress. If ``progress(owner)`` is empty, nothing is under
    way, and that is never a stall. The thread holds only a weak reference to ``owner``. It ends when the owner is
    garbage-collected, or with :meth:`close`.
    """

    def __init__(
        self, owner: Any, limit: float, progress: Callable[[Any], Progress], stalled: Callable[[Any], None]
    ) -> None:
        self._owner, self._limit = weakref.ref(owner), limit
        self._progress, self._stalled = progress, stalled
        self._end = threading.Event()
        threading.Thread(target=self._run, name="flexcp stall watch", daemon=True).start()

    def close(self) -> None:
        """Stop the thread."""
        self._end.set()

    def _run(self) -> None:
        """Check the progress until the watch is closed or its owner is collected."""
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
    """Return the stack of every thread of this process as lines of text, by name and number of the thread."""
    names = {t.ident: t.name for t in threading.enumerate()}
    return {
        f"{names.get(number, 'unknown')} {number}": [line.rstrip() for line in traceback.format_stack(frame)]
        for number, frame in sys._current_frames().items()
    }

"""Termination: SIGTERM ends a command as Ctrl-C does, so that it ends the processes that it started and removes files.

``timeout``, ``kill`` and container runtimes send SIGTERM to the command alone. Without a handler, ranks and workers
would go on until they next speak with it.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def interrupted_by_sigterm() -> Iterator[list[int]]:
    """Raise KeyboardInterrupt in the ``with`` block at the first SIGTERM; yields a list that its number then enters.

    A second SIGTERM ends the process at once. Ranks of a launcher such as torchrun keep the default: they start no
    processes, and a handler could not run while they wait for each other outside of Python. SIGTERM that is ignored or
    handled already stays so.
    """
    heard: list[int] = []
    if "WORLD_SIZE" in os.environ or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield heard
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        heard.append(number)
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    try:
        yield heard
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

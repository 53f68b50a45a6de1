"""Fork server: processes forked from a server that has imported torch, which Ctrl-C leaves to their parent.

A terminal sends Ctrl-C to every process of a command. Only the parent is to hear it: it ends its children, and says one
line. So the server is started with that signal blocked, which its children inherit. The first start waits for the
server's imports, seconds in which Ctrl-C must count; those after it take milliseconds, during which it is held back, so
that no child is started that nobody knows of.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import ForkServerContext


def server(preload: list[str]) -> ForkServerContext:
    """Where processes are made, its imports done."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(preload)
    with without_interrupt():
        resource_tracker.ensure_running()  # the server would start it, which unblocks the signal
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            forkserver.ensure_running()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
    first = context.Process(target=_nothing, daemon=True)
    try:
        first.start()
        first.join()
    except BaseException:
        _end_server()
        raise
    return context


@contextmanager
def without_interrupt() -> Iterator[None]:
    """Inside, Ctrl-C waits; it counts when this ends. Only the main thread ever hears of it,
    so in others nothing is to be done.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    heard: list[int] = []
    # A blocked signal would not do: any other thread of the process would take it, and the main thread raise all the
    # same.
    before = signal.signal(signal.SIGINT, lambda number, _: heard.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if heard:
            signal.raise_signal(signal.SIGINT)


def _nothing() -> None:
    """What the first process does."""


def _end_server() -> None:
    """The server would go on importing for seconds; the next start makes another."""
    pid = getattr(getattr(forkserver, "_forkserver", None), "_forkserver_pid", None)
    if pid is not None:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

"""A fork server that has imported torch, and whose processes leave Ctrl-C to their parent.

A terminal sends Ctrl-C to every process of a command. Only the parent should react: it stops its children and prints
one line. The server is therefore started with that signal blocked, which its children inherit. The first start waits
some seconds for the server's imports, during which Ctrl-C must work. Later starts take milliseconds, during which
Ctrl-C is delayed, so that no child is started without the parent knowing it.
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
    """Return a context that forks processes from a server which has imported the modules ``preload``.

    The first call waits until the server has imported them.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(preload)
    try:
        with without_interrupt():
            resource_tracker.ensure_running()  # the server would start it otherwise, which unblocks the signal
            before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            try:
                forkserver.ensure_running()
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
        first = context.Process(target=_nothing, daemon=True)
        first.start()
        first.join()
    except BaseException:
        _end_server()
        raise
    return context


@contextmanager
def without_interrupt() -> Iterator[None]:
    """Delay Ctrl-C and SIGTERM until this context ends; outside the main thread, which receives them, do nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    heard: list[int] = []
    # Blocking the signals would not do: another thread of the process would take them, and the main thread would still
    # raise.
    # What was installed by other than Python code cannot be put back, so it is left alone.
    delayed = [each for each in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(each) is not None]
    before = [signal.signal(each, lambda number, _: heard.append(number)) for each in delayed]
    try:
        yield
    finally:
        for each, handler in zip(delayed, before, strict=True):
            signal.signal(each, handler)
        if heard:
            signal.raise_signal(heard[0])


def _nothing() -> None:
    """Do nothing: the first process only waits for the server's imports."""


def _end_server() -> None:
    """Kill the server, which would go on importing for seconds; the next start makes another one."""
    pid = getattr(getattr(forkserver, "_forkserver", None), "_forkserver_pid", None)
    if pid is not None:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

"""Progress: work that takes more than a second shows a spinner on stderr.

The first plan on a machine takes half a minute, because loops are compiled; each loop writes a log record when it is
compiled, and the spinner shows it, so that users see why they wait. No spinner is shown if stderr is not a terminal, or
with ``--quiet``.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

from flexcp.io.terminal_text import visible

if TYPE_CHECKING:
    from rich.console import Console
    from rich.status import Status
    from rich.text import Text

QUIET: ContextVar[bool] = ContextVar("quiet", default=False)
"""``--quiet`` of the running command; set and reset by :mod:`flexcp.cli.shared.command_registry`."""


class Compiling(logging.Handler):
    """A log handler that counts compilations (``count``) and collects the messages of warnings (``complaints``).

    If ``show`` is set, a spinner shows ``text`` and each loop that is compiled.
    """

    def __init__(self, show: bool, text: str | None = None) -> None:
        super().__init__()
        self.show = show
        self.count = 0
        self.complaints: list[str] = []
        self._status: Status | None = None
        self.text = text
        if text is not None:
            self.update(text)

    def update(self, text: str) -> None:
        """Show on the spinner what is being done now."""
        self.text = text
        if self.show:
            self._started(text).update(plain(text))

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.WARNING:
            self.complaints.append(record.getMessage())
            return
        self.count += 1
        if self.show:
            text = f"first time on this machine: {record.getMessage()} (loop {self.count}); kept for the next"
            self._started(text).update(plain(text))

    def _started(self, text: str) -> Status:
        if self._status is None:
            self._status = console().status(plain(text))  # rich is loaded only now; that takes half as long as a plan
            self._status.start()
        return self._status

    def close(self) -> None:
        """Remove the spinner."""
        if self._status is not None:
            self._status.stop()
        super().close()


def quiet() -> bool:
    """Return whether the running command was given ``--quiet``."""
    return QUIET.get()


def say(text: str) -> None:
    """Print a message on stderr, unless the command was given ``--quiet``."""
    if not quiet():
        print(text, file=sys.stderr)


def console() -> Console:
    """Return the console for progress and messages: stderr, or one that prints nothing with ``--quiet``."""
    from rich.console import Console

    return Console(stderr=True, quiet=quiet())


def plain(text: str) -> Text:
    """Return text that rich shows literally, without markup and with control characters made visible."""
    from rich.text import Text

    return Text(visible(text))


@contextmanager
def compiling(text: str | None = None) -> Iterator[Compiling]:
    """Count what flexcp compiles inside the ``with`` block, and show progress; yields the counter.

    A spinner on stderr shows ``text`` (what is being done), and each loop or kernel while it is compiled. Without
    ``text`` it appears only at the first compilation. Nothing is shown if stderr is not a terminal, or with
    ``--quiet``.
    """
    logger, handler = logging.getLogger("flexcp.compile"), Compiling(sys.stderr.isatty() and not quiet(), text)
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield handler
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)
        handler.close()

"""Progress of compilation: what the planners' loops log about themselves, as a spinner on stderr.

The first plan on a machine takes half a minute. Whoever watches a terminal should see why; a pipe sees nothing.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.status import Status


class Compiling(logging.Handler):
    """Counts compilations, collects complaints, and shows the loop at hand while ``show`` is set."""

    def __init__(self, show: bool) -> None:
        super().__init__()
        self.show = show
        self.count = 0
        self.complaints: list[str] = []
        self._status: Status | None = None

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.WARNING:
            self.complaints.append(record.getMessage())
            return
        self.count += 1
        if self.show:
            text = f"first plan on this machine: {record.getMessage()} (loop {self.count}); kept for the next"
            self._started(text).update(text)

    def _started(self, text: str) -> Status:
        if self._status is None:
            from rich.console import Console  # needed only now, and half as slow as a plan

            self._status = Console(stderr=True).status(text)
            self._status.start()
        return self._status

    def close(self) -> None:
        """Take the spinner away."""
        if self._status is not None:
            self._status.stop()
        super().close()


@contextmanager
def compiling() -> Iterator[Compiling]:
    """Inside, compilations are counted, and shown when stderr is a terminal."""
    logger, handler = logging.getLogger("flexcp.compile"), Compiling(sys.stderr.isatty())
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield handler
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)
        handler.close()

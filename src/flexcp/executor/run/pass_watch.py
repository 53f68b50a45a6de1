"""Pass watch: the interface by which telemetry follows one pass.

A pass calls ``mark`` three times in every slot: when the messages of the slot's stage have arrived; when they have been
unpacked and later stages have been packed and posted; and when the slot's work has been queued (on a CPU, done). A
program that is a single launch makes no marks. ``running`` surrounds the whole pass, so its entry and exit are the
start and the end. A mark must not wait for the device.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol


class Watch(Protocol):
    """Follows one pass of one rank."""

    def running(self) -> AbstractContextManager[None]:
        """Return a context that surrounds the whole pass and sees the error that ends it, if any."""

    def mark(self) -> None:
        """Note that the pass reached its next mark."""

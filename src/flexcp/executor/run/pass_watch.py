"""Pass watch: what a pass tells whoever follows it.

A pass calls ``mark`` at fixed places: where it starts, then in every slot once the stage's transfers are in, once the
next stage's are packed and posted, and once the slot's work is queued, and at its end. A mark must not wait for the
device.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol


class Watch(Protocol):
    """Follows one pass."""

    def running(self) -> AbstractContextManager[None]:
        """Around the whole pass; sees the error that ends it."""

    def mark(self) -> None:
        """The pass reached its next mark."""

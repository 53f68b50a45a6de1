"""The progress of long loops on standard error: a bar on a terminal, elsewhere a line every half minute."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Sized
from typing import TypeVar

from rich.console import Console
from rich.progress import track

Item = TypeVar("Item")
SECONDS = 30
"""How long nothing is said, at least, if standard error is no terminal."""


def tracked(items: Iterable[Item], words: str, total: int | None = None) -> Iterator[Item]:
    """Yield the items and show how many are done; ``total`` is their number if they have no length."""
    console = Console(stderr=True)
    if console.is_terminal:
        yield from track(items, words, total, console=console)
        return
    if total is None and isinstance(items, Sized):
        total = len(items)
    said = time.monotonic()
    for number, item in enumerate(items, 1):
        yield item
        if time.monotonic() - said >= SECONDS:
            said = time.monotonic()
            print(f"{words}: {number}" + (f" of {total}" if total else ""), file=sys.stderr, flush=True)

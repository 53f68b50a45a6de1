"""Sizes: format bytes and counts for people."""

from __future__ import annotations


def size(count: float) -> str:
    """Format a number of bytes: ``512 B``, ``1.5 MB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            break
        count /= 1000
    return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"


def count_of(number: int, what: str) -> str:
    """Format a count with its noun: ``1 layer``, ``4,096 layers``."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"

"""Decimals: numbers rounded for messages that also state a verdict on them."""

from __future__ import annotations

MOST_DIGITS = 6
"""The most digits after the point that are printed to tell a number from a limit."""


def beside(limit: float, number: float, digits: int) -> str:
    """Return ``number`` with ``digits`` digits after the point, or with more if it is close to ``limit``.

    More are needed where rounding would put the number on the limit or on its other side: with a limit of 1.08, both
    1.078 and 1.082 would read 1.08, and only one of them is above it.
    """
    for more in range(digits, MOST_DIGITS + 1):
        shown = f"{number:.{more}f}"
        apart = round(float(shown) - limit, MOST_DIGITS)
        if (apart > 0) == (number > limit) and (apart < 0) == (number < limit):
            return shown
    return f"{number:.{digits}f}"

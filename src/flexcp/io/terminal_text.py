"""Terminal text: make names and notes from files and users safe to print in a terminal.

A name can contain characters that control a terminal: escape sequences that move the cursor or colour lines, line
breaks that forge lines of output, marks that change the direction of writing. They are printed as Python escapes, so
that a reader sees them and the terminal ignores them.
"""

from __future__ import annotations

import unicodedata

OBEYED = ("Cc", "Cf", "Zl", "Zp", "Cs")
"""The Unicode categories that are escaped: control, format, line and paragraph separators, lone surrogates."""


def visible(text: str) -> str:
    """Return the text as one line in which characters that control a terminal are escaped."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(_shown(c) if unicodedata.category(c) in OBEYED else c for c in text)


def visible_lines(text: str, indent: str) -> str:
    """Return a text of several lines, such as a traceback, with control characters escaped.

    All lines but the first are indented, so that none looks like a line of our own output.
    """
    return f"\n{indent}".join(visible(line) for line in text.splitlines())


def _shown(character: str) -> str:
    """Return a character as a Python escape."""
    return character.encode("unicode_escape").decode("ascii")

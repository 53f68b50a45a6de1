"""Terminal text: names and notes from files and users, as a terminal may be shown them.

A name can hold what a terminal obeys: escape sequences that move the cursor and colour lines, line breaks that forge
lines of output, marks that turn the direction of writing. They are shown as Python writes them, so that a reader sees
them and a terminal does nothing.
"""

from __future__ import annotations

import unicodedata

OBEYED = ("Cc", "Cf", "Zl", "Zp", "Cs")
"""Categories of Unicode: control, format, line and paragraph separators, lone surrogates."""


def visible(text: str) -> str:
    """One line in which nothing is obeyed; text without such characters as it is."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(_shown(c) if unicodedata.category(c) in OBEYED else c for c in text)


def visible_lines(text: str, indent: str) -> str:
    """A text of several lines, such as a traceback: later lines are indented,
    so that none passes for a line of ours.
    """
    return f"\n{indent}".join(visible(line) for line in text.splitlines())


def _shown(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")

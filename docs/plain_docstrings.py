"""Docstrings for the site: roles such as :class:`X` and double backquotes become Markdown's plain code, sessions (>>>) code blocks."""

from __future__ import annotations

import re
from typing import Any

import griffe

SESSION = re.compile(r"^(>>> .*(?:\n(?!\s*$).+)*)", re.MULTILINE)
ROLE = re.compile(r":[a-z]+:`~?([^`]+)`")


class PlainDocstrings(griffe.Extension):
    """Rewrites every docstring as it is read."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            text = ROLE.sub(lambda m: f"`{m[1].removeprefix('flexcp.')}`", obj.docstring.value)
            obj.docstring.value = SESSION.sub(r"```pycon\n\1\n```", text.replace("``", "`"))

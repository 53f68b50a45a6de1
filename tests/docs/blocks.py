"""Blocks of Python and commands in the docs, and the HTML comments that say how tests run the block after them.

(nothing)                    run in CI after the earlier blocks of the page: Python in their namespace, commands in
                             their folder
<!-- run: torchrun N -->     Python run in CI as a script on N processes
<!-- not run here: why -->   not run; the comment says why, or where and when it ran
<!-- before: code -->        Python run in CI after ``code``, which readers do not see and which defines the names that
                             a fragment uses
"""

from __future__ import annotations

import os
import re
import runpy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
FENCE = re.compile(
    r"(?:^<!--(?P<note>(?:(?!-->).)*)-->\n+)?^```(?P<language>python|py|bash)\b[^\n]*\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """A block of code. ``ranks`` is 0 if it runs in one process; ``excuse`` says why it does not run at all."""

    page: str
    line: int
    code: str
    ranks: int
    excuse: str | None
    before: str = ""
    language: str = "python"

    @property
    def name(self) -> str:
        return f"{self.page}:{self.line}"


def pages() -> dict[str, str]:
    """Return the text of README.md and of every page of docs, by its path inside docs."""
    docs = ROOT / "docs"
    found = {page.relative_to(docs).as_posix(): page.read_text() for page in sorted(docs.rglob("*.md"))}
    return {"README.md": (ROOT / "README.md").read_text(), **found}


def blocks_of(text: str, page: str) -> Iterator[Block]:
    """Yield the blocks of a page, with what the comments before them say."""
    for found in FENCE.finditer(text):
        note = (found["note"] or "").strip()
        line = text.count("\n", 0, found.start("code"))
        script = re.fullmatch(r"run: torchrun (\d+)", note)
        excuse = re.fullmatch(r"not run here: (.{10,})", note)
        before = re.fullmatch(r"before:\s*(.*)", note, re.DOTALL)
        if note and not script and not excuse and not before:
            raise ValueError(
                f"{page}:{line}: {note!r} is none of 'run: torchrun N', 'before: code', 'not run here: why'"
            )
        yield Block(
            page,
            line,
            found["code"],
            int(script[1]) if script else 0,
            excuse[1] if excuse else None,
            before[1] if before else "",
            "bash" if found["language"] == "bash" else "python",
        )


def all_blocks(language: str = "python") -> list[Block]:
    found = [block for page, text in pages().items() for block in blocks_of(text, page)]
    return [block for block in found if block.language == language]


def run_script(folder: Path, said: str, environment: dict[str, str]) -> None:
    """Run ``script.py`` of a folder in this process; what it prints goes to the file ``said`` in that folder."""
    os.chdir(folder)
    os.environ.update(environment)
    with open(said, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    runpy.run_path("script.py", run_name="__main__")

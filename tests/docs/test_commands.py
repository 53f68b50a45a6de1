"""Tests that commands in blocks of README and docs run, and that commands named in text exist with their options."""

from __future__ import annotations

import random
import re
import shlex
from pathlib import Path
from typing import Any

import blocks
import pytest
import typer
from typer.testing import CliRunner

from flexcp.cli.main import app

BLOCKS = [block for block in blocks.all_blocks("bash") if block.excuse is None]
PAGES = sorted({block.page for block in BLOCKS})
COMMAND: Any = typer.main.get_command(app)
MAKEFILE = (blocks.ROOT / "Makefile").read_text()
BENCHMARKS = "".join(file.read_text() for file in (blocks.ROOT / "benchmarks").rglob("*.py"))


def lines_of(code: str) -> list[str]:
    """The commands of a block, without comments."""
    return [
        line
        for line in re.sub(r"(^|\s)#.*$", "", code.replace("\\\n", " "), flags=re.MULTILINE).splitlines()
        if line.strip()
    ]


@pytest.mark.parametrize("page", PAGES)
def test_commands_of_a_page_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    random.seed(0)
    lengths = [int(random.lognormvariate(7, 1.4)) + 1 for _ in range(100)]
    (tmp_path / "lengths.txt").write_text("\n".join(map(str, lengths)))
    for block in BLOCKS:
        if block.page == page:
            for line in lines_of(block.code):
                name, *words = shlex.split(line)
                assert name == "flexcp", f"{block.name}: say why {line!r} is not run"
                result = CliRunner().invoke(app, words)
                assert result.exit_code == 0, (block.name, line, result.output)


def test_the_pages_that_matter_have_commands_that_run() -> None:
    assert {"README.md", "tutorial.md", "commands.md"} <= set(PAGES)


def named_commands() -> list[tuple[str, str]]:
    """Return (page, command) of everything in backticks or code blocks that begins like a command."""
    found = []
    for page, text in blocks.pages().items():
        spans = re.findall(r"(?<!`)`([^`\n]+)`(?!`)", text)
        fenced = [
            line
            for language, code in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
            if language in ("", "bash")
            for line in lines_of(code)
        ]
        indented = re.findall(r"^    (python benchmarks[^#\n]*)", text, re.MULTILINE)
        found += [(page, part.strip()) for words in (*spans, *fenced, *indented) for part in words.split("&&")]
    return [
        (page, words)
        for page, words in found
        if re.match(r"(flexcp|make|(sudo )?(python )?benchmarks/\S+|sudo python|python) ", words)
    ]


def options_of(words: list[str]) -> tuple[str, set[str]]:
    """Return the name of the flexcp command that ``words`` begin with, and its options."""
    command, name = COMMAND, "flexcp"
    for word in words:
        if not hasattr(command, "commands") or word.startswith("-"):
            break
        assert word in command.commands, f"{name} has no command {word}"
        command, name = command.commands[word], f"{name} {word}"
    return name, {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}


def test_commands_named_in_the_text_exist() -> None:
    wrong = []
    for page, line in named_commands():
        words = [word for word in line.split() if word != "sudo"]
        options = {word.partition("=")[0] for word in words if word.startswith("--")}
        if words[0] == "flexcp" and re.fullmatch(r"[a-z]+|--[a-z-]+", words[1]):
            name, known = options_of(words[1:])
            wrong += [f"{page}: {name} has no {option}" for option in options - known - {"--help"}]
        elif words[0] == "make" and not re.search(rf"^{re.escape(words[1])}:", MAKEFILE, re.MULTILINE):
            wrong.append(f"{page}: no target {words[1]}")
        elif words[0] == "python" and words[1].startswith(("benchmarks/", "docs/")):
            script = blocks.ROOT / words[1]
            if not script.exists():
                wrong.append(f"{page}: no {words[1]}")
            else:
                text = script.read_text() + BENCHMARKS
                wrong += [f"{page}: {words[1]} has no {option}" for option in options if f'"{option}"' not in text]
    assert not wrong
    assert len(named_commands()) > 60


def test_paths_named_in_the_text_exist() -> None:
    """Every path of this repository that a page names exists."""
    wrong = []
    for page, text in blocks.pages().items():
        for path in re.findall(
            r"\b(?:src|tests|benchmarks|examples|docs)/[\w./-]+\.(?:py|sh|json|md|svg|png|yml)\b", text
        ):
            if not (blocks.ROOT / path).exists():
                wrong.append(f"{page}: {path}")
    assert not wrong

"""Tests of commands whose files are pipes or their own streams, with closed streams, and in a folder that is gone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from flexcp.cli.main import app
from flexcp.plan.file import load_plan

PLAN = ["plan", "--lengths", "300,40,1", "--ranks", "2", "--strategy", "dp"]
CONFIG = {
    "model_type": "llama",
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 512,
    "vocab_size": 1000,
}


def command(*words: str, **options: Any) -> subprocess.CompletedProcess[bytes]:
    """Run flexcp in a process of its own."""
    return subprocess.run([sys.executable, "-m", "flexcp", *words], timeout=300, **options)


@contextmanager
def piped(content: bytes) -> Iterator[str]:
    """The path of a pipe that another thread fills with the content."""
    out, into = os.pipe()

    def fill() -> None:
        with os.fdopen(into, "wb") as file:
            file.write(content)

    filling = threading.Thread(target=fill)
    filling.start()
    try:
        yield f"/dev/fd/{out}"
    finally:
        filling.join()
        os.close(out)


def printed(*words: str) -> str:
    result = CliRunner().invoke(app, list(words), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.parametrize("mode", ["ab", "wb"])
def test_a_plan_saved_to_stdout_joins_what_the_log_holds(tmp_path: Path, mode: str) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"an earlier line\n")
    with log.open(mode) as file:
        done = command(*PLAN, "--save", "/dev/stdout", stdout=file, stderr=subprocess.PIPE)
    assert done.returncode == 0, done.stderr
    content = log.read_bytes()
    assert content.startswith(b"an earlier line\n") == (mode == "ab")
    saved = tmp_path / "a.plan"
    text = printed(*PLAN, "--save", str(saved))
    assert saved.read_bytes() in content and text.splitlines()[0].encode() in content


def without_streams(*words: str) -> int:
    """Run flexcp in a process with closed stdout and stderr; return its exit code."""
    shell = ["sh", "-c", 'exec "$@" >&- 2>&-', "sh", sys.executable, "-m", "flexcp"]
    return subprocess.run([*shell, *words], timeout=300).returncode


def test_closed_streams_lose_messages_and_nothing_else(tmp_path: Path) -> None:
    """Python's own stderr is None then, and a file that is opened first gets the descriptor."""
    saved = tmp_path / "a.plan"
    assert without_streams(*PLAN, "--save", str(saved)) == 0
    assert load_plan(saved.read_bytes()).ranks == 2
    assert without_streams("plan", "--lengths", "0") == 2


def test_processes_of_a_command_without_streams_have_them(tmp_path: Path) -> None:
    inside = "import os; open(sys.argv[1], 'w').write(str([os.fstat(n).st_rdev for n in range(3)]))"
    code = (
        "import subprocess, sys; from flexcp.cli.main import _open_standard_streams; _open_standard_streams();"
        f'subprocess.run([sys.executable, "-c", "import sys; {inside}", sys.argv[1]], check=True)'
    )
    shell = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, "-c", code, str(tmp_path / "found")]
    assert subprocess.run(shell, timeout=60).returncode == 0
    assert (tmp_path / "found").read_text() == str([os.stat(os.devnull).st_rdev] * 3)


def test_a_file_for_a_folder_that_is_gone_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    for option in ("--save", "--html"):
        with pytest.raises(ValueError, match=r"cannot write a\.out: the current folder does not exist any more"):
            CliRunner().invoke(app, [*PLAN, option, "a.out"], catch_exceptions=False)


def test_inputs_may_be_pipes(tmp_path: Path) -> None:
    saved, config = tmp_path / "a.plan", tmp_path / "config.json"
    text = printed(*PLAN, "--save", str(saved))
    with piped(saved.read_bytes()) as pipe:
        assert printed("show", pipe) == text
    with piped(b"300\n40\n1\n") as pipe:
        assert printed("plan", "--lengths", pipe, *PLAN[3:]) == text
    config.write_text(json.dumps(CONFIG))
    # With a byte order mark, which some editors write. The name of the file is part of the plan's hash.
    with piped(b"\xef\xbb\xbf" + config.read_bytes()) as pipe:
        found = printed(*PLAN, "--model", pipe)
    assert "4 / 2 heads of 64" in found
    assert found.partition(": ")[2] == printed(*PLAN, "--model", str(config)).partition(": ")[2]


def test_a_pipe_without_lengths_is_not_called_missing() -> None:
    with piped(b"") as pipe, pytest.raises(ValueError, match="holds no lengths; it should hold one number a line"):
        CliRunner().invoke(app, ["plan", "--lengths", pipe, "--ranks", "2"], catch_exceptions=False)


@pytest.mark.parametrize(
    ("option", "before", "content"),
    [("--model", "", json.dumps(CONFIG).encode()), ("--data", "@", b"300\n40\n"), ("--data", "", b"some text\n")],
)
def test_train_refuses_pipes(option: str, before: str, content: bytes) -> None:
    """Its ranks are other processes, and would find the pipe empty."""
    with (
        piped(content) as pipe,
        pytest.raises(ValueError, match=f"^{option} {before}{pipe} is a pipe.*write it to a f"),
    ):
        CliRunner().invoke(app, ["train", option, before + pipe], catch_exceptions=False)

"""Tests that files are written completely or not at all, and that no command leaves a partial file on a full disk."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from flexcp.io.atomic_files import write_whole


def full(*_: Any, **__: Any) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_file_takes_the_place_of_another(tmp_path: Path) -> None:
    write_whole(tmp_path / "a", "old")
    write_whole(tmp_path / "a", b"new")
    assert (tmp_path / "a").read_text() == "new" and os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize("where", ["write_bytes", "replace"])
def test_a_full_disk_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    write_whole(tmp_path / "a", "old")
    monkeypatch.setattr(Path, where, full)
    with pytest.raises(OSError, match="No space left") as found:
        write_whole(tmp_path / "a", "new")
    assert found.value.filename == str(tmp_path / "a")
    monkeypatch.undo()
    assert (tmp_path / "a").read_text() == "old" and os.listdir(tmp_path) == ["a"]


def test_an_interrupt_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(path: Path, _: Path) -> None:
        assert path.exists()
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_whole(tmp_path / "a", "new")
    assert os.listdir(tmp_path) == []


def test_a_pipe_is_written_through_its_link() -> None:
    """As ``/dev/stdout`` is one where output goes to another command; what that names is no path."""
    out, into = os.pipe()
    try:
        write_whole(f"/dev/fd/{into}", "whole")
        assert os.read(out, 10) == b"whole"
    finally:
        os.close(out)
        os.close(into)


def test_a_file_that_stdout_goes_to_is_written_in_turn(tmp_path: Path) -> None:
    code = "from flexcp.io.atomic_files import write_whole; print(1); write_whole('/dev/stdout', '2\\n'); print(3)"
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with (tmp_path / "log").open("wb") as file:
        subprocess.run([sys.executable, "-c", code], stdout=file, env=buffered, check=True, timeout=60)
    assert (tmp_path / "log").read_text() == "1\n2\n3\n"


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="needs a folder below /dev")
def test_a_file_by_its_own_name_is_replaced_wherever_it_is() -> None:
    code = "import sys; from flexcp.io.atomic_files import write_whole; print(1); write_whole(sys.argv[1], '2\\n')"
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        log = Path(folder) / "log"
        with log.open("wb") as file:
            subprocess.run([sys.executable, "-c", code, str(log)], stdout=file, check=True, timeout=60)
        assert log.read_text() == "2\n"


@pytest.mark.parametrize("name", ["/dev/stderr", "/dev/fd/2", "/proc/self/fd/2", "/proc/thread-self/fd/2"])
def test_a_stream_has_several_names(tmp_path: Path, name: str) -> None:
    code = "import sys; from flexcp.io.atomic_files import write_whole; write_whole(sys.argv[1], '2\\n')"
    (tmp_path / "log").write_text("1\n")
    with (tmp_path / "log").open("ab") as file:
        subprocess.run([sys.executable, "-c", code, name], stderr=file, check=True, timeout=60)
    assert (tmp_path / "log").read_text() == "1\n2\n"


def test_links_and_devices_stay_what_they_are(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "a")
    write_whole(tmp_path / "link", "text")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "a").read_text() == "text"
    write_whole("/dev/null", "text")
    assert not Path("/dev/null").is_file()
    os.mkfifo(tmp_path / "pipe")
    reading = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    write_whole(tmp_path / "pipe", "text")
    assert os.read(reading, 10) == b"text"
    os.close(reading)


PLAN = ["--lengths", "3000,400,80", "--ranks", "4", "--strategy", "blocks"]
WRITERS = {
    "plan": ["plan", *PLAN, "--save"],
    "report": ["plan", *PLAN, "--html"],
    "events": ["simulate", "--lengths", "3000,400,80", "--cluster", "h100:1x4", "--events"],
}


@pytest.mark.parametrize("command", WRITERS)
def test_no_command_leaves_half_a_file(command: str, tmp_path: Path) -> None:
    """The process may write at most 100 bytes to a file (RLIMIT_FSIZE), which stands for a full disk.

    It must not write compiled sources: Python 3.11 would leave files of 100 bytes that cannot be imported.
    """

    def limited() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))

    words = [sys.executable, "-c", "from flexcp.cli.main import run; run()", *WRITERS[command], str(tmp_path / "out")]
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(words, env=environment, preexec_fn=limited, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2, done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("flexcp: ") and str(tmp_path / "out") in last and "File too large" in last
    assert "Traceback" not in done.stderr and os.listdir(tmp_path) == []

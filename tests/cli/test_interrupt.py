"""Proves that Ctrl-C ends a command with 130 and SIGTERM with 143 and one last line, and that no process is left."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import flexcp

SOURCE = Path(flexcp.__file__).parent


def processes(group: int) -> list[int]:
    """Return the living processes of a process group. This is asked many times a second, so the files of processes of
    other groups are not opened.
    """
    found = []
    for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
        try:
            if os.getpgid(pid) == group and Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                found.append(pid)
        except OSError:  # ended meanwhile
            continue
    return found


DEMO = "demo --ranks 2 --steps 1000"
PLAN = "plan --lengths 5000,300 --ranks 4 --strategy blocks"
FUZZ = "fuzz --cases 100000 --ranks-share 0.5 --most-ranks 2 --jobs 2"


@pytest.mark.parametrize(
    ("words", "count", "seconds"),
    [
        pytest.param(DEMO, 3, 0.0, id="while the server that makes ranks imports"),
        pytest.param(DEMO, 4, 0.0, id="while ranks are made"),
        pytest.param(DEMO, 5, 1.0, id="while ranks run"),
        pytest.param(PLAN, 1, 0.0, id="while loops are compiled"),
        pytest.param(FUZZ, 4, 3.0, id="while workers fuzz"),
    ],
)
def test_an_interrupted_command_leaves_nothing_behind(words: str, count: int, seconds: float, tmp_path: Path) -> None:
    ends(words, count, seconds, tmp_path, signal.SIGINT)


@pytest.mark.parametrize(
    ("count", "seconds"), [(3, 0.0), (5, 1.0)], ids=["while the server imports", "while ranks run"]
)
def test_a_terminated_command_leaves_nothing_behind(count: int, seconds: float, tmp_path: Path) -> None:
    """Only the command gets the signal, as from ``timeout`` or a container's runtime."""
    ends(DEMO, count, seconds, tmp_path, signal.SIGTERM)


def ends(words: str, count: int, seconds: float, tmp_path: Path, number: signal.Signals) -> None:
    """The demo has five processes: the command, its resource tracker, the fork server and two ranks. The plan is made
    by a copy of flexcp without compiled Numba loops; compiling takes a minute, and the plan is interrupted when the
    first loop is in the cache folder.
    """
    cold = tmp_path / "cold"
    if words == PLAN:
        shutil.copytree(SOURCE, cold / "flexcp", ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-c", "from flexcp.cli.main import run; run()", *words.split()]
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        env=os.environ | ({"NUMBA_CACHE_DIR": str(cold), "PYTHONPATH": str(cold)} if words == PLAN else {}),
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # background jobs inherit an ignored SIGINT
    )
    try:
        if words == PLAN:
            wait_for(lambda: any(cold.glob("flexcp-*/*.nbc")))
        interrupt(process, count, seconds, number)
    finally:
        for pid in processes(process.pid):
            os.kill(pid, signal.SIGKILL)


def wait_for(happens: Callable[[], bool]) -> None:
    until = time.monotonic() + 150
    while not happens():
        assert time.monotonic() < until
        time.sleep(0.05)


def interrupt(process: subprocess.Popen[str], count: int, seconds: float, number: signal.Signals) -> None:
    wait_for(lambda: len(processes(process.pid)) >= count)
    time.sleep(seconds)
    if number == signal.SIGINT:  # which a terminal sends to all processes
        os.killpg(process.pid, number)
    else:
        process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert err.splitlines()[-1] == f"flexcp: {'interrupted' if number == signal.SIGINT else 'terminated'}"
    assert "Traceback" not in err and "Error" not in err
    until = time.monotonic() + 2
    while processes(process.pid) and time.monotonic() < until:
        time.sleep(0.1)
    assert processes(process.pid) == [], "children after two seconds"

"""Proves that Ctrl-C ends a command with 130 and one last line, and leaves no process behind."""

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
        interrupt(process, count, seconds)
    finally:
        for pid in processes(process.pid):
            os.kill(pid, signal.SIGKILL)


def wait_for(happens: Callable[[], bool]) -> None:
    until = time.monotonic() + 150
    while not happens():
        assert time.monotonic() < until
        time.sleep(0.05)


def interrupt(process: subprocess.Popen[str], count: int, seconds: float) -> None:
    wait_for(lambda: len(processes(process.pid)) >= count)
    time.sleep(seconds)
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.splitlines()[-1] == "flexcp: interrupted"
    assert "Traceback" not in err and "Error" not in err
    until = time.monotonic() + 2
    while processes(process.pid) and time.monotonic() < until:
        time.sleep(0.1)
    assert processes(process.pid) == [], "children after two seconds"

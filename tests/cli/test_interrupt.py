"""Proves that Ctrl-C ends a command with 130 and one last line, and leaves no process behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path


def processes(group: int) -> list[int]:
    """Living processes of a process group."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, _, rest = (entry / "stat").read_text().rpartition(")")[2].strip().partition(" ")
            except OSError:
                continue
            if int(rest.split()[1]) == group and state != "Z":
                found.append(int(entry.name))
    return found


def test_an_interrupted_command_leaves_nothing_behind() -> None:
    command = [str(Path(sys.executable).parent / "flexcp"), "demo", "--ranks", "2", "--steps", "1000"]
    process = subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a background job inherits that it is ignored
    )
    try:
        interrupt(process)
    finally:
        for pid in processes(process.pid):
            os.kill(pid, signal.SIGKILL)


def interrupt(process: subprocess.Popen[str]) -> None:
    until = time.monotonic() + 60
    while len(processes(process.pid)) < 4 and time.monotonic() < until:  # the command, its fork server and two ranks
        time.sleep(0.1)
    assert len(processes(process.pid)) >= 4
    time.sleep(1)
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "flexcp: interrupted" in err.splitlines()
    until = time.monotonic() + 20
    while processes(process.pid) and time.monotonic() < until:
        time.sleep(0.1)
    assert processes(process.pid) == []

"""Proves that an interrupted start leaves no fork server behind, at whatever moment the interrupt comes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

IMPORT_SECONDS = 120

PROGRAM = """
import os, signal, sys
from multiprocessing import forkserver

import flexcp.measure.fork_server as fork_server

def interrupted_start(start=forkserver.ensure_running):
    start()
    os.kill(os.getpid(), signal.SIGINT)

if sys.argv[1] == "as it starts":
    forkserver.ensure_running = interrupted_start
try:
    fork_server.server(["slow_to_import"])
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.parametrize("moment", ["as it starts", "while it imports"])
def test_an_interrupted_start_ends_the_server(moment: str, tmp_path: Path) -> None:
    """The server holds its parent's output open, so reading that to its end waits for the server."""
    importing = tmp_path / "importing"
    slow = f"import pathlib, time\npathlib.Path({str(importing)!r}).touch()\ntime.sleep({IMPORT_SECONDS})\n"
    (tmp_path / "slow_to_import.py").write_text(slow)
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, moment],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # background jobs inherit an ignored SIGINT
    )
    try:
        if moment == "while it imports":
            until = time.monotonic() + 60
            while not importing.exists() and time.monotonic() < until:
                time.sleep(0.05)
            process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=IMPORT_SECONDS / 2)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    assert (process.returncode, out) == (0, "interrupted\n")

"""Tests of ``flexcp accept`` in processes, as a launcher starts them: it passes and writes its report, and a rank that
dies or hangs is named.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flexcp.cli.main import app
from flexcp.measure.local_store import kept_store

SMALL = [
    "--strategies",
    "ring",
    "--heads",
    "2",
    "--kv-heads",
    "2",
    "--head-dim",
    "16",
    "--lengths",
    "200,40",
    "--cluster",
    "cpu:2x1",
    "--rehearsal",
]


class Ranks:
    """Two ranks with the environment variables and the store that torchrun would give them."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.store = kept_store()
        usual = {
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self.store.port),
        }
        usual |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "GLOO_SOCKET_IFNAME": "lo"}
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-m", "flexcp", "accept", *SMALL, *options],
                env=os.environ | usual | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                cwd=folder,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]

    def reached(self, rank: int, step: str) -> None:
        """Wait until a rank has reached the step of ``accept`` whose name begins with ``step``."""
        deadline, key = time.monotonic() + 120, f"accept/at/{rank}"
        while not self.store.check([key]) or not json.loads(self.store.get(key))[1].startswith(step):
            assert time.monotonic() < deadline and self.processes[rank].poll() is None
            time.sleep(0.02)

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


def test_two_ranks_pass_and_leave_a_report(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, "--write-cost", "cost.json")
    try:
        answers = [process.communicate(timeout=240) for process in ranks.processes]
        assert [process.returncode for process in ranks.processes] == [0, 0], answers
    finally:
        ranks.end()
    (table, _), (nothing, _) = answers
    assert "exactness" in table and "accepted (a rehearsal" in table and nothing == ""
    data = json.loads((tmp_path / "accept.json").read_text())
    assert data["passed"] and data["failures"] == [] and data["backend"] == "gloo"
    assert "cpu:2x1: accepted" in (tmp_path / "accept.html").read_text()
    assert json.loads((tmp_path / "cost.json").read_text())["speeds"]["inter_mbps"] > 0


def test_a_rank_that_dies_or_stands_still_is_named_in_time(tmp_path: Path) -> None:
    """Both cases run at the same time, because most of the time is spent waiting for the timeout."""
    groups = {}
    try:
        for how in (signal.SIGKILL, signal.SIGSTOP):
            (tmp_path / how.name).mkdir()
            groups[how] = Ranks(tmp_path / how.name, "--timeout", "10")
        for how, ranks in groups.items():
            ranks.reached(1, "exactness")
            ranks.processes[1].send_signal(how)
        for how, ranks in groups.items():
            _, said = ranks.processes[0].communicate(timeout=90)
            assert ranks.processes[0].returncode == 1
            (line,) = [line for line in said.splitlines() if line.startswith("flexcp: ")]
            assert f"rank 1 on host {os.uname().nodename} died or stands still in step 'exactness of ring'" in line
            data = json.loads((tmp_path / how.name / "accept.json").read_text())
            assert not data["passed"] and data["failures"] == [line.removeprefix("flexcp: ")]
    finally:
        for ranks in groups.values():
            ranks.end()


@pytest.mark.parametrize(
    ("ranks", "options", "said"),
    [
        (None, [], "accept runs on all ranks of a cluster: torchrun --nproc-per-node 8 -m flexcp accept"),
        (
            "4",
            ["--cluster", "h100:4x8"],
            "cluster h100:4x8 has 32 ranks, but 4 were started (4 on this host); change --cluster",
        ),
        ("4", ["--timeout", "0"], "--timeout is a number of seconds above 0; got 0"),
    ],
)
def test_wrong_input_is_told_before_anybody_waits(
    monkeypatch: pytest.MonkeyPatch, ranks: str | None, options: list[str], said: str
) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    if ranks is not None:
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", ranks)
    result = CliRunner().invoke(app, ["accept", *options])
    assert isinstance(result.exception, ValueError) and said in str(result.exception)

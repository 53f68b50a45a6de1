"""Tests of the emulated cluster (``lib.box``: one network namespace a rank): its ports count and limit the bytes that
ranks exchange, and no namespace is left behind, however the process ends.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from flexcp.measure.ranks import RankError
from lib import box
from lib.box import NAMESPACES, PREFIX, Box, Network, why_not

needs_box = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
SIZE = 1 << 20
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def namespaces(process: int) -> list[str]:
    return sorted(path.name for path in NAMESPACES.glob(f"{PREFIX}{process}-*"))


def exchange(group: dist.ProcessGroup, distance: int) -> tuple[float, bool]:
    """Send this rank's number to the rank ``distance`` further on; return the seconds, and whether the expected number
    arrived.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    return swap(group, (rank + distance) % size, (rank - distance) % size)


def neighbours(group: dist.ProcessGroup) -> tuple[float, bool]:
    """Swap numbers with the other rank of this node; nodes have two ranks."""
    return swap(group, dist.get_rank(group) ^ 1, dist.get_rank(group) ^ 1)


def swap(group: dist.ProcessGroup, to: int, back: int) -> tuple[float, bool]:
    came = torch.zeros(SIZE, dtype=torch.uint8)
    dist.barrier(group)
    begin = time.perf_counter()
    works = [
        dist.irecv(came, back),
        dist.isend(torch.full_like(came, dist.get_rank(group)), to),
    ]
    for work in works:
        if work is not None:
            work.wait()
    return time.perf_counter() - begin, bool((came == back).all())


def counting(group: dist.ProcessGroup, to: int) -> Generator[int, None, int]:
    yield from range(to)
    return dist.get_rank(group)


def fail(group: dist.ProcessGroup) -> None:
    raise ValueError(f"rank {dist.get_rank(group)} has had enough")


@needs_box
def test_links_carry_what_crosses_nodes_and_not_faster_than_their_limit() -> None:
    with Box(2, 2) as ranks:
        ranks.network.limit(100)
        before = ranks.network.sent_bytes()
        answers = ranks.run(exchange, 2)
        crossed = [b - a for a, b in zip(before, ranks.network.sent_bytes(), strict=True)]
        assert all(right for _, right in answers)
        assert all(SIZE <= sent <= 1.05 * SIZE for sent in crossed)
        # 1 MiB at 100 Mbit/s takes 84 ms, a little less because the token bucket lets its first bytes through at once.
        assert max(seconds for seconds, _ in answers) >= 0.08
        with pytest.raises(RankError, match="rank 0 has had enough"):
            ranks.run(fail)
        said: list[int] = []
        assert ranks.run(counting, 3, on_item=said.append) == [0, 1, 2, 3] and said == [0, 1, 2]
        before = ranks.network.sent_bytes()
        ranks.network.limit(None, 100)
        answers = ranks.run(neighbours)
        assert all(right for _, right in answers) and max(seconds for seconds, _ in answers) >= 0.08
        assert sum(ranks.network.sent_bytes()) - sum(before) < SIZE, "what stays in a node does not cross"
        ranks.network.limit(None)
        assert all(right for _, right in ranks.run(exchange, 1))
        assert len(namespaces(os.getpid())) == 5
    assert namespaces(os.getpid()) == []


@needs_box
def test_an_error_half_way_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    run = box._run

    def refuse(command: str) -> str:
        if "address add" in command:
            raise RuntimeError("no address today")
        return run(command)

    monkeypatch.setattr(box, "_run", refuse)
    with pytest.raises(RuntimeError, match="no address today"):
        Network(2)
    assert namespaces(os.getpid()) == []


@needs_box
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_what_an_ended_process_left_is_removed(how: signal.Signals) -> None:
    # A background job of a shell inherits an ignored SIGINT, so the default handler is restored. One long sleep would
    # miss a signal that comes just before it begins, so there are many short ones.
    code = (
        "import signal, time\nsignal.signal(signal.SIGINT, signal.default_int_handler)\nfrom lib.box import Network\n"
    )
    code += "with Network(2, 1):\n    print('up', flush=True)\n    while True:\n        time.sleep(0.05)"
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=BENCHMARKS, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "up\n"
    assert len(namespaces(process.pid)) == 3
    process.send_signal(how)
    process.wait(60)
    if how == signal.SIGKILL:  # the killed process could not clean up, so the next Network does
        assert len(namespaces(process.pid)) == 3
        with Network(1):
            pass
    assert namespaces(process.pid) == []


def test_a_machine_that_cannot_is_told_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(box.shutil, "which", lambda name: f"/sbin/{name}")
    assert why_not() == "a box needs root, to make network namespaces"
    monkeypatch.setattr(box.shutil, "which", lambda name: None)
    assert why_not() == "a box needs ip and tc and sysctl (apt install iproute2 procps)"


def test_the_benchmark_skips_where_there_can_be_no_box(tmp_path: Path) -> None:
    environment = os.environ | {"PATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, BENCHMARKS / "box.py"], env=environment, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout) == (
        0,
        "skipped: a box needs ip and tc and sysctl (apt install iproute2 procps)\n",
    )


@pytest.mark.parametrize("nodes", [0, 201])
def test_boxes_of_no_size_are_refused(nodes: int) -> None:
    with pytest.raises(ValueError, match=f"a box has 1 to 200 ranks; got {nodes} nodes of 1"):
        Network(nodes)

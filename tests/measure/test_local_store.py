"""Tests that no process of a local run can be reached from other machines: every socket they listen on is bound to
loopback.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist

from flexcp.measure.local_store import kept_store
from flexcp.measure.ranks import RankPool

LISTENING = "0A"
LOOPBACK = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}
"""127.0.0.1, ::1 and ::ffff:127.0.0.1, as the kernel writes them."""


def listening() -> set[str]:
    """Return the addresses that this process listens on, as in /proc/net/tcp."""
    inodes = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(descriptor)
        except OSError:  # the descriptor by which the folder itself was read
            continue
        if target.startswith("socket:["):
            inodes.add(target.removeprefix("socket:[").removesuffix("]"))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENING and fields[9] in inodes:
                found.add(fields[1].partition(":")[0])
    return found


def on_ranks(group: dist.ProcessGroup) -> set[str]:
    dist.all_reduce(torch.ones(1), group=group)
    return listening()


def test_ranks_listen_on_loopback_only(pool: RankPool) -> None:
    found = pool.run(on_ranks, ranks=3)
    assert found[0], "rank 0 keeps the store, so it listens"
    assert set().union(*found) <= LOOPBACK


def test_a_kept_store_listens_on_loopback_only() -> None:
    before = listening()
    store = kept_store()
    assert listening() - before and listening() - before <= LOOPBACK
    store.set("key", "value")
    assert store.get("key") == b"value"

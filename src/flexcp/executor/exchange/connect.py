"""Connect: open the connections to all peers of a plan before the first layer needs them.

With NCCL the first message between two ranks takes 10 to 700 ms, because buffers and sockets are made then. So ``bind``
exchanges one byte with each peer that this rank has not yet connected to in the group. It does so in turns: first with
peers at a distance of 1 to 8 ranks (counted around the circle of all ranks), then 9 to 16, and so on. Distance is
symmetric, so both ranks of a pair meet in the same turn; a rank without peers in a turn skips it. Connected peers are
listed in the group's store for the next bind.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from flexcp.executor.exchange.failure_notes import through_store
from flexcp.executor.exchange.grouped_calls import start_together

Progress = Callable[[int, int], None]
"""A function that is called with the number of new peers connected so far, and the number of all new peers."""
AT_ONCE = 8
"""How many distances (numbers of ranks between two peers) one turn covers."""


def connect(
    peers: list[int],
    group: dist.ProcessGroup,
    device: torch.device,
    timeout: timedelta,
    progress: Progress | None = None,
) -> int:
    """Exchange a byte with each of the ranks ``peers`` that is not yet connected, and return how many these were.

    The peers must call this at the same time. ``timeout`` limits how long the group's store may take to answer.
    ``progress`` is called before the first turn and after each; by default it shows a line on a terminal.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    store, key = group.get_group_store(), f"flexcp/connected/{rank}"
    met: list[int] = through_store(timeout, lambda: _connected(store, key))
    new = sorted(set(peers) - set(met))
    if not new:
        return 0
    tell = progress or _Line()
    turns: dict[int, list[int]] = {}
    for peer in new:
        distance = min((peer - rank) % size, (rank - peer) % size)
        turns.setdefault((distance - 1) // AT_ONCE, []).append(peer)
    done = 0
    tell(done, len(new))
    for _, turn in sorted(turns.items()):
        _meet(turn, group, device)
        done += len(turn)
        tell(done, len(new))
    through_store(timeout, lambda: store.set(key, json.dumps(sorted({*met, *new}))))
    return len(new)


def _connected(store: Any, key: str) -> list[int]:
    """Return the peers that the store lists under a key; none if it has no such key."""
    found: list[int] = json.loads(store.get(key)) if store.check([key]) else []
    return found


def _meet(peers: list[int], group: dist.ProcessGroup, device: torch.device) -> None:
    """Exchange one byte with all of ``peers`` at the same time, and wait until it is done."""
    sent, received = (torch.zeros(len(peers), 1, dtype=torch.uint8, device=device) for _ in range(2))
    into, out = (list(zip(each, peers, strict=True)) for each in (received, sent))
    for work in start_together(group, into, out):
        work.wait()
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class _Line:
    """The default progress: one line on stderr if that is a terminal and connecting takes over a second."""

    def __init__(self) -> None:
        self.begin = time.monotonic()

    def __call__(self, done: int, everyone: int) -> None:
        if sys.stderr is not None and sys.stderr.isatty() and time.monotonic() - self.begin > 1:
            end = "\n" if done == everyone else ""
            print(f"\rflexcp: connected {done} of {everyone} peers", end=end, file=sys.stderr, flush=True)

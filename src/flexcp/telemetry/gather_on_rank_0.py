"""Gather on rank 0: send facts from all ranks to rank 0 through the group's store, and measure clock offsets.

The device is not used. The clock of a rank (``perf_counter_ns``) has an arbitrary origin. So each rank asks rank 0 for
its time several times. The answer of the shortest round trip is wrong by at most half of that trip, and this bound is
kept with the offset. Clocks of different machines also drift by some microseconds per second, so offsets are measured
each time they are needed.
"""

from __future__ import annotations

import json
import time
import zlib
from datetime import timedelta
from time import perf_counter_ns
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from flexcp.executor.exchange.failure_notes import read_key, through_store, wait_for

QUESTIONS = 5


def gather_on_rank_0(
    facts: dict[str, Any], group: dist.ProcessGroup, timeout: timedelta
) -> list[dict[str, Any]] | None:
    """Return the facts of every rank, in rank order, on rank 0, and None on other ranks.

    ``facts`` must be JSON values. All ranks of ``group`` must call this; RuntimeError is raised if one does not within
    ``timeout``. Each rank's facts get ``offset_ns``, which added to its clock (``perf_counter_ns``) gives the clock of
    rank 0, and ``offset_error_ns``, the largest error of the offset.
    """
    return through_store(timeout, lambda: _gathered(facts, group, timeout))


def _gathered(facts: dict[str, Any], group: dist.ProcessGroup, timeout: timedelta) -> list[dict[str, Any]] | None:
    """Do what :func:`gather_on_rank_0` does, in the thread that uses the store."""
    store, rank, size = group.get_group_store(), dist.get_rank(group), dist.get_world_size(group)
    key = f"flexcp/meeting/{store.add(f'flexcp/meetings/{rank}', 1)}"
    deadline, other = time.monotonic() + timeout.total_seconds(), 0
    try:
        if rank:
            offset, error = _ask(store, f"{key}/{rank}", deadline)
            mine = facts | {"offset_ns": offset, "offset_error_ns": error}
            store.set(f"{key}/{rank}/facts", zlib.compress(json.dumps(mine).encode()))  # type: ignore[arg-type]
            wait_for(store, [f"{key}/end"], _left(deadline))
            return None
        found = [facts | {"offset_ns": 0, "offset_error_ns": 0}]
        for other in range(1, size):
            _answer(store, f"{key}/{other}", deadline)
            wait_for(store, [f"{key}/{other}/facts"], _left(deadline))
            found.append(json.loads(zlib.decompress(read_key(store, f"{key}/{other}/facts"))))
            store.delete_key(f"{key}/{other}/facts")
        store.set(f"{key}/end", "")
        return found
    except dist.DistStoreError as error:
        raise RuntimeError(
            f"rank {rank} waited for rank {other} for {timeout.total_seconds():g} s; "
            "every rank of the group must call this"
        ) from error


def _left(deadline: float) -> timedelta:
    """Return the time until the deadline, but at least 10 ms: for 0 the store would use its own default timeout."""
    return timedelta(seconds=max(0.01, deadline - time.monotonic()))


def _ask(store: Store, key: str, deadline: float) -> tuple[int, int]:
    """Ask rank 0 for its time; return (offset to rank 0's clock, largest error of it) in nanoseconds.

    ``key`` is the prefix of the store's keys that this rank and rank 0 use, ``deadline`` a time of
    ``time.monotonic()``.
    """
    found = []
    for i in range(QUESTIONS):
        asked = perf_counter_ns()
        store.set(f"{key}/ask/{i}", "")
        wait_for(store, [f"{key}/answer/{i}"], _left(deadline))
        heard = perf_counter_ns()
        theirs = int(read_key(store, f"{key}/answer/{i}"))
        store.delete_key(f"{key}/answer/{i}")
        found.append((heard - asked, theirs - (asked + heard) // 2))
    trip, offset = min(found)
    return offset, trip // 2 + 1


def _answer(store: Store, key: str, deadline: float) -> None:
    """Answer, on rank 0, the questions of one rank with the time of rank 0's clock."""
    for i in range(QUESTIONS):
        wait_for(store, [f"{key}/ask/{i}"], _left(deadline))
        store.set(f"{key}/answer/{i}", str(perf_counter_ns()))
        store.delete_key(f"{key}/ask/{i}")

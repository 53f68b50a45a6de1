"""Agree: all ranks of a group hold the same plan, or all of them raise.

Once per bind, through the group's store and off the device. The n-th bind of every rank meets under the same key: the first rank there
leaves its hash, later ones compare, a rank that differs says so at once to everybody, and the last one lets all go on. Keys are deleted by
whoever leaves last. Nothing is remembered in this process; the count of binds lives in the store.
"""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist


def agree(digest: str, group: dist.ProcessGroup, timeout: timedelta, mistake: str | None = None) -> None:
    """Return when every rank of ``group`` has called this with the same ``digest``; raise within ``timeout`` otherwise.

    A rank that already knows of a ``mistake`` raises it as ValueError, and the others hear of it instead of waiting.
    """
    store = group.get_group_store()
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    number = store.add(f"flexcp/binds/{rank}", 1)
    key = f"flexcp/bind/{number}"
    if mistake:
        store.set(f"{key}/verdict", f"rank {rank} cannot bind: {mistake}")
        raise ValueError(mistake)
    mine = f"{rank}:{digest}"
    first = store.compare_set(f"{key}/first", "", mine).decode()
    other, _, theirs = first.partition(":")
    if theirs != digest:
        verdict = (
            f"ranks disagree on the plan of bind number {number}: rank {rank} has {digest[:12]}, rank {other} has {theirs[:12]}; "
            "plan from the same lengths, masks, cluster and flexcp version on every rank"
        )
        store.set(f"{key}/verdict", verdict)
        raise RuntimeError(verdict)
    if store.add(f"{key}/count", 1) == size:
        store.set(f"{key}/verdict", "same")
    try:
        store.wait([f"{key}/verdict"], timeout)
    except dist.DistStoreError as error:
        there = store.add(f"{key}/count", 0)
        raise RuntimeError(
            f"only {there} of {size} ranks came to bind number {number} within {timeout.total_seconds():g} s; "
            "a rank died, stalled, or skipped this step"
        ) from error
    verdict = store.get(f"{key}/verdict").decode()
    if verdict != "same":
        raise RuntimeError(verdict)
    if store.add(f"{key}/left", 1) == size:
        for name in ("first", "count", "verdict", "left"):
            store.delete_key(f"{key}/{name}")

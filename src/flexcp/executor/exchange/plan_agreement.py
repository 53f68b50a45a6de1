"""Plan agreement: all ranks of a group hold the same plan, or all of them raise;
and what else ranks compare by way of the group's store.

Once per bind, through the group's store and off the device. The n-th bind of every rank meets under the same key: the
first rank there leaves its hash and its versions, later ones compare, a rank that differs says so at once to everybody,
and the last one lets all go on. Keys are deleted by whoever leaves last. Nothing is remembered in this process; the
count of binds lives in the store. A store that no longer answers, because the process that keeps it stands still, is an
error within the same time limit.

The last one to come also looks whether the plan's nodes are hosts (:mod:`flexcp.executor.exchange.hosts`), and all
raise if they are not.
"""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from flexcp.clusters import Cluster
from flexcp.executor.exchange.failure_notes import FailureNotes, grace_of, through_store
from flexcp.executor.exchange.hosts import leave_host, refused_nodes
from flexcp.executor.exchange.rank_calls import AS_PLANNED, CallSettings
from flexcp.plan.file import VERSION
from flexcp.version import __version__

VERSIONS = f"{__version__} {VERSION}"
"""The flexcp of this rank, and the plans it writes: another one may move other bytes for the same plan."""
REFUSED = "refused: "
"""How a verdict begins that is about the plan's values, and not about ranks that differ."""


def agree(
    digest: str,
    group: dist.ProcessGroup,
    timeout: timedelta,
    mistake: str | None = None,
    calls: CallSettings = AS_PLANNED,
    cluster: Cluster | None = None,
) -> int:
    """The number of this bind, when every rank of ``group`` called this with the same plan and settings;
    raises within ``timeout`` else.

    A rank that already knows of a ``mistake`` raises it as ValueError, and the others hear of it instead of waiting.
    ``cluster``, the plan's, is held against the hosts of the ranks; nodes that are not hosts are a ValueError on all
    ranks.
    """
    return through_store(timeout, lambda: _meet(digest, group, timeout, mistake, calls, cluster))


def said_by_all(name: str, said: str, notes: FailureNotes, timeout: timedelta) -> list[str]:
    """What every rank says under this ``name``, in rank order;
    RuntimeError within ``timeout`` when one does not come to say it.
    """
    return through_store(timeout, lambda: _say(name, said, notes, timeout))


def _say(name: str, said: str, notes: FailureNotes, timeout: timedelta) -> list[str]:
    store, size = notes.group.get_group_store(), dist.get_world_size(notes.group)
    keys = [f"flexcp/said/{name}/{rank}" for rank in range(size)]
    gone = f"flexcp/said/{name}/left"
    store.set(keys[notes.rank], said)
    grace = grace_of(timeout)
    try:
        store.wait(keys, timeout - timedelta(seconds=grace))
    except dist.DistStoreError as error:
        missing = next((rank for rank in range(size) if not store.check([keys[rank]])), 0)
        raise RuntimeError(
            f"rank {missing} did not say its {name} within {timeout.total_seconds():g} s. "
            f"{notes.explain(missing, grace)}"
        ) from error
    found = [store.get(key).decode() for key in keys]
    if store.add(gone, 1) == size:
        for key in (*keys, gone):
            store.delete_key(key)
    return found


def _meet(
    digest: str,
    group: dist.ProcessGroup,
    timeout: timedelta,
    mistake: str | None,
    calls: CallSettings,
    cluster: Cluster | None,
) -> int:
    store = group.get_group_store()
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    number = int(store.add(f"flexcp/binds/{rank}", 1))
    key = f"flexcp/bind/{number}"
    if number == 1:
        leave_host(store, rank)
    if mistake:
        store.set(f"{key}/verdict", f"rank {rank} cannot bind: {mistake}")
        raise ValueError(mistake)
    mine = f"{digest} {calls.rounds_per_call} {calls.chunk_bytes} {VERSIONS}"
    first = store.compare_set(f"{key}/first", "", f"{rank}:{mine}").decode()
    other, _, theirs = first.partition(":")
    if theirs != mine:
        verdict = _disagreement(number, rank, mine, other, theirs)
        store.set(f"{key}/verdict", verdict)
        raise RuntimeError(verdict)
    if store.add(f"{key}/count", 1) == size:
        refused = None if cluster is None else refused_nodes(store, cluster, size)
        store.set(f"{key}/verdict", "same" if refused is None else REFUSED + refused)
    try:
        store.wait([f"{key}/verdict"], timeout)
    except dist.DistStoreError as error:
        there = [r for r in range(size) if store.add(f"flexcp/binds/{r}", 0) >= number]
        missing = sorted(set(range(size)) - set(there))
        raise RuntimeError(
            f"only {len(there)} of {size} ranks came to bind number {number} within {timeout.total_seconds():g} s, "
            f"without {'rank' if len(missing) == 1 else 'ranks'} {', '.join(map(str, missing))}; a rank died, stalled, "
            "or skipped this step"
        ) from error
    verdict = store.get(f"{key}/verdict").decode()
    if verdict.startswith(REFUSED):
        raise ValueError(verdict.removeprefix(REFUSED))
    if verdict != "same":
        raise RuntimeError(verdict)
    if store.add(f"{key}/left", 1) == size:
        for name in ("first", "count", "verdict", "left"):
            store.delete_key(f"{key}/{name}")
    return number


def _disagreement(number: int, rank: int, mine: str, other: str, theirs: str) -> str:
    mine, *my_calls, my_version, my_format = mine.split(" ")
    theirs, *their_calls, their_version, their_format = theirs.split(" ")
    if (my_version, my_format) != (their_version, their_format):
        return (
            f"ranks run different flexcp at bind number {number}: rank {rank} has {my_version} with plan format "
            f"{my_format}, rank {other} has {their_version} with plan format {their_format}; "
            "install the same on every host"
        )
    if mine == theirs:
        return (
            f"ranks disagree on the calls of bind number {number}: rank {rank} has rounds_per_call and chunk_bytes "
            f"{' '.join(my_calls)}, rank {other} has {' '.join(their_calls)}; bind with the same on every rank"
        )
    return (
        f"ranks disagree on the plan of bind number {number}: rank {rank} has {mine[:12]}, rank {other} has "
        f"{theirs[:12]}; plan from the same lengths, masks and cluster on every rank"
    )

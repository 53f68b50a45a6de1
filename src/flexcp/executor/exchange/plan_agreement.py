"""Plan agreement: make sure that all ranks of a group hold the same plan, and raise on all of them if they do not.

It happens once per bind, through the group's store, without the device. The n-th binds of all ranks use the same key.
The first rank to arrive writes its plan hash and versions, and later ranks compare theirs. A rank that differs writes
that as the verdict at once; if all are the same, the last rank to arrive writes the verdict that lets them go on. The
last rank to leave deletes the keys. The number of binds is counted in the store, so this process keeps no state. A
store that does not answer, because its process hangs, raises within the same time limit.

The last rank to arrive also checks that the plan's nodes match the hosts (:mod:`flexcp.executor.exchange.hosts`); if
they do not, all ranks raise.
"""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from flexcp.clusters import Cluster
from flexcp.executor.exchange.failure_notes import FailureNotes, grace_of, read_key, through_store, wait_for
from flexcp.executor.exchange.hosts import leave_host, refused_nodes
from flexcp.executor.exchange.rank_calls import AS_PLANNED, CallSettings
from flexcp.plan.file import VERSION
from flexcp.version import __version__

VERSIONS = f"{__version__} {VERSION}"
"""The version of flexcp and of its plan format; another version may move other bytes for the same plan."""
REFUSED = "refused: "
"""The beginning of a verdict on a plan that all ranks share but that cannot be bound; it raises ValueError."""


def agree(
    digest: str,
    group: dist.ProcessGroup,
    timeout: timedelta,
    mistake: str | None = None,
    calls: CallSettings = AS_PLANNED,
    cluster: Cluster | None = None,
) -> int:
    """Wait until every rank of ``group`` has called this with the same plan hash; return the number of this bind.

    Binds count from 1. Raises RuntimeError if a rank has another hash (``digest``), other settings (``calls``) or
    another version of flexcp, or does not come within ``timeout``. A rank that found a ``mistake`` of its own raises it
    as ValueError, and the other ranks raise RuntimeError with it instead of waiting. ``cluster`` is the plan's: if the
    ranks of one of its nodes are on several hosts, all ranks raise ValueError.
    """
    return through_store(timeout, lambda: _meet(digest, group, timeout, mistake, calls, cluster))


def said_by_all(name: str, said: str, notes: FailureNotes, timeout: timedelta) -> list[str]:
    """Exchange a string with every rank under the key ``name``, and return the strings of all ranks, in rank order.

    Raises RuntimeError if a rank does not call this within ``timeout``; the message includes the rank's failure notes.
    """
    return through_store(timeout, lambda: _say(name, said, notes, timeout))


def _say(name: str, said: str, notes: FailureNotes, timeout: timedelta) -> list[str]:
    """Do what :func:`said_by_all` does, in the thread that uses the store."""
    store, size = notes.group.get_group_store(), dist.get_world_size(notes.group)
    keys = [f"flexcp/said/{name}/{rank}" for rank in range(size)]
    gone = f"flexcp/said/{name}/left"
    store.set(keys[notes.rank], said)
    grace = grace_of(timeout)
    try:
        wait_for(store, keys, timeout - timedelta(seconds=grace))
    except dist.DistStoreError as error:
        missing = next((rank for rank in range(size) if not store.check([keys[rank]])), 0)
        raise RuntimeError(
            f"rank {missing} did not say its {name} within {timeout.total_seconds():g} s. "
            f"{notes.explain(missing, grace)}"
        ) from error
    found = [read_key(store, key).decode() for key in keys]
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
    """Do what :func:`agree` does, in the thread that uses the store."""
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
        wait_for(store, [f"{key}/verdict"], timeout)
    except dist.DistStoreError as error:
        missing = [r for r in range(size) if store.add(f"flexcp/binds/{r}", 0) < number]
        raise RuntimeError(_nothing_decided(number, size, missing, timeout)) from error
    verdict = read_key(store, f"{key}/verdict").decode()
    if verdict.startswith(REFUSED):
        raise ValueError(verdict.removeprefix(REFUSED))
    if verdict != "same":
        raise RuntimeError(verdict)
    if store.add(f"{key}/left", 1) == size:
        for name in ("first", "count", "verdict", "left"):
            store.delete_key(f"{key}/{name}")
    return number


def _nothing_decided(number: int, size: int, missing: list[int], timeout: timedelta) -> str:
    """Return a message on a bind without a verdict within ``timeout``, to which the ranks ``missing`` did not come."""
    seconds = f"within {timeout.total_seconds():g} s"
    if not missing:
        return (
            f"all {size} ranks came to bind number {number}, but not all of them compared their plans {seconds}; a "
            "rank died, stalled, or could not write to the group's store: look for the error of another rank"
        )
    return (
        f"only {size - len(missing)} of {size} ranks came to bind number {number} {seconds}, without "
        f"{'rank' if len(missing) == 1 else 'ranks'} {', '.join(map(str, missing))}; a rank died, stalled, or skipped "
        "this step"
    )


def _disagreement(number: int, rank: int, mine: str, other: str, theirs: str) -> str:
    """Return a message on how this rank's entry (``mine``) differs from that of rank ``other`` (``theirs``).

    An entry is the plan's hash, the call settings, and the versions of flexcp and its plan format, separated by blanks.
    """
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

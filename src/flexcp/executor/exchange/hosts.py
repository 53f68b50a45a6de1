"""Hosts: find out which host each rank of a group runs on, and check that the nodes of a plan match the hosts.

A plan assumes that the ranks ``n * node .. n * node + n - 1`` share a node and its fast links (n is the number of ranks
per node). If two of them are on different hosts, the planner counted on links that do not exist, so such a plan raises
ValueError. The opposite is allowed, because a cluster can be rehearsed on one machine: ranks of several nodes may be on
one host. :func:`shared_host` detects that for commands that warn of it.

A host is identified by its name (``hostname``). Every rank writes its own to the group's store at its first bind. The
rank that checks reads all names once for each number of ranks per node, and writes to the store that they fit, so that
later binds need only one access.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence

from torch._C._distributed_c10d import Store

from flexcp.clusters import Cluster
from flexcp.executor.exchange.failure_notes import read_key


def this_host() -> str:
    """Return the name of the host that this process runs on."""
    return socket.gethostname()


def leave_host(store: Store, rank: int) -> None:
    """Write the host of this rank to the group's store."""
    store.set(f"flexcp/host/{rank}", this_host())


def refused_nodes(store: Store, cluster: Cluster, ranks: int) -> str | None:
    """Return why a cluster's nodes do not match the hosts that all ranks wrote to the store, and what to do.

    None if they match (this is remembered in the store), if nodes have one rank each, or if the cluster says that a
    node spans hosts. ``ranks`` is the number of ranks.
    """
    if cluster.ranks_per_node == 1 or cluster.node_spans_hosts:
        return None
    fits = f"flexcp/nodes/{cluster.ranks_per_node}"
    if store.check([fits]):
        return None
    refused = split_node(cluster, [read_key(store, f"flexcp/host/{rank}").decode() for rank in range(ranks)])
    if refused is None:
        store.set(fits, "hosts")
    return refused


def split_node(cluster: Cluster, hosts: Sequence[str]) -> str | None:
    """Return a message on the first node whose ranks are on several hosts, and what to do; None if there is none.

    ``hosts`` are the host names of all ranks, in rank order.
    """
    if cluster.node_spans_hosts:
        return None
    for rank, host in enumerate(hosts):
        first = cluster.node_of(rank) * cluster.ranks_per_node
        if host != hosts[first]:
            last = first + cluster.ranks_per_node - 1
            return (
                f"cluster {cluster} has ranks {first} to {last} on node {cluster.node_of(rank)}, but rank {first} runs "
                f"on host {hosts[first]} and rank {rank} on {host}; {_way_out(cluster, hosts)}"
            )
    return None


def shared_host(cluster: Cluster, hosts: Sequence[str]) -> str | None:
    """Return a message on the first host that has ranks of several nodes, and what to do; None if there is none.

    ``hosts`` are the host names of all ranks, in rank order.
    """
    first: dict[str, int] = {}
    for rank, host in enumerate(hosts):
        other = first.setdefault(host, rank)
        if cluster.node_of(other) != cluster.node_of(rank):
            return (
                f"cluster {cluster} has rank {other} on node {cluster.node_of(other)} and rank {rank} on node "
                f"{cluster.node_of(rank)}, but both run on host {host}; {_way_out(cluster, hosts)}"
            )
    return None


def _way_out(cluster: Cluster, hosts: Sequence[str]) -> str:
    """Return the end of a message: what the user can do if nodes and hosts do not match.

    If every host has the same number of ranks, numbered host by host, it names the cluster that fits. Otherwise it says
    to start the ranks like that.
    """
    each = next((n for n in range(len(hosts), 0, -1) if len(set(hosts[:n])) == 1), 1)
    blocks = [hosts[i : i + each] for i in range(0, len(hosts), each)]
    names = [block[0] for block in blocks]
    if all(len(block) == each and len(set(block)) == 1 for block in blocks) and len(set(names)) == len(names):
        return f'plan for the hosts there are, cluster("{cluster.name}", nodes={len(blocks)}, ranks_per_node={each})'
    return "start as many ranks on every host and number them host by host, as torchrun does"

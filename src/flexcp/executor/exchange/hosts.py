"""Hosts: which machine each rank of a group runs on, and whether the nodes that a plan was made for are machines.

A plan takes ranks ``n * node .. n * node + n - 1`` to share a node and its fast links. Where two of them are on
different hosts, every choice of the planner rests on links that are not there, so such a plan is refused. The opposite,
one host that stands for several nodes, is how a cluster is rehearsed on one machine, and is fine: :func:`shared_host`
finds it for those who want to know.

A host is its name (``hostname``). Every rank leaves its own in the group's store at its first bind; who judges reads
them once for each size of nodes, and that they fit is remembered in the store, so that later binds ask one question of
it.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence

from torch._C._distributed_c10d import Store

from flexcp.clusters import Cluster


def this_host() -> str:
    """The name of the machine that this process runs on."""
    return socket.gethostname()


def leave_host(store: Store, rank: int) -> None:
    """Tell the group's ranks where this one runs."""
    store.set(f"flexcp/host/{rank}", this_host())


def refused_nodes(store: Store, cluster: Cluster, ranks: int) -> str | None:
    """Why a cluster's nodes are not the hosts that all ranks left in the store, with the way out;
    None where they fit.
    """
    if cluster.ranks_per_node == 1 or cluster.node_spans_hosts:
        return None
    fits = f"flexcp/nodes/{cluster.ranks_per_node}"
    if store.check([fits]):
        return None
    refused = split_node(cluster, [store.get(f"flexcp/host/{rank}").decode() for rank in range(ranks)])
    if refused is None:
        store.set(fits, "hosts")
    return refused


def split_node(cluster: Cluster, hosts: Sequence[str]) -> str | None:
    """The first node whose ranks are on several hosts, in words with the way out; None where there is none."""
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
    """The first host on which ranks of several nodes are, in words with the way out; None where there is none."""
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
    """The cluster that fits, where ranks are numbered host by host and every host has as many."""
    each = next((n for n in range(len(hosts), 0, -1) if len(set(hosts[:n])) == 1), 1)
    blocks = [hosts[i : i + each] for i in range(0, len(hosts), each)]
    names = [block[0] for block in blocks]
    if all(len(block) == each and len(set(block)) == 1 for block in blocks) and len(set(names)) == len(names):
        return f'plan for the hosts there are, cluster("{cluster.name}", nodes={len(blocks)}, ranks_per_node={each})'
    return "start as many ranks on every host and number them host by host, as torchrun does"

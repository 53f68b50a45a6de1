"""Proves the check of hosts: ``bind`` refuses, on all ranks, a cluster whose nodes are not the hosts that the ranks run
on, and names them; one machine may stand for several nodes.
"""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest
import torch.distributed as dist

import flexcp
from flexcp.executor.exchange import hosts
from flexcp.executor.exchange.hosts import shared_host, split_node
from flexcp.measure.ranks import RankPool


@pytest.fixture
def ranks() -> Iterator[RankPool]:
    """Four ranks in a group that has not bound anything yet."""
    with RankPool(4) as four:
        yield four


def bound(group: dist.ProcessGroup, names: list[str], shapes: list[tuple[int, int]]) -> list[str]:
    """Bind plans for clusters of these shapes on hosts of these names; return the outcomes, then how often hosts were
    judged.
    """
    ends, store = [], group.get_group_store()
    with mock.patch.object(hosts, "this_host", lambda: names[dist.get_rank(group)]):
        for shape in shapes:
            planner = flexcp.Planner(2, 2, 8, cluster=flexcp.cluster("cpu", *shape), strategy="allgather")
            with mock.patch.object(hosts, "split_node", wraps=split_node) as judged:
                try:
                    flexcp.bind(planner([40, 9]), group, timeout=20)
                    ends.append("bound")
                except (ValueError, RuntimeError) as error:
                    ends.append(f"{type(error).__name__}: {error}")
                store.add("judged", judged.call_count)
    dist.barrier(group)
    return [*ends, str(store.add("judged", 0))]


def test_nodes_that_are_no_hosts_are_refused_on_all_ranks(ranks: RankPool) -> None:
    answers = ranks.run(bound, ["a", "a", "b", "b"], [(1, 4), (2, 2), (4, 1), (2, 2), (1, 4)])
    refusal = (
        "ValueError: cluster cpu:1x4 has ranks 0 to 3 on node 0, but rank 0 runs on host a and rank 2 on b; plan for "
        "the hosts there are, "
        'cluster("cpu", nodes=2, ranks_per_node=2)'
    )
    # Of the five binds, three compared hosts: the first and the last, which were refused, and the second, which fits
    # and is remembered for the fourth. Nodes of one rank need no comparison.
    assert answers == [[refusal, "bound", "bound", "bound", refusal, "3"]] * 4


def test_one_machine_may_stand_for_several_nodes(ranks: RankPool) -> None:
    assert ranks.run(bound, ["a"] * 4, [(2, 2), (4, 1), (1, 4)])[0][:3] == ["bound"] * 3


def test_a_rack_is_one_node_of_many_hosts() -> None:
    names = [f"tray{rank // 4}" for rank in range(72)]
    assert split_node(flexcp.cluster("gb200"), names) is None
    assert "rank 0 runs on host tray0 and rank 4 on tray1" in str(split_node(flexcp.cluster("h100", 1, 72), names))


@pytest.mark.parametrize(
    ("names", "way_out"),
    [
        ("aabb", 'cluster("h100", nodes=2, ranks_per_node=2)'),
        ("abab", "number them host by host, as torchrun does"),
        ("aaab", "start as many ranks on every host"),
        ("abcd", 'cluster("h100", nodes=4, ranks_per_node=1)'),
    ],
)
def test_the_way_out_is_the_cluster_that_fits_if_there_is_one(names: str, way_out: str) -> None:
    assert way_out in str(split_node(flexcp.cluster("h100:1x4"), names))


def test_a_host_of_two_nodes_is_found() -> None:
    assert shared_host(flexcp.cluster("h100:2x2"), "aabb") is None
    assert shared_host(flexcp.cluster("h100:2x2"), "aaaa") == (
        "cluster h100:2x2 has rank 0 on node 0 and rank 2 on node 1, "
        "but both run on host a; plan for the hosts there are, "
        'cluster("h100", nodes=1, ranks_per_node=4)'
    )
    assert split_node(flexcp.cluster("h100:2x2"), "aaaa") is None

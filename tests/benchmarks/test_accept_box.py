"""Tests of ``flexcp accept`` on an emulated cluster (``lib.box``: network namespaces of one machine): hosts are told
apart, and a throttled link is named.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch.distributed as dist

import flexcp
from flexcp.clusters import Cluster
from flexcp.measure.accept.checks import Check, hosts_check
from flexcp.measure.accept.link_speeds import links_check, measure_level
from flexcp.measure.accept.rank_cards import own_card, roll_call
from lib.box import Box, why_not

needs_box = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
MBIT = 160
"""20 MB/s, so slow that other work on this machine does not distort the measured speed."""
CLUSTER = replace(flexcp.cluster("cpu:3x1"), intra_mbps=1, inter_mbps=16)


@pytest.fixture(scope="module")
def box() -> Iterator[Box]:
    """Three nodes of one rank each."""
    with Box(3, 1) as made:
        yield made


def checked(group: dist.ProcessGroup, turn: int, cluster: Cluster) -> list[Check]:
    """Return the checks of hosts and of links that ``flexcp accept`` makes on this group."""
    store = dist.PrefixStore(f"turn{turn}", group.get_group_store())
    cards = roll_call(store, own_card(dist.get_rank(group), "cpu"), cluster.ranks, 60.0)
    links = measure_level(group, cluster, True, "cpu")
    return [hosts_check(cards, cluster, False), links_check(links, cluster, cards, False)]


@needs_box
def test_hosts_are_seen_and_a_throttled_link_is_named(box: Box) -> None:
    box.network.limit(MBIT)
    hosts, links = box.run(checked, 0, CLUSTER)[0]
    assert hosts.passed and hosts.value == "3 hosts, for 3 nodes of 1" and links.passed
    box.network.limit(MBIT // 8, node=1)
    hosts, links = box.run(checked, 1, CLUSTER)[0]
    assert hosts.passed
    (line,) = links.failures
    assert line.startswith("all 2 links of node 1 (host node1) across nodes are slow:")


@needs_box
def test_a_network_slower_than_the_stated_one_is_told(box: Box) -> None:
    """Two nodes are enough, since all links are as slow, and measuring one slow link takes seconds."""
    box.network.limit(MBIT // 8)
    (line,) = box.run(checked, 2, replace(CLUSTER, nodes=2), ranks=2)[0][1].failures
    assert line.startswith("links across nodes carry ") and "less than half of the 16 of cluster cpu:2x1;" in line


@needs_box
def test_a_plan_whose_nodes_are_not_the_hosts_is_refused(box: Box) -> None:
    for answer in box.run(bound, ranks=2):
        assert "rank 0 runs on host node0 and rank 1 on node1" in answer


def bound(group: dist.ProcessGroup) -> str:
    plan = flexcp.Planner(2, 2, 8, cluster=flexcp.cluster("cpu:1x2"))([40, 9])
    with pytest.raises(ValueError, match="plan for the hosts there are") as found:
        flexcp.bind(plan, group, timeout=30)
    return str(found.value)

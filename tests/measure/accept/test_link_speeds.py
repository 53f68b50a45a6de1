"""Tests of measured link speeds: every pair is measured, and a slow link, rank or node is named, however many of the
links it slows down.
"""

from __future__ import annotations

from itertools import combinations

import pytest
from cards import made_cards

import flexcp
from flexcp.clusters import Cluster
from flexcp.measure.accept.link_speeds import (
    MOST_ROUNDS,
    SIZES,
    PairLink,
    links_check,
    measure_level,
    tournament,
    usual_mbps,
)
from flexcp.measure.ranks import RankPool


def made_link(a: int, b: int, mbps: float, across: bool = True) -> PairLink:
    return PairLink(a, b, across, tuple(10_000 + 1000 * size / mbps for size in SIZES))


def machine(nodes: int, ranks: int) -> Cluster:
    return Cluster("made", nodes, ranks, 1000, intra_mbps=1000, inter_mbps=100, latency_ns=1000)


@pytest.mark.parametrize("players", range(1, 20))
def test_everybody_meets_everybody_once(players: int) -> None:
    rounds = tournament(players)
    met = [pair for pairs in rounds for pair in pairs]
    assert len(set(met)) == len(met)
    for pairs in rounds:
        assert len({player for pair in pairs for player in pair}) == players - players % 2
    if players <= MOST_ROUNDS:
        assert sorted(met) == list(combinations(range(players), 2))


def test_links_of_both_levels_are_measured(pool: RankPool) -> None:
    place = flexcp.cluster("cpu", 2, 2)
    for across, pairs in ((False, [(0, 1), (2, 3)]), (True, [(0, 2), (1, 3)])):
        answers = pool.run(measure_level, place, across, "cpu", ranks=4)
        assert all(answer == answers[0] for answer in answers)
        assert [(link.a, link.b) for link in answers[0]] == pairs
        assert all(link.mbps > 0 and link.latency_ns >= 0 and link.across == across for link in answers[0])
    assert pool.run(measure_level, flexcp.cluster("cpu", 1, 3), True, "cpu", ranks=3) == [[]] * 3


def test_a_link_has_the_speed_of_its_slope() -> None:
    assert made_link(0, 1, 250).mbps == pytest.approx(250) and made_link(0, 1, 250).latency_ns == pytest.approx(10_000)


@pytest.mark.parametrize("nodes", [3, 4, 6])
def test_a_slow_node_is_named_though_most_links_may_be_its(nodes: int) -> None:
    links = [made_link(a, b, 20 if 1 in (a, b) else 100) for a, b in combinations(range(nodes), 2)]
    assert usual_mbps(links) == pytest.approx(100)
    (line,) = links_check(links, machine(nodes, 1), made_cards("abcdef"[:nodes]), rehearsal=True).failures
    assert line.startswith(f"all {nodes - 1} links of node 1 (host b) across nodes are slow: 20 MB/s, usual are 100;")
    assert "network card" in line


def test_a_slow_rank_and_a_slow_pair_inside_a_node_are_named() -> None:
    slow = [made_link(a, b, 300 if 2 in (a, b) else 1000, False) for a, b in combinations(range(4), 2)]
    (line,) = links_check(slow, machine(1, 4), made_cards("aaaa"), rehearsal=False).failures
    assert line.startswith("all 3 links of rank 2 on host a inside nodes are slow: 300 MB/s, usual are 1,000;")
    pair = [made_link(a, b, 300 if (a, b) == (0, 3) else 1000, False) for a, b in combinations(range(4), 2)]
    (line,) = links_check(pair, machine(1, 4), made_cards("aaaa"), rehearsal=False).failures
    assert line.startswith(
        "the link inside nodes of rank 0 on host a and rank 3 on host a carries 300 MB/s, usual are 1,000;"
    )


def test_links_that_are_all_slower_than_the_cluster_says_are_one_line() -> None:
    links = [made_link(0, 2, 40), made_link(1, 3, 44)]
    check = links_check(links, machine(2, 2), made_cards("aabb"), rehearsal=False)
    (line,) = check.failures
    assert line.startswith(
        "links across nodes carry 42 MB/s (2 pairs of ranks), less than half of the 100 of cluster made:2x2;"
    )
    assert "--write-cost" in line and not check.passed
    assert links_check(links, machine(2, 2), made_cards("aabb"), rehearsal=True).passed


def test_half_is_enough_and_many_slow_links_are_few_lines() -> None:
    assert links_check([made_link(0, 1, 51)], machine(2, 1), made_cards("ab"), rehearsal=False).passed
    links = [made_link(a, b, 10 if b == a + 1 else 1000, False) for a, b in combinations(range(30), 2)]
    failures = links_check(links, machine(1, 30), made_cards("a" * 30), rehearsal=False).failures
    assert len(failures) == 9 and failures[-1].startswith("21 more links inside nodes are as slow")

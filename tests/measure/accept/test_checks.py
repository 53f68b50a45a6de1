"""Tests of the checks of ``flexcp accept`` that need no process group: a rank that runs other versions, or on another
host than planned, is named with the way out.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from cards import made_cards

import flexcp
from flexcp.measure.accept.checks import hosts_check, versions_check
from flexcp.measure.accept.rank_cards import own_card, rank_words, roll_call, source_hash
from flexcp.measure.local_store import kept_store


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("flexcp", "0.9", "runs flexcp 0.9, others 1.0; install the same on every host"),
        ("torch", "2.11.0", "runs torch 2.11.0, others 2.13.0; install the same on every host"),
        ("python", "3.12.1", "runs Python 3.12.1, others 3.11.7; install the same on every host"),
        ("nccl", "2.28.9", "runs NCCL 2.28.9, others of no version; install the same on every host"),
        (
            "source",
            "def",
            "runs other code of the same flexcp version (def, others abc); install the same on every host",
        ),
        ("device", "cuda", "computes on cuda, others on cpu; run on hosts of one kind"),
    ],
)
def test_a_rank_that_runs_something_else_is_named(field: str, value: str, said: str) -> None:
    cards = made_cards("aabb")
    assert versions_check(cards).passed
    cards[2] = replace(cards[2], **{field: value})
    (line,) = versions_check(cards).failures
    assert line.startswith(f"rank 2 on host b {said}")


def test_another_version_is_said_once_though_its_code_differs_too() -> None:
    cards = made_cards("aaabb")
    cards[3:] = [replace(card, flexcp="0.9", source="def") for card in cards[3:]]
    assert versions_check(cards).failures == (
        "ranks 3, 4 on host b run flexcp 0.9, others 1.0; install the same on every host",
    )


def test_nodes_that_are_not_hosts_fail_and_a_rehearsal_may_share_them() -> None:
    two = flexcp.cluster("h100:2x2")
    assert hosts_check(made_cards("aabb"), two, rehearsal=False).passed
    (line,) = hosts_check(made_cards("aaaa"), two, rehearsal=False).failures
    assert "rank 0 on node 0 and rank 2 on node 1, but both run on host a" in line and "--rehearsal" in line
    assert hosts_check(made_cards("aaaa"), two, rehearsal=True).passed
    for rehearsal in (False, True):  # a rehearsal cannot make links between hosts as fast as inside a node
        (line,) = hosts_check(made_cards("aabb"), flexcp.cluster("h100:1x4"), rehearsal).failures
        assert "rank 0 runs on host a and rank 2 on b" in line and "nodes=2, ranks_per_node=2" in line


def test_ranks_that_share_a_gpu_are_named() -> None:
    cards = made_cards("ab", device="cuda", gpu="H100", gpu_id="x")
    one = flexcp.cluster("h100:2x1")
    assert hosts_check(cards, one, rehearsal=False).passed  # the same number on another host is another GPU
    cards = made_cards("aa", device="cuda", gpu="H100", gpu_id="x")
    (line,) = hosts_check(cards, flexcp.cluster("h100:1x2"), rehearsal=False).failures
    assert "ranks 0 and 1 share a GPU of host a (H100)" in line and "--nproc-per-node" in line
    assert hosts_check(cards, flexcp.cluster("h100:1x2"), rehearsal=True).passed


def test_ranks_that_do_not_come_are_named() -> None:
    store, card = kept_store(), own_card(1, "cpu")
    with pytest.raises(RuntimeError, match=r"ranks 0, 2 of 3 did not come within 0.2 s"):
        roll_call(store, card, 3, 0.2)
    for rank in (0, 2):
        roll_call(store, replace(card, rank=rank), rank, 5.0)
    assert roll_call(store, card, 3, 5.0) == [replace(card, rank=rank) for rank in range(3)]
    assert card.flexcp == flexcp.__version__


def test_any_change_of_code_is_another_source(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1")
    first = source_hash(tmp_path)
    assert source_hash(tmp_path) == first
    (tmp_path / "a.py").write_text("x = 2")
    assert source_hash(tmp_path) != first


def test_of_many_ranks_some_are_named() -> None:
    assert rank_words([3]) == "rank 3"
    assert rank_words(range(20)) == "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 12 more"

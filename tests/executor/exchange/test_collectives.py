"""Proves the collectives that run beside attention: sums, gathers and messages are right, do not mix with each other,
and end with an error in time when a rank stays away.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import flexcp
from flexcp.data.row_sharing import Peers
from flexcp.executor.exchange.collectives import Collectives, Occasion
from flexcp.frameworks import shared_batch
from flexcp.measure.ranks import RankPool
from flexcp.telemetry.gather_on_rank_0 import gather_on_rank_0

RANKS = 3
LIMIT = timedelta(seconds=2)


def on_talk(group: dist.ProcessGroup) -> tuple[Any, ...]:
    collectives = Collectives(group, timedelta(seconds=30))
    x = torch.arange(6).view(2, 3).T * (collectives.rank + 1)  # not contiguous
    told = collectives.told("names", "x" * collectives.rank, torch.device("cpu"))
    return collectives.summed("sum", x).tolist(), [p.tolist() for p in collectives.gathered("gather", x)], told


def test_every_rank_hears_the_same(pool: RankPool) -> None:
    one = [[0, 3], [1, 4], [2, 5]]
    parts = [[[n * r for n in row] for row in one] for r in (1, 2, 3)]
    total = [[6 * n for n in row] for row in one]
    assert pool.run(on_talk, ranks=RANKS) == [(total, parts, ["", "x", "xx"])] * RANKS


def on_left_out_calls(group: dist.ProcessGroup) -> int:
    """Rank 1 skips exchanges in which it takes no part; a later sum over all ranks must still match up."""
    collectives = Collectives(group, timedelta(seconds=30))
    for _ in range(0 if collectives.rank == 1 else 3):
        other = 2 - collectives.rank
        collectives.exchange("a pair", {other: torch.ones(4)}, {other: torch.empty(4)})
    return int(collectives.summed("all", torch.tensor(collectives.rank)))


def test_a_rank_may_leave_out_what_it_has_no_part_in(pool: RankPool) -> None:
    assert pool.run(on_left_out_calls, ranks=RANKS) == [3] * RANKS


def test_tags_of_places_differ_from_each_other_and_from_passes() -> None:
    places = ["step.roll", "step.loss", "step.gather", "step.relayout", "step.restore", "image_rows"]
    places += [f"the backward of {place}" for place in places]
    places += ["the loader's exchange of lengths", "the loader's exchange of rows", "the loader's count of labels"]
    tags = {Occasion(place, number, step).tag(0, 0) for place in places for number in (1, 2) for step in (0, 1, 31)}
    assert len(tags) == 6 * len(places) and min(tags) >= 1 << 30 and max(tags) < 1 << 31  # attention uses lower tags


# --- a rank that stays away -------------------------------------------------------------------------------------------


def lengths(group: dist.ProcessGroup) -> None:
    Peers(group, LIMIT).all_gather("lengths")


def labels(group: dist.ProcessGroup) -> None:
    Peers(group, LIMIT).total(3)


def rows(group: dist.ProcessGroup) -> None:
    peers = Peers(group, LIMIT)
    sent = torch.ones(5, dtype=torch.uint8)
    peers.exchange({rank: sent for rank in range(RANKS) if rank != peers.rank}, {1: 5})


def documents(group: dist.ProcessGroup) -> None:
    tokens, planner = torch.zeros(4, dtype=torch.int64), flexcp.Planner(2, cluster=flexcp.cluster("cpu", 1, RANKS))
    shared_batch.DEFAULT_TIMEOUT = LIMIT
    shared_batch.share(tokens, tokens, [4], planner, group)


def meeting(group: dist.ProcessGroup) -> None:
    gather_on_rank_0({}, group, LIMIT)


def on_absence(group: dist.ProcessGroup, function: Callable[[dist.ProcessGroup], None]) -> str:
    """Return the error of a rank that waits in vain for rank 1, in a group of its own, which is unusable afterwards."""
    own = dist.new_group(list(range(RANKS)))
    assert isinstance(own, dist.ProcessGroup)
    if dist.get_rank(own) == 1:
        return ""
    try:
        function(own)
    except RuntimeError as error:
        return str(error)
    return "came through"


@pytest.fixture(scope="module")
def three() -> Any:
    with RankPool(RANKS, timeout=60) as ranks:
        yield ranks


@pytest.mark.parametrize(
    ("function", "place"),
    [
        (lengths, "receive from rank 1 in the loader's exchange of lengths, sizes (call 1)"),
        (labels, "receive from rank 1 in the loader's count of labels (call 1)"),
        (rows, "receive from rank 1 in the loader's exchange of rows (call 1)"),
        (documents, "receive from rank 1 in the exchange of batch sizes (call 1)"),
    ],
)
def test_whoever_waits_says_for_whom_and_where(three: RankPool, function: Any, place: str) -> None:
    first, _, third = three.run(on_absence, function)
    for rank, message in ((0, first), (2, third)):
        assert message.startswith(f"rank {rank} could not {place}: nothing within 1.5 s (of 2 s"), message


def test_a_meeting_says_who_did_not_come(three: RankPool) -> None:
    first, _, third = three.run(on_absence, meeting)
    assert "rank 0 waited for rank 1 for 2 s" in first and "rank 2 waited for rank 0 for 2 s" in third

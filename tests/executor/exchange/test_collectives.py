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
from flexcp.data.loader_agreement import check_same
from flexcp.data.reading.row_sharing import Peers
from flexcp.data.speeds.follow import SpeedFollower
from flexcp.executor.exchange.collectives import Collectives, Occasion, row_form
from flexcp.executor.local_rows import mean_over_ranks
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
    places += ["the loader's comparison of arguments", "the loader's exchange of speeds"]
    places += ["the loader's attempt to read its samples", "the loader's attempt to begin its stream"]
    places += ["the loader's exchange of rows", "the loader's count of labels"]
    tags = {Occasion(place, number, step).tag(0, 0) for place in places for number in (1, 2) for step in (0, 1, 31)}
    assert len(tags) == 6 * len(places) and min(tags) >= 1 << 30 and max(tags) < 1 << 31  # attention uses lower tags


# --- a rank that stays away -------------------------------------------------------------------------------------------


def arguments(group: dist.ProcessGroup) -> None:
    check_same({"seed": 1}, Peers(group, LIMIT))


def speeds(group: dist.ProcessGroup) -> None:
    planner = flexcp.Planner(2, cluster=flexcp.cluster("cpu", 1, RANKS))
    SpeedFollower(planner, 1, flexcp.Telemetry(), Peers(group, LIMIT)).after(0, 0, 1)


def reading(group: dist.ProcessGroup) -> None:
    Peers(group, LIMIT).attempt_together(lambda: None, "read its samples")


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
        (arguments, "receive from rank 1 in the loader's comparison of arguments, sizes (call 1)"),
        (speeds, "receive from rank 1 in the loader's exchange of speeds, sizes (call 1)"),
        (reading, "receive from rank 1 in the loader's attempt to read its samples, sizes (call 1)"),
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


# --- tensors that differ between ranks --------------------------------------------------------------------------------


def on_different_tensors(group: dist.ProcessGroup, forms: list[tuple[torch.dtype, list[int]]]) -> list[str]:
    """Gather, and exchange rows, in a group of its own; return the errors."""
    found = []
    for call in ("gather", "rows"):
        own = dist.new_group(list(range(RANKS)))
        assert isinstance(own, dist.ProcessGroup)
        collectives = Collectives(own, timedelta(seconds=30))
        dtype, shape = forms[collectives.rank]
        x = torch.ones(shape, dtype=dtype)
        try:
            if call == "gather":
                collectives.gathered("gather", x)
            else:
                arriving = {rank: torch.empty_like(x) for rank in collectives.others}
                collectives.exchange("rows", dict.fromkeys(collectives.others, x), arriving, row_form(x))
            found.append("came through")
        except ValueError as error:
            found.append(str(error))
            with pytest.raises(RuntimeError, match="unusable since an earlier failure"):
                collectives.exchange("later", {}, {collectives.others[0]: x})
    return found


@pytest.mark.parametrize(
    ("forms", "words"),
    [
        pytest.param(
            [(torch.float32, [4]), (torch.int32, [4]), (torch.float32, [4])], ("int32", "float32"), id="same width"
        ),
        pytest.param(
            [(torch.float32, [4, 2]), (torch.float32, [4, 2]), (torch.float32, [4, 3])], ("3]", "2]"), id="longer rows"
        ),
        pytest.param(
            [(torch.float64, [4]), (torch.float32, [4]), (torch.bfloat16, [4])], ("float", "float"), id="three dtypes"
        ),
    ],
)
def test_ranks_with_other_tensors_are_told_so_at_once(three: RankPool, forms: Any, words: tuple[str, str]) -> None:
    """Gloo alone would read the bytes of one dtype as another, or end the process where a tensor is longer."""
    errors = three.run(on_different_tensors, forms)
    for rank, of_rank in enumerate(errors):
        for place, error in zip(("gather", "rows"), of_rank, strict=True):
            assert f"to {place} (call 1), and rank {rank} " in error and "same dtype and row size" in error
            assert all(word in error for word in words), error


def on_different_counts(group: dist.ProcessGroup) -> float:
    collectives = Collectives(group, timedelta(seconds=30))
    count = [torch.tensor(0), torch.tensor(2.5), torch.tensor(1.5, dtype=torch.float64)][collectives.rank]
    return float(mean_over_ranks(torch.tensor(1.0), count, collectives, "share"))


def test_counts_may_have_any_dtype(pool: RankPool) -> None:
    assert pool.run(on_different_counts, ranks=RANKS) == [0.25] * RANKS


def on_weights(group: dist.ProcessGroup) -> float:
    collectives = Collectives(group, timedelta(seconds=30))
    return float(mean_over_ranks(torch.tensor(0.2), torch.tensor(0.125), collectives, "share"))


def test_weights_may_add_up_to_less_than_one(pool: RankPool) -> None:
    assert sum(pool.run(on_weights, ranks=2)) == pytest.approx(0.4 / 0.25)


def test_stamps_of_other_forms_differ() -> None:
    forms = ("", row_form(torch.ones(3, 2)), row_form(torch.ones(3, 2).double()), row_form(torch.ones(3, 4)))
    assert row_form(torch.ones(3, 2)) == row_form(torch.ones(9, 2)) == "rows of float32 of shape [2]"
    assert len({Occasion("step.roll", 1, 1, form).stamp for form in forms}) == 4
    assert Occasion("step.roll", 1, 1, tells_form=True).tag(0, 0) != Occasion("step.roll", 1, 1).tag(0, 0)

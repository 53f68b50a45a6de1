"""Tests of following measured speeds: telemetry's measurements reach the planner as corrections that are the same on
all ranks, take effect after the look-ahead, and can be replayed.
"""

from __future__ import annotations

from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
from made import Numbered, arguments
from misbehaving import planner

import flexcp
from flexcp.data import Loader
from flexcp.data.speeds.corrections import Correction, agreed_speeds, read_corrections, speeds_at
from flexcp.data.speeds.measured import MeasuredWork
from flexcp.measure.ranks import RankPool

LENGTHS = [300, 20, 260, 40, 180, 120] * 20
LOOKAHEAD, EVERY = 2, 3


def test_speeds_are_relative_rounded_and_near_ones_are_left_alone() -> None:
    assert agreed_speeds([(700, 1000), (1000, 1000), (1000, 1000)], [1000] * 3) == (700, 1000, 1000)
    assert agreed_speeds([(70, 1000), (100, 1000), (100, 1000)], [1000] * 3) == (
        700,
        1000,
        1000,
    )  # all ranks slower than predicted: an error of the cost model, which cancels out
    assert agreed_speeds([(1000, 1000), (980, 1000), (1000, 1000)], [1000] * 3) is None
    assert agreed_speeds([(704, 1000), (1000, 1000), (1000, 1000)], [700, 1000, 1000]) is None
    assert agreed_speeds([(1000, 1000), (1000, 1000), (1000, 1000)], [700, 1000, 1000]) == (1000, 1000, 1000)
    assert agreed_speeds([(0, 0), (1000, 1000), (500, 1000), (1000, 1000)], [900, 1000, 1000, 1000]) == (
        900,
        1000,
        500,
        1000,
    )
    assert agreed_speeds([(0, 0), (1000, 1000)], [1000, 1000]) is None
    for idle in range(4):  # ranks compute just as fast as assumed, so nothing changes, whichever has no work
        taken = [1000, 1000, 500, 500]
        told = [(0, 0) if rank == idle else (speed, 1000) for rank, speed in enumerate(taken)]
        assert agreed_speeds(told, taken) is None, idle
    assert agreed_speeds([(1, 10**9), (1000, 1000), (1000, 1000)], [1000] * 3) == (100, 1000, 1000)


def test_a_correction_is_in_force_from_its_step_on() -> None:
    told = [Correction(0, 7, (900, 1000)), Correction(1, 2, (800, 1000))]
    at = [(0, 6), (0, 7), (0, 99), (1, 0), (1, 2), (2, 0)]
    assert [speeds_at(told, *place) for place in at] == [None, *[(900, 1000)] * 3, (800, 1000), (800, 1000)]
    assert read_corrections([each.plain() for each in told], 2) == told
    assert read_corrections([each.plain() for each in told], 3) == []


@pytest.mark.parametrize(
    "values",
    [
        [[0, 7, [900.5, 1000]]],
        [[0, "7", [900, 1000]]],
        [[0, 7, [True, 1000]]],
        [[-1, 7, [900, 1000]]],
        [[0, 7, [0, 1000]]],
        [[0, 7, []]],
        [[0, 7, [900, 1000]], [0, 3, [800, 1000]]],
        [[0, 7]],
        7,
    ],
)
def test_damaged_corrections_are_refused(values: Any) -> None:
    with pytest.raises(ValueError, match=r"this state of a Loader is damaged: its speeds are"):
        read_corrections(values, 2)


def slowed(rank: int, slow: int | None) -> Any:
    """Patch measurements so that work takes the expected time, but on rank ``slow`` as long as at 70 % of its speed.

    The real measurement is only checked to be above 0, because its value depends on other work on the machine.
    """
    plain = MeasuredWork.since_last

    def since_last(work: MeasuredWork) -> tuple[int, int]:
        expected, took = plain(work)
        assert expected > 0 and took > 0
        return (700 if rank == slow else 1000), 1000

    return patch.object(MeasuredWork, "since_last", since_last)


def trained(group: Any, state: dict[str, Any] | None, steps: int, every: int, slow: int | None) -> dict[str, Any]:
    """Return the hashes and the work of the steps' plans, and the loader's states before and after them."""
    rank, ranks = group.rank(), group.size()
    telemetry = flexcp.Telemetry() if every else None
    options: dict[str, Any] = {"budget": 500, "lookahead": LOOKAHEAD, "workers": 1, "telemetry": telemetry}
    hashes, work = [], []
    data = Numbered(LENGTHS, known=True)
    fields = {"document_fields": ["images"], "group": group}
    made = Loader(data, planner(ranks, "groups"), **arguments(follow_speeds=every, **options, **fields))
    with slowed(rank, slow), made as loader:
        if state is not None:
            loader.load_state_dict(state)
        before = loader.state_dict()
        for batch in loader:
            hashes.append(batch.step.plan.hash)
            work.append(batch.step.plan.work().tolist())
            if slow is not None:
                q = torch.zeros(len(batch.tokens), 4, 32, requires_grad=True)
                k, v = (torch.zeros(len(batch.tokens), 2, 32) for _ in range(2))
                flexcp.attention(q, k, v, batch.step).sum().backward()
            if len(hashes) == steps:
                break
        return {"hashes": hashes, "work": work, "before": before, "after": loader.state_dict()}


def test_a_slow_rank_gets_less_after_the_look_ahead_and_a_replay_plans_the_same(pool: RankPool) -> None:
    ranks = 2
    slow, steps = ranks - 1, EVERY + LOOKAHEAD + 2
    found = pool.run(trained, None, steps, EVERY, slow, ranks=ranks)
    told = found[0]["after"]["speeds"]
    assert all(each["after"]["speeds"] == told and each["hashes"] == found[0]["hashes"] for each in found)
    epoch, first, speeds = told[0]
    assert (epoch, first) == (0, EVERY + LOOKAHEAD)  # the first step whose plan had not been ordered yet
    assert speeds == [700 if rank == slow else 1000 for rank in range(ranks)]

    plain = pool.run(trained, None, steps, 0, None, ranks=ranks)[0]
    less, usual = (sum(work[slow] / sum(work) for work in each["work"][first:]) for each in (found[0], plain))
    assert less < 0.95 * usual
    assert plain["hashes"][:first] == found[0]["hashes"][:first] and plain["hashes"][first] != found[0]["hashes"][first]
    assert plain["after"]["speeds"] == []
    replayed = pool.run(trained, found[0]["before"] | {"speeds": told}, steps + 2, 0, None, ranks=ranks)
    assert all(each["hashes"][:steps] == found[0]["hashes"] for each in replayed)
    resumed = pool.run(trained, found[0]["after"], 2, 0, None, ranks=ranks)[0]
    assert resumed["hashes"] == replayed[0]["hashes"][steps:] and resumed["after"]["speeds"] == told


def test_following_needs_something_that_measures_and_a_planner_that_can() -> None:
    options: dict[str, Any] = {"budget": 500, "workers": 0}
    with pytest.raises(ValueError, match=r"follow_speeds=5 needs telemetry=flexcp\.Telemetry"):
        Loader(Numbered(LENGTHS), planner(1), **arguments(follow_speeds=5, **options))
    with pytest.raises(ValueError, match=r"follow_speeds is a count of steps .*got -1"):
        Loader(Numbered(LENGTHS), planner(1), telemetry=flexcp.Telemetry(), **arguments(follow_speeds=-1, **options))
    no_planner = cast(Any, lambda lengths: None)
    with pytest.raises(ValueError, match="follow_speeds=5 needs a planner with a cluster and with_speeds"):
        Loader(Numbered(LENGTHS), no_planner, telemetry=flexcp.Telemetry(), **arguments(follow_speeds=5, **options))

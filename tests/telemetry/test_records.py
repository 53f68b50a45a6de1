"""Tests of telemetry records: the time stamps of a pass say where it is and how long it waited, packed and computed;
messages are those of the plan; and memory is bounded.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from runs import TOKENS, plan_for

import flexcp
from flexcp.telemetry.records import PASSES, PassRecord, StepRecord, Times
from flexcp.telemetry.scalars import scalars


def ticking(gaps: list[int]) -> Iterator[int]:
    """Yield the times of a clock that starts at 100 and advances by each gap."""
    now = 100
    yield now
    for gap in gaps:
        now += gap
        yield now


def record(slots: int, gaps: list[int], seen: list[str] | None = None) -> PassRecord:
    clock = ticking(gaps)
    told = [] if seen is None else seen
    return PassRecord("full", False, 0, slots, lambda: next(clock), lambda p, e: told.append(f"{p.reached()}: {e}"))


def test_the_gaps_between_stamps_are_wait_pack_and_compute() -> None:
    p = record(2, [1, 20, 300, 4, 50, 600, 7])
    with p.running():
        for _ in range(6):
            p.mark()
    assert p.finished()
    assert p.times() == Times(wait=1 + 4 + 7, pack=20 + 50, compute=300 + 600)
    assert p.reached() == "done"


def test_a_pass_without_transfers_only_computes() -> None:
    p = record(1, [40])
    with p.running():
        assert p.reached() == "begins"
    assert p.times() == Times(0, 0, 40)


def test_the_number_of_stamps_says_where_a_pass_is() -> None:
    p = record(2, [1] * 8)
    places = [p.reached()]
    with p.running():
        for _ in range(6):
            places.append(p.reached())
            p.mark()
        places.append(p.reached())
    assert places == [
        "not begun",
        "begins",
        "packs what leaves for stage 1",
        "computes slot 0",
        "waits for the transfers of stage 1",
        "packs what leaves for stage 2",
        "computes slot 1",
        "waits until all it sent has left",
    ]


def test_an_error_is_told_where_it_happened_and_goes_on() -> None:
    seen: list[str] = []
    p = record(2, [1] * 8, seen)
    with pytest.raises(ZeroDivisionError), p.running():
        p.mark()
        p.mark()
        raise ZeroDivisionError("no")
    assert seen == ["computes slot 0: no"]
    assert p.error == "ZeroDivisionError: no"
    assert not p.finished()


SCATTERED = [np.random.default_rng(0).permutation(TOKENS)[r::4].tolist() for r in range(4)]


@pytest.mark.parametrize(
    ("strategy", "layout"), [("blocks", "free"), ("ring", "free"), ("usp:2,2", "free"), ("blocks", SCATTERED)]
)
def test_messages_are_the_plans_bytes_stage_by_stage(strategy: str, layout: Any) -> None:
    masks = {"full": (flexcp.full(), 1), "window": (flexcp.window(4), 3)}
    plan = plan_for(4, strategy=strategy, masks=masks, layout=layout)
    assert plan.placement.assemble_own == (layout is SCATTERED)
    for number, name in enumerate(("full", "window")):
        for backward in (False, True):
            sent, received = np.zeros((4, 4), np.int64), np.zeros((4, 4), np.int64)
            for rank in range(4):
                stages = StepRecord(0, plan, 0, rank).messages(name, backward)
                assert len(stages) == plan.programs[number][backward].stages
                for sends, receives in stages:
                    assert rank not in [peer for peer, _ in sends + receives]
                    for peer, count in sends:
                        sent[rank, peer] += count
                    for peer, count in receives:
                        received[peer, rank] += count
            np.testing.assert_array_equal(sent, plan.bytes(backward, number))
            np.testing.assert_array_equal(received, plan.bytes(backward, number))


def test_a_step_keeps_its_last_passes_only() -> None:
    step = StepRecord(0, plan_for(1), 0, 0)
    for number in range(PASSES + 10):
        step.passes.append(PassRecord("mask", False, number, 1, lambda: 0, lambda p, e: None))
    assert len(step.passes) == PASSES
    assert step.passes[0].number == 10


def test_balance_is_weighted_by_layers() -> None:
    masks = {"full": (flexcp.full(), 1), "window": (flexcp.window(4), 3)}
    plan = plan_for(3, strategy="zigzag", masks=masks)
    work = plan.work(0) + 3 * plan.work(1)
    step = StepRecord(0, plan, 5_000_000, 0)
    assert step.compute_balance == work.max() * 3 / work.sum()
    found = scalars(step)
    assert found["flexcp/planning_wait_ms"] == 5.0
    assert found["flexcp/wait_share"] == 0.0
    assert found["flexcp/token_balance"] == plan.placement.tokens.max() * 3 / plan.placement.tokens.sum()

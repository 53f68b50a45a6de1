"""Proves what a Telemetry records of real ranks, and the trace and scalars made of it.
Nothing here is about how long anything took.

Without a Telemetry, no function of flexcp.telemetry is called in a step. Overhead is benchmarks/telemetry.py's.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from runs import plan_for, train

import flexcp
import flexcp.data
from flexcp.measure.ranks import RankPool
from flexcp.plan.plan import Plan
from flexcp.telemetry.gather_on_rank_0 import gather_on_rank_0
from flexcp.telemetry.records import StepRecord
from flexcp.telemetry.scalars import scalars
from flexcp.telemetry.trace import trace

MASKS = {"full": (flexcp.causal(), 1), "window": (flexcp.window(4), 2)}


def on_steps(group: dist.ProcessGroup, plans: list[Plan], path: str) -> dict[str, Any]:
    """Run a step for each plan, with one layer of each mask, forward and backward; then write a trace."""
    telemetry = flexcp.Telemetry(keep=2)
    for plan in plans:
        with telemetry.planning():
            pass
        step = flexcp.bind(plan, group, telemetry=telemetry)
        for mask in ("full", "window"):
            train(step, mask=mask)
    telemetry.trace(path, group)
    last = telemetry.steps[-1]
    return {
        "numbers": [s.number for s in telemetry.steps],
        "hashes": [s.plan.hash for s in telemetry.steps],
        "passes": [(p.name, p.slots, len(p.stamps), p.reached()) for p in last.passes],
        "times": [all(t >= 0 for t in p.times()) and p.times().compute > 0 for p in last.passes],
        "sent": (last.sent_bytes(), sum(sum(x) for x in step.sent_bytes.values())),
        "planning_wait": last.planning_wait,
    }


def called_in_a_step(group: dist.ProcessGroup, plan: Plan, telemetry: flexcp.Telemetry | None) -> set[str]:
    """Return the modules of flexcp.telemetry of which a function is called while a step is bound and trained."""
    found: set[str] = set()

    def profile(frame: Any, event: str, argument: Any) -> None:
        name = str(frame.f_globals.get("__name__", ""))
        if event == "call" and name.startswith("flexcp.telemetry"):
            found.add(name)

    sys.setprofile(profile)
    try:
        train(flexcp.bind(plan, group, telemetry=telemetry))
    finally:
        sys.setprofile(None)
    return found


def on_meeting(group: dist.ProcessGroup) -> Any:
    from datetime import timedelta

    return gather_on_rank_0({"rank": dist.get_rank(group)}, group, timedelta(seconds=20))


def test_passes_bytes_and_plans_are_recorded_and_only_the_last_steps_kept(pool: RankPool, tmp_path: Path) -> None:
    plans = [plan_for(3, masks=MASKS, strategy=s) for s in ("zigzag", "ring", "blocks")]
    path = tmp_path / "trace.json"
    for answer in pool.run(on_steps, plans, str(path), ranks=3):
        assert answer["numbers"] == [1, 2]
        assert answer["hashes"] == [p.hash for p in plans[1:]]
        programs = [plans[2].programs[m][b] for m in (0, 1) for b in (False, True)]
        names = ["forward full", "backward full", "forward window", "backward window"]
        expected = [(n, p.stages, 3 * p.stages + 2, "done") for n, p in zip(names, programs, strict=True)]
        assert answer["passes"] == expected
        assert all(answer["times"])
        assert answer["sent"][0] == answer["sent"][1] > 0
        assert answer["planning_wait"] > 0
    check_trace(json.loads(path.read_text()), plans[1:])


def check_trace(found: dict[str, Any], plans: list[Plan]) -> None:
    """Check that a trace has all ranks, and every message of the plans once on each side, with an arrow that goes
    forward in time.
    """
    events = found["traceEvents"]
    named = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert named == {r: f"rank {r}" for r in range(3)}
    tracks = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert list(tracks.values()) == ["slots", "compute", "wait", "pack", "send", "receive"]
    slices = [e for e in events if e["ph"] == "X"]
    assert all(e["dur"] >= 0 and e["ts"] >= 0 for e in slices)
    for number, plan in enumerate(plans, 1):
        mine = [e for e in slices if e["args"]["step"] == number]
        for side, axis in (("send", 0), ("receive", 1)):
            moved = np.zeros((3, 3), np.int64)
            for e in (e for e in mine if e["cat"] == side):
                pair = (e["pid"], e["args"]["peer"])
                moved[pair[axis], pair[1 - axis]] += e["args"]["bytes"]
            expected = sum(plan.bytes(b, m) for m in (0, 1) for b in (False, True))
            np.testing.assert_array_equal(moved, expected)
        for rank in range(3):
            slots = {e["name"] for e in mine if e["pid"] == rank and e["cat"] == "slots"}
            stages = plan.programs[1][True].stages
            assert {f"backward window stage {s}" for s in range(stages)} <= slots
    arrows = {phase: {e["id"]: e["ts"] for e in events if e["ph"] == phase} for phase in "sf"}
    assert arrows["s"].keys() == arrows["f"].keys() and arrows["s"]
    wrong = 2 * found["otherData"]["largest clock error in us"]
    assert all(arrows["f"][flow] >= sent - wrong for flow, sent in arrows["s"].items())
    steps = found["otherData"]["steps"]
    assert [s["number"] for s in steps] == [2, 1]
    assert [s["hash"] for s in steps] == [p.hash for p in reversed(plans)]
    assert all(s["measured compute balance"] >= 1 and 0 <= s["wait share"] < 1 for s in steps)


def message_bars(ahead: int) -> dict[str, tuple[float, float]]:
    """Return begin and end, in microseconds, of the messages that a trace draws for stage 2 of a pass of three stages
    whose time stamps are one microsecond apart.
    """
    messages = [([], []), ([], []), ([(1, 8)], [(1, 8)])]
    done = {"name": "forward", "number": 0, "times": [1000 * t for t in range(11)], "spans": []}
    step = {"number": 0, "hash": "h", "strategy": "ring", "compute_balance": 1.0, "sent_bytes": 8, "passes": [done]}
    step |= {"messages": {"forward": messages}, "ahead": {"forward": [0, 1, ahead]}}
    found = trace([{"rank": 0, "offset_ns": 0, "offset_error_ns": 0, "steps": [step]}])["traceEvents"]
    return {e["cat"]: (e["ts"], e["ts"] + e["dur"]) for e in found if e["ph"] == "X"}


@pytest.mark.parametrize(("ahead", "send", "receive"), [(2, (1, 2), (2, 7)), (1, (4, 5), (5, 7)), (0, (6, 7), (6, 7))])
def test_messages_are_drawn_in_the_slot_in_which_the_plan_posts_them(
    ahead: int, send: tuple[float, float], receive: tuple[float, float]
) -> None:
    assert message_bars(ahead) == {"send": send, "receive": receive}


def test_a_record_says_how_far_ahead_stages_are_posted() -> None:
    plan = plan_for(3, strategy="ring")
    record = StepRecord(0, plan, 0)
    name = plan.batch.masks[0].name
    assert record.ahead(name, True) == plan.programs[0][True].execution.ahead.tolist()


def test_steps_in_use_at_once_are_kept_apart() -> None:
    """A pipeline binds all its micro-batches, then runs them interleaved; two of them may have the same plan."""
    telemetry, plan = flexcp.Telemetry(keep=3), plan_for(1)
    steps = [flexcp.bind(plan, telemetry=telemetry) for _ in range(3)]
    for number, step in enumerate(steps):
        train(step, layers=number + 1)
    train(steps[0])
    assert [len(s.passes) for s in telemetry.steps] == [4, 4, 6]
    late = flexcp.bind(plan, telemetry=telemetry)
    train(steps[0])  # its record was dropped to make room, so the step gets a new one
    train(late)
    assert [(s.number, len(s.passes)) for s in telemetry.steps] == [(2, 6), (3, 2), (4, 2)]


def test_the_loader_hands_it_on() -> None:
    planner = flexcp.Planner(4, 2, 8, 6, "float64", flexcp.cluster("cpu", 1, 1), strategy="dp")
    telemetry = flexcp.Telemetry()
    samples = [{"tokens": torch.arange(n)} for n in (7, 30, 12)]
    with flexcp.data.Loader(
        samples, planner, budget=40, telemetry=telemetry, planning=flexcp.data.Planning(workers=0)
    ) as loader:
        for batch in loader:
            train(batch.step)
    assert [s.plan.batch.lengths.tolist() for s in telemetry.steps] == [[7, 30], [12]]
    assert all(s.planning_wait > 0 and len(s.passes) == 2 for s in telemetry.steps)


def test_nobody_watches_by_default(pool: RankPool) -> None:
    plan = plan_for(2)
    assert pool.run(called_in_a_step, plan, None, ranks=2) == [set(), set()]
    for called in pool.run(called_in_a_step, plan, flexcp.Telemetry(), ranks=2):
        assert "flexcp.telemetry.records" in called


def test_one_rank_traces_without_a_group(tmp_path: Path) -> None:
    telemetry = flexcp.Telemetry()
    train(flexcp.bind(plan_for(1), telemetry=telemetry))
    telemetry.trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert [e["name"] for e in events if e["ph"] == "X" and e["cat"] == "compute"] == [
        "forward mask stage 0",
        "backward mask stage 0",
    ]
    assert not [e for e in events if e["ph"] == "X" and e["cat"] in ("send", "receive", "wait")]


def test_clocks_of_one_machine_are_found_to_agree(pool: RankPool) -> None:
    answers = pool.run(on_meeting, ranks=4)
    assert answers[1:] == [None, None, None]
    assert [facts["rank"] for facts in answers[0]] == [0, 1, 2, 3]
    for facts in answers[0]:
        assert abs(facts["offset_ns"]) <= facts["offset_error_ns"] < 1e9


def test_scalars_reach_tensorboard_once_a_step(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    telemetry, plan = flexcp.Telemetry(), plan_for(1)
    with SummaryWriter(str(tmp_path)) as writer:
        telemetry.log(writer)
        for _ in range(3):
            with telemetry.planning():
                pass
            step = flexcp.bind(plan, telemetry=telemetry)
            telemetry.log(writer)  # nothing has run yet, so nothing is logged
            train(step)
            telemetry.log(writer)
        telemetry.log(writer)
    found = EventAccumulator(str(tmp_path))
    found.Reload()
    expected = scalars(telemetry.steps[-1])
    assert set(found.Tags()["scalars"]) == set(expected)
    for tag, value in expected.items():
        points = found.Scalars(tag)
        assert [p.step for p in points] == [0, 1, 2]
        assert points[-1].value == pytest.approx(value)
    assert expected["flexcp/planning_wait_ms"] > 0 and expected["flexcp/compute_ms"] > 0


def test_settings_may_be_numbers_of_numpy() -> None:
    made = flexcp.Telemetry(keep=np.int64(3), stall=np.float32(60), check_every=np.int64(2))  # type: ignore[arg-type]
    assert made._steps.maxlen == 3 and type(made._stall) is float


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"keep": 0}, "keep is a whole number of at least 1; got 0"),
        ({"check_every": -1}, "check_every is a whole number of at least 0; got -1"),
        ({"check_rows": 0.5}, "check_rows is a whole number of at least 1; got 0.5"),
        ({"keep": True}, "keep is a whole number of at least 1; got True"),
        ({"stall": 0}, "stall is a number of seconds above 0 and at most 10,000,000; got 0; pass None for no watch"),
        ({"stall": "60"}, "stall is a number of seconds above 0 .*; got '60'"),
        ({"nan_check": "no"}, "nan_check is True or False; got 'no'"),
        ({"seed": None}, "seed is a whole number of at least 0; got None"),
        ({"seed": -1}, "seed is a whole number of at least 0; got -1"),
        ({"dump_dir": 3}, "dump_dir is a folder, or None for no dumps; got 3"),
    ],
)
def test_wrong_settings_are_refused(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        flexcp.Telemetry(**wrong)

"""Tests of replay: the kernels of every rank run exactly where the plan has work, and their measured times replace
those of the cost model in a simulation.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from torch import Tensor

import flexcp
from flexcp.executor.kernels import Settings, cpu
from flexcp.masks import area
from flexcp.measure.calibrate import replay as replay_module
from flexcp.measure.calibrate.replay import replay, slot_times
from flexcp.plan.plan import Plan
from flexcp.simulator.passes import Rules
from flexcp.simulator.slot_work import slot_work


def plan_of(strategy: str) -> Plan:
    planner = flexcp.Planner(4, 2, 8, cluster=flexcp.cluster("cpu", 1, 3), dtype="float32", strategy=strategy)
    return planner([200, 31, 90])


@pytest.mark.parametrize("strategy", ["blocks", "zigzag", "allgather"])
def test_times_are_where_work_is(strategy: str) -> None:
    plan = plan_of(strategy)
    launched: list[int] = []
    for backward in (False, True):
        pairs = slot_work(plan, 0, backward).pairs
        launched.clear()
        name = "backward" if backward else "forward"
        real = getattr(cpu, name)

        def counted(*arguments: Any, real: Any = real, at: int = 6 if backward else 3) -> None:
            launched.append(int(area(arguments[at]).sum()) * arguments[0].shape[1])
            real(*arguments)

        with patch.object(cpu, name, counted):
            found = slot_times(plan, 0, backward, repeats=1)
        if not plan.programs[0][backward].held:  # held work is cut at whole tiles, and these documents have few
            assert ((found > 0) == (pairs > 0)).all()
        assert ((found > 0).any(axis=1) == (pairs > 0).any(axis=1)).all()
        assert sum(launched) == 2 * pairs.sum()  # once to warm up, once timed


def test_ranks_take_turns_in_alternating_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is timed late in a round finds a hotter GPU, so no rank is always the last; times are medians of rounds."""
    plan, seen = plan_of("zigzag"), list[int]()
    tokens = plan.placement.tokens.tolist()
    times = {1: [9e9, 5.0, 1.0, 2.0]}

    def timed(rank: int, own: dict[int, dict[str, Tensor]], *_: Any) -> list[float]:
        seen.append(rank)
        assert {len(x) for fields in own.values() for x in fields.values()} == {tokens[rank]}
        return [times[rank].pop(0) if rank in times else 7.0]

    # A rank's program, its recipe and what is prepared of it are the rank's number here.
    monkeypatch.setattr(replay_module, "rank_program", lambda plan, rank, *_: rank)
    for name in ("pass_recipe", "prepare"):
        monkeypatch.setattr(replay_module, name, lambda rank, *_: rank)
    monkeypatch.setattr(replay_module, "_timed_pass", timed)
    found = slot_times(plan, 0, False, repeats=3)
    assert seen == [0, 1, 2, 2, 1, 0] * 2
    assert found[:, 0].tolist() == [7, 2, 7] and not found[:, 1:].any()  # the first round warms up


def test_lists_share_a_dq_as_the_executor_lets_them() -> None:
    """A kernel that can leave dq open opens it once a pass, before its first list, and closes it after its last."""
    plan, calls = plan_of("zigzag"), list[str]()

    def seen(name: str) -> Any:
        def call(*arguments: Any, **options: Any) -> str:
            open_dq = any(isinstance(x, Settings) and x.open_dq for x in arguments)
            calls.append(f"{name} {options['opened']}" if open_dq else name)
            return "shared"

        return call

    names = {"open_dq": "open", "backward": "add to", "close_dq": "close"}
    with ExitStack() as patches:
        for function, name in names.items():
            patches.enter_context(patch.object(cpu, function, seen(name), create=True))
        found = slot_times(plan, 0, True, repeats=1)
    busy = [rank for rank in range(plan.ranks) if found[rank].any()]
    passes = 2 * len(busy)  # each rank's pass runs twice, the first time to warm up
    assert calls.count("open") == calls.count("close") == passes and "add to shared" in calls
    first_pass = calls[: calls.index("close") + 1]
    assert first_pass == ["open", *["add to shared"] * (len(first_pass) - 2), "close"]
    assert (found > 0).sum(axis=1).max() > 1, "some rank has several lists"


def test_measured_compute_is_in_the_simulation() -> None:
    plan = plan_of("zigzag")
    said: list[str] = []
    found = replay(plan, repeats=1, rules=Rules(contention=False, copy_mbps=0), say=said.append)
    assert [text.split()[-1] for text in said] == ["forward", "backward"]
    forward = found.passes[0][0]
    np.testing.assert_array_equal(forward.compute_ns, forward.model.ns.sum(axis=1))
    assert found.attention_ns >= sum(int(p.model.ns.sum(axis=1).max()) for p in found.passes[0])

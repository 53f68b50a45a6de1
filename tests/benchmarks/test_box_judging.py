"""Tests of how predicted step times are judged against steps measured in the emulated cluster (the *box*), and of the
machines that it emulates.
"""

from __future__ import annotations

import numpy as np
import pytest

from box_error import BATCHES, CALIBRATION, LOADS, STRATEGIES, UNLIMITED
from box_page import page, step_errors, summary
from flexcp.planners.strategies import STRATEGIES as ALL
from flexcp.planners.strategies import find_strategy
from lib.box_calibration import Host, Port, host_ns
from lib.box_judging import BoxStep, Calibrated, order, regrets
from lib.box_machine import INSIDE, Machine, communication_share, compute_seconds, mbit_for, paced_machine

NOTHING = ((), ())
HOST = Host(1000, 100, 10, 500, NOTHING)


def step(strategy: str, measured: float, predicted: float, load: float = 0.5, batch: str = "mixed") -> BoxStep:
    return BoxStep(batch, load, strategy, 1.0, measured, predicted)


def machine(ports: tuple[Port, Port] = (UNLIMITED, UNLIMITED)) -> Machine:
    return paced_machine(2, 2, CALIBRATION, 0.8, ports, HOST)


def test_pairs_count_where_they_are_predicted_apart_on_one_machine() -> None:
    steps = [step("auto = groups", 100, 100), step("ring", 120, 111), step("zigzag", 90, 112), step("dp", 500, 105)]
    found = order(steps)
    # That ring is slower than auto is right, that zigzag is slower is wrong; the prediction of dp is too near to all.
    assert (found.pairs, found.right) == (2, 1)
    other = [step("auto", 100, 100), step("ring", 100, 200, load=1.0), step("dp", 100, 200, batch="one")]
    assert order(other).pairs == 0
    assert regrets(steps) == [pytest.approx(100 / 90)]


def test_errors_are_of_predicted_over_measured() -> None:
    off = step_errors([step("a", 100, 90), step("b", 100, 130, load=0.1)])
    assert (off.count, off.worst) == (2, 0.3)
    rows = summary([step("auto", 100, 90), step("b", 100, 130, load=0.1)])
    assert rows[2].startswith("| 0.1 | 1 | 30.0% |") and rows[4].startswith("| all | 2 |")


def test_the_page_says_what_the_machine_was_and_whether_it_was_idle() -> None:
    held = ((110.0, 100.0), (100.0, 100.0))
    port = Port(12.5, 1_500_000, held)
    found = page(
        [step("auto", 100, 90)], [Calibrated("mixed", 0.5, 100, port, port)], HOST._replace(held=held), 3.21, "make box"
    )
    assert (
        "not idle: load average 3.2 before it began" in found
        and "| mixed | 0.5 | auto | 1.00 | 100 | 90 | -10% |" in found
    )
    assert "| mixed | 0.5 | 12.5 | 12.5 | 1.50 | 5.0% | 10.0% | 50.0 | 12.5 |" in found
    assert ", idle." in page([step("auto", 100, 90)], [], HOST._replace(held=held), 0.1, "make box")


def test_every_strategy_is_run_at_the_three_loads() -> None:
    assert LOADS == (0.1, 0.5, 1.0) and {name.partition(":")[0].partition("@")[0] for name in STRATEGIES} == set(ALL)
    assert all(find_strategy(name) for name in STRATEGIES)
    assert CALIBRATION not in BATCHES.values()


def test_a_paced_machine_needs_the_asked_time_and_carries_the_asked_load() -> None:
    guess = machine()
    plans = guess.plans(CALIBRATION, ("zigzag", "ring", "dp"))
    ideal = sum(plans["zigzag"].work()) / 4 / plans["zigzag"].work().max() * compute_seconds(plans["zigzag"], guess)
    assert ideal == pytest.approx(0.8, rel=0.1)  # GFLOP/s are whole numbers
    mbit = mbit_for(0.5, {name: plans[name] for name in ("zigzag", "dp")}, guess)
    port = Port(mbit / 8, 0, NOTHING)
    paced = machine((port._replace(mbps=INSIDE * port.mbps), port))
    assert communication_share(plans["zigzag"], paced) == pytest.approx(0.5, rel=0.02)
    assert communication_share(plans["dp"], paced) == 0


def test_strategies_of_one_plan_share_a_row() -> None:
    found = machine().plans(CALIBRATION, ("zigzag:4", "dp", "zigzag"))
    assert list(found) == ["zigzag:4 = zigzag", "dp"]


def test_hosts_pay_for_slots_and_for_pieces_at_both_ends() -> None:
    plan = machine().plans(CALIBRATION, ("zigzag",))["zigzag"]
    program = plan.programs[0][0]
    moves = int(np.sum(program.transfers.source != program.transfers.target))
    own = len(program.transfers) - moves
    assert host_ns(HOST, plan, False).sum() == 1000 * plan.ranks * program.stages + 100 * (2 * moves + own)
    # The prediction includes the work of the hosts (CPUs), beside the paced compute and transfers.
    slow = Machine(machine().cluster, machine().cost, Host(50_000_000, 100, 10, 500, NOTHING))
    assert slow.predicted_ms(plan) > machine().predicted_ms(plan) + 2 * 50

"""Tests of prices by tile: prices are found again from calls that were timed by them, plans are timed call by call, and
calibration files keep prices.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import flexcp
from flexcp.calibration import Calibration, CallPrices, TileTimes, read_calibration
from flexcp.cli.main import app
from flexcp.cost import CostModel
from flexcp.executor.run.rank_program import rank_program
from flexcp.measure.calibrate.kernels import sample_of
from flexcp.measure.calibrate.tiles import FITTED, PlanSlots, fit_tiles, one_kv_head, single_call, the_plan
from flexcp.measure.tile_times import TimedCalls, adding, call_ns, counted, fit_prices, plan_calls, slot_times
from flexcp.shape import Shape
from flexcp.simulator.training import simulate

SHAPE = Shape(8, 2, 128, 128)
UNITS = 16
FORWARD = CallPrices(((1600.0, 2800.0, 3800.0, 1200.0),), 7000.0)
BACKWARD = CallPrices(((1700.0, 1900.0, 6400.0), (1800.0, 3400.0, 4800.0)), 16_000.0)
TIMES = TileTimes(UNITS, 128, 128, FORWARD, BACKWARD)
NAMES = ("causal", "full", "docs4", "docs16", "lambda", "blockwise")


def timed(shape: Shape, name: str, tokens: int, backward: bool, times: TileTimes = TIMES) -> TimedCalls:
    """Return a workload whose time is computed from the prices."""
    prices = times.backward if backward else times.forward
    call = single_call(shape, sample_of(name, tokens, shape, backward, 0.0), times.multiprocessors).calls[0]
    return TimedCalls(name, [call], call_ns(call, prices))


@pytest.mark.parametrize("backward", [False, True])
def test_a_fit_finds_the_prices_that_calls_were_timed_with(backward: bool) -> None:
    samples = [timed(SHAPE, name, n, backward) for name in NAMES for n in (256, 512, 1024, 2048)]
    more = [replace_adds(s, backward) for s in samples]
    found, truth = fit_prices([*samples, *more]), BACKWARD if backward else FORWARD
    assert found.call_ns == pytest.approx(truth.call_ns, rel=1e-6)
    assert np.concatenate(found.launches) == pytest.approx(np.concatenate(truth.launches), rel=1e-6)


def replace_adds(sample: TimedCalls, backward: bool) -> TimedCalls:
    """Return the same call on rows that already have results, to which a forward must add."""
    if backward:
        return sample
    (launch,) = sample.calls[0]
    call = [np.concatenate([launch[:, :3], launch[:, 2:3]], axis=1)]
    return TimedCalls(sample.name, [call], call_ns(call, FORWARD))


def test_no_price_is_negative_and_nothing_to_fit_is_an_error() -> None:
    samples = [
        TimedCalls(s.name, s.calls, 1e5 / (1 + i)) for i, s in enumerate(timed(SHAPE, n, 512, False) for n in NAMES)
    ]
    found = fit_prices(samples)
    assert min(*found.launches[0], found.call_ns) >= 0
    with pytest.raises(ValueError, match="at least one timed call"):
        fit_prices([TimedCalls("nothing", [[]], 0.0)])


def test_a_launch_lasts_as_long_as_its_busiest_program() -> None:
    call = [np.array([[1, 0, 1, 0], [2, 3, 1, 1]])]
    assert call_ns(call, FORWARD) == 7000 + 2 * 1600 + 3 * 2800 + 3800 + 1200
    assert call_ns([], FORWARD) == 0


def test_lists_add_where_an_earlier_one_wrote_the_same_heads() -> None:
    lists = [(0, 0, 4), (0, 4, 8), (1, 0, 8), (0, 2, 6), (1, 7, 8), (2, 0, 8)]
    assert adding(lists) == [False, False, False, True, True, False]


def test_slower_ranks_take_longer() -> None:
    planner = flexcp.Planner(8, 2, 128, cluster=flexcp.cluster("h100", 1, 2, speeds=[1.0, 0.5]), strategy="ring")
    plan = planner([1500, 400])
    even = replace(plan, cluster=flexcp.cluster("h100", 1, 2))
    slow, nominal = (slot_times(p, 0, False, TIMES) for p in (plan, even))
    assert np.array_equal(slow[0], nominal[0]) and np.all(np.abs(slow[1] - 2 * nominal[1]) <= 1)


def test_a_plans_slots_are_its_work_lists_and_add_after_the_first() -> None:
    planner = flexcp.Planner(8, 2, 128, cluster=flexcp.cluster("h100", 1, 2), strategy="ring")
    plan = planner([1500, 400])
    assert slot_times(plan, 0, False, TIMES).shape == (2, plan.programs[0][0].stages)
    for rank in range(2):
        slots = plan_calls(plan, rank, 0, False, UNITS)
        program = rank_program(plan, rank, 0, False)
        for number, (calls, slot) in enumerate(zip(slots, program.slots, strict=True)):
            assert len(calls) == len(slot.work)
            for call, work in zip(calls, slot.work, strict=True):
                assert np.array_equal(call[0], counted(work.slices, 8, 2, SHAPE, UNITS, False, adds=number > 0)[0])
    simulated = simulate(plan, measured=lambda mask, backward: slot_times(plan, mask, backward, TIMES))
    busy = sum(slot_times(plan, 0, backward, TIMES).sum(axis=1).max() for backward in (False, True))
    assert simulated.attention_ns >= busy > 0


def test_calibration_holds_out_calls_and_plans_and_its_file_keeps_prices(tmp_path: Path) -> None:
    singles = {
        shape: [
            sample_of(name, n, shape, way, timed(shape, name, n, way).ns)
            for name in NAMES
            for n in (256, 512, 1024)
            for way in (False, True)
        ]
        for shape in (SHAPE, one_kv_head(SHAPE))
    }
    held = ("longtail", 2, "zigzag")
    plans = [
        PlanSlots(*name, way, tuple(map(tuple, slot_times(the_plan(*name, SHAPE), 0, way, TIMES).tolist())))
        for name in (FITTED[0], held)
        for way in (False, True)
    ]
    found, errors = fit_tiles(SHAPE, UNITS, singles, plans)
    assert errors["tiles"].count == 24 and errors["plans"].count == 4
    assert max(errors["tiles"].worst, errors["plans"].worst) < 1e-3
    file = tmp_path / "here.json"
    file.write_text(json.dumps(Calibration(CostModel(), tiles=found, held_out=errors).to_json()))
    assert read_calibration(file).tiles == found
    asked = ["simulate", "--lengths", "900,300", "--cluster", "h100:1x2", "--heads", "8", "--kv-heads", "2", "--json"]
    plain, priced = (
        json.loads(CliRunner().invoke(app, [*asked, *more]).stdout) for more in ([], ["--cost", str(file)])
    )
    assert plain["forward_ms"] != priced["forward_ms"] and priced["held_out"]["plans"]["count"] == 4
    refused = CliRunner().invoke(app, [*asked, "--head-dim", "64", "--cost", str(file)])
    assert refused.exit_code != 0


def test_a_file_with_other_prices_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "here.json"
    values = Calibration(CostModel(), tiles=TIMES).to_json()
    del values["tiles"]["backward"]
    file.write_text(json.dumps(values))
    with pytest.raises(ValueError, match="tiles must be as flexcp calibrate writes them"):
        read_calibration(file)
    planner = flexcp.Planner(8, 2, 64, cluster=flexcp.cluster("h100", 1, 2))
    with pytest.raises(ValueError, match="calibrate with --head-dim 64"):
        slot_times(planner([300]), 0, False, replace(TIMES, multiprocessors=4))

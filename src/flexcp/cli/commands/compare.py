"""``flexcp compare``: strategies side by side on one batch, simulated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from flexcp.cli.shared import options as o
from flexcp.cli.shared import scenario as s
from flexcp.cli.shared.progress import compiling

if TYPE_CHECKING:
    from flexcp.compare.compare import Comparison, Row

WIDTH = 40


def compare(
    described: s.ScenarioOptions,
    strategies: o.Strategies = "all",
    slow: o.Slow = False,
    html: o.Html = None,
    as_json: o.Json = False,
) -> None:
    """Plan one batch with every strategy and simulate each plan: time, waits, bytes, MFU, distance to what is possible.

    Speed-ups are over the best static method of this batch, which a run that keeps one method does not have: one column
    for methods that deal documents to groups by tokens (as Megatron, DeepSpeed and torchtitan do), one for those that
    deal by load (zigzag@load). All static methods are considered for that, also those that --strategies leaves out.
    `flexcp advise` compares with one method fixed for the run. Refusals are listed below the table; if all strategies
    refuse there is no table, and the exit code is 2.

    Example: `flexcp compare --lengths web:262144:0 --cluster h100:4x8 --model llama3-8b`
    """
    from flexcp.compare.compare import STATIC, STATIC_BY_LOAD
    from flexcp.compare.compare import compare as run
    from flexcp.planners.strategies import SLOW

    scenario, names = described.scenario(), o.chosen_strategies(strategies, (*STATIC_BY_LOAD, *(SLOW if slow else ())))
    with compiling(f"planning and simulating {len(names)} strategies") as progress:
        asked = (scenario.request, names, scenario.rules)
        static = (*STATIC, *STATIC_BY_LOAD)
        found = run(*asked, lambda n: progress.update(f"simulating {n}"), scenario.compute, baselines=static)
    if not as_json:
        typer.echo(scenario.title)
    if not found.ran:
        with described.naming_ranks():
            raise ValueError("; ".join(_refusals(found)))
    if html is not None:
        _report(html, found, scenario)
    typer.echo(json.dumps(as_data(found, scenario), indent=2) if as_json else table(found))


def as_data(found: Comparison, scenario: s.Scenario) -> dict[str, Any]:
    """Return the comparison with the documented JSON keys."""
    from flexcp.cli.commands.simulate import simulation_data
    from flexcp.known_errors.words import error_data

    rows: list[dict[str, Any]] = []
    for row in (*found.rows, *found.added):
        if row.simulation is None:
            rows.append({"strategy": row.name, "refused": row.refused})
            continue
        by_tokens, by_load = found.speed_up(row), found.speed_up(row, by_load=True)
        rows.append(
            {
                "strategy": row.name,
                "asked": row in found.rows,
                "static": row.is_static,
                "speed_up": None if by_tokens is None else round(by_tokens, 4),
                "speed_up_by_load": None if by_load is None else round(by_load, 4),
                "planning_ms": round(row.planning_ms, 3),
                **simulation_data(row.simulation),
            }
        )
    best, dealt = found.best_static, found.best_static_by_load
    return {
        "simulated": True,
        "setting": scenario.title,
        "error": error_data(found.request.cost),
        "held_out": scenario.calibration.to_json()["held_out"],
        "closed_form_error": round(found.predict_error, 4),
        "best_static": None if best is None else best.name,
        "best_static_by_load": None if dealt is None else dealt.name,
        "strategies": rows,
    }


def table(found: Comparison) -> str:
    """Return the strategies as lines with bars, the fastest first, then a legend and the refusals."""
    shown = found.shown
    step = bool(shown) and shown[0].simulation is not None and shown[0].simulation.step is not None
    head = (
        f"{'strategy':<16} {'ms':>9} {'x static':>9} {'x @load':>8} {'MFU fwd':>8} {'bwd':>6} {'MB/layer':>9} "
        f"{'balance':>8} {'optimality':>11}"
    )
    lines = [head + (f" {'tokens/s':>11}" if step else "")]
    slowest = max((row.ns for row in shown), default=1)
    for row in shown:
        lines.append(_line(found, row, step) + "  " + _bar(row, slowest))
    lines.append("")
    if found.ran:
        lines.append(_units(found.ran[0]))
    lines.append(
        "bars: # attention, . waiting, = the rest of each layer and gradient sync. "
        "optimality: attention's time over its lower bound."
    )
    best, by_load = found.best_static, found.best_static_by_load
    if best is not None:
        lines.append(
            f"x static: against {best.name}, the best of all static methods for this batch, documents dealt by tokens."
        )
    if by_load is not None:
        lines.append(
            f"x @load: against {by_load.name}, the best of all static methods for this batch, documents dealt by load."
        )
    lines += _refusals(found)
    return "\n".join(lines)


def _refusals(found: Comparison) -> list[str]:
    """Return a line for each requested strategy that refused."""
    return [f"{row.name} refused: {row.refused}" for row in found.rows if row.refused is not None]


def _units(row: Row) -> str:
    """Return the line of the legend that says which layers the times and the bytes of the table cover."""
    assert row.simulation is not None
    masks = row.simulation.plan.batch.masks
    layers = sum(mask.layers for mask in masks)
    whole = "attention, forward and backward, of" if row.simulation.step is None else "a whole step of"
    one = "one layer" if len(masks) == 1 else "a layer, on average over all of them"
    each = "layer" if layers == 1 else "layers"
    return f"ms: {whole} {layers} {each}. MB/layer: what ranks send in {one}, forward and backward."


def _line(found: Comparison, row: Row, step: bool) -> str:
    simulation = row.simulation
    assert simulation is not None
    by_tokens, by_load = (
        "-" if x is None else f"{x:.3f}" for x in (found.speed_up(row), found.speed_up(row, by_load=True))
    )
    text = (
        f"{row.name:<16} {row.ns / 1e6:>9.3f} {by_tokens:>9} {by_load:>8} {simulation.mfu(False):>8.1%} "
        f"{simulation.mfu(True):>6.1%} {row.moved_bytes / 1e6:>9.1f} {row.work_imbalance:>8.3f} "
        f"{simulation.optimality:>11.3f}"
    )
    return text + (f" {simulation.plan.batch.tokens / row.ns * 1e9:>11,.0f}" if step else "")


def _bar(row: Row, slowest: int) -> str:
    """Return the row's time as a bar of characters: # attention, . waiting, = the rest.

    A time of ``slowest`` nanoseconds is ``WIDTH`` characters.
    """
    simulation = row.simulation
    assert simulation is not None
    parts: tuple[tuple[str, int], ...]
    if simulation.step is None:
        parts = (("#", simulation.attention_ns - simulation.exposed_ns), (".", simulation.exposed_ns))
    else:
        step = simulation.step
        parts = (("#", step.attention_ns), (".", step.wait_ns), ("=", step.total_ns - step.attention_ns - step.wait_ns))
    text, before = "", 0
    for mark, ns in parts:
        text += mark * (round((before + ns) * WIDTH / slowest) - len(text))
        before += ns
    return text


def _report(path: Path, found: Comparison, scenario: s.Scenario) -> None:
    from flexcp.cli.shared.reports import timed_plan, write
    from flexcp.report.plan_time import PlanTime
    from flexcp.report.strategies_table import StrategyTime, strategies_section

    times = []
    for row in found.shown:
        simulation = row.simulation
        assert simulation is not None
        step = simulation.step
        if step is None:
            parts = (simulation.attention_ns - simulation.exposed_ns, simulation.exposed_ns, 0)
        else:
            parts = (step.attention_ns, step.wait_ns, step.total_ns - step.attention_ns - step.wait_ns)
        marks = {id(found.best_static): "best static, by tokens", id(found.best_static_by_load): "best static, by load"}
        mark = marks.get(id(row), "")
        times.append(StrategyTime(row.name, *parts, row.moved_bytes, row.work_imbalance, mark))
    of = "attention" if scenario.request.training is None else "step"
    sections = [strategies_section(times, scenario.title, "Strategies side by side, simulated", of)]
    for row in found.ran[:1]:
        assert row.simulation is not None
        sections.append(
            timed_plan(row.simulation.plan, row.name, PlanTime.of_simulation(row.simulation, scenario.request.training))
        )
    write(path, sections, f"Strategies on {found.request.cluster}, simulated", scenario.title)

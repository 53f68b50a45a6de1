"""``flexcp simulate``: one strategy's plan on simulated time, rank by rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flexcp.cli.shared import options as o
from flexcp.cli.shared.progress import compiling
from flexcp.cli.shared.scenario import ScenarioOptions
from flexcp.io.atomic_files import write_whole

if TYPE_CHECKING:
    from flexcp.simulator.passes import Pass
    from flexcp.simulator.training import Simulation

Events = Annotated[
    Path | None,
    typer.Option(
        callback=o.writable,
        help="Write the timeline of one layer of the first mask as JSON: rank, track, name, begin, end, bytes.",
    ),
]
WIDTH, MOST_RANKS = 60, 32


def simulate(
    described: ScenarioOptions,
    strategy: o.Strategy = "auto",
    events: Events = None,
    html: o.Html = None,
    as_json: o.Json = False,
) -> None:
    """Plan one batch and simulate the plan: stages, messages, ports and compute of every rank, forward and backward.

    Example: `flexcp simulate --lengths web:262144:0 --cluster h100:4x8 --strategy zigzag:8`
    """
    from flexcp.compare.compare import compare

    o.refuse_same_file(events=events, html=html)
    scenario = described.scenario()
    with compiling(f"planning and simulating {strategy}"):
        asked = (scenario.request, [strategy], scenario.rules)
        row = compare(*asked, compute=scenario.compute).rows[0]
    if row.simulation is None:
        with described.naming_ranks():
            raise ValueError(f"{strategy} refused: {row.refused}")
    found = row.simulation
    if events is not None:
        write_whole(events, json.dumps([e._asdict() for e in found.events()]))
    if html is not None:
        from flexcp.cli.shared.reports import report_plan
        from flexcp.report.plan_time import PlanTime

        report_plan(html, found.plan, PlanTime.of_simulation(found, scenario.request.training))
    if as_json:
        data = {"simulated": True, "setting": scenario.title, "strategy": row.name, **simulation_data(found)}
        typer.echo(json.dumps(data | {"held_out": scenario.calibration.to_json()["held_out"]}, indent=2))
        return
    typer.echo(scenario.title)
    typer.echo(text(found, row.name))


def simulation_data(found: Simulation) -> dict[str, Any]:
    """Return the results of a simulation with the documented JSON keys."""
    forward, backward = found.bounds(False), found.bounds(True)
    data: dict[str, Any] = {
        "attention_ms": _ms(found.attention_ns),
        "forward_ms": _ms(found.pass_ns(False)),
        "backward_ms": _ms(found.pass_ns(True)),
        "waiting_ms": _ms(found.exposed_ns),
        "forward_mfu": round(found.mfu(False), 4),
        "backward_mfu": round(found.mfu(True), 4),
        "optimality": round(found.optimality, 4),
        "bounds_ms": {
            way: {"compute": _ms(b.compute), "link": _ms(b.link), "granularity": _ms(b.granularity)}
            for way, b in (("forward", forward), ("backward", backward))
        },
        "forward_bytes": int(found.plan.bytes().sum()),
        "backward_bytes": int(found.plan.bytes(backward=True).sum()),
        "inter_node_bytes": found.plan.inter_node_bytes() + found.plan.inter_node_bytes(backward=True),
        "plan": found.plan.hash,
        "step_ms": None,
    }
    if found.step is not None:
        step = found.step
        data |= {
            "step_ms": _ms(step.total_ns),
            "step": {
                "attention_ms": _ms(step.attention_ns),
                "waiting_ms": _ms(step.wait_ns),
                "other_ms": _ms(step.linear_ns),
                "sync_ms": _ms(step.sync_ns),
            },
            "tokens_per_second": round(found.plan.batch.tokens / step.total_ns * 1e9, 1),
        }
    return data


def _ms(ns: int) -> float:
    return round(ns / 1e6, 6)


def text(found: Simulation, name: str) -> str:
    """Return the totals of a simulation as text, and bars of what each rank does in one layer of the first mask.

    ``name`` is that of the strategy. At most ``MOST_RANKS`` ranks are drawn.
    """
    from flexcp.plan.text import explanation

    lines = [f"{name}: {explanation(found.plan)}" if found.plan.placement.note else name]
    for backward in (False, True):
        b, way = found.bounds(backward), "backward" if backward else "forward"
        lines.append(
            f"{way:<9} {found.pass_ns(backward) / 1e6:.3f} ms, MFU {found.mfu(backward):.1%}, "
            f"{found.pass_optimality(backward):.3f} times what is possible (compute {b.compute / 1e6:.3f}, link "
            f"{b.link / 1e6:.3f}, granularity {b.granularity / 1e6:.3f} ms)"
        )
    if found.step is not None:
        step = found.step
        lines.append(
            f"step      {step.total_ns / 1e6:.3f} ms on the slowest rank: attention {step.attention_ns / 1e6:.3f}, "
            f"waiting {step.wait_ns / 1e6:.3f}, the rest of each layer {step.linear_ns / 1e6:.3f}, exposed gradient "
            f"sync {step.sync_ns / 1e6:.3f}; {found.plan.batch.tokens / step.total_ns * 1e9:,.0f} tokens/s"
        )
    masks = found.plan.batch.masks
    of = f" of the mask {masks[0].name!r}, the first of {len(masks)}" if len(masks) > 1 else ""
    for one in found.passes[0]:
        lines += ["", f"{one.model.name}, one layer{of} (# computes, . waits):", *_bars(one)]
    return "\n".join(lines)


def _bars(one: Pass) -> list[str]:
    last = max(1, int(one.done.max()))
    lines = []
    for rank in range(min(one.model.ranks, MOST_RANKS)):
        marks = ["."] * round(int(one.done[rank]) * WIDTH / last)
        for begin, end in zip(one.begin[rank].tolist(), one.end[rank].tolist(), strict=True):
            for at in range(round(begin * WIDTH / last), round(end * WIDTH / last)):
                marks[at] = "#"
        lines.append(f"{rank:>5}  {''.join(marks):<{WIDTH}}  {int(one.done[rank]) / 1e6:.3f} ms")
    if one.model.ranks > MOST_RANKS:
        lines.append(f"  ... {one.model.ranks - MOST_RANKS} more ranks")
    return lines

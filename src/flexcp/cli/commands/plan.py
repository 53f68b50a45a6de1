"""``flexcp plan``: plan one batch and show the plan."""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flexcp.cli.shared import options as o
from flexcp.cli.shared.model_and_cluster_options import HEADS
from flexcp.cli.shared.plan_options import PlanOptions
from flexcp.cli.shared.progress import compiling
from flexcp.cli.shared.reports import report_plan

if TYPE_CHECKING:
    from flexcp.plan.plan import Plan

REPEATS = 7
Save = Annotated[
    Path | None, typer.Option(callback=o.writable, help="Write the plan to this file; `flexcp show FILE` reads it.")
]
ShowRounds = Annotated[bool, typer.Option("--rounds", help="Show each stage's conflict-free rounds too.")]


def plan(
    asked: PlanOptions,
    save: Save = None,
    html: o.Html = None,
    rounds: ShowRounds = False,
    as_json: o.Json = False,
) -> None:
    """Plan one batch: who keeps and computes what, and what moves.

    Example: `flexcp plan --lengths 4096,800,1 --ranks 8 --heads 8 --kv-heads 2 --strategy blocks`
    """
    o.refuse_same_file(save=save, html=html)
    planner, lengths = asked.taken(asked.made_planner(HEADS))
    times, found = [], None
    with compiling():
        for _ in range(1 + (REPEATS if as_json else 0)):
            begin = time.perf_counter()
            found = asked.plan(planner, lengths)
            _ = found.hash
            times.append((time.perf_counter() - begin) * 1000)
    assert found is not None
    if save is not None:
        _write(found, save)
    if html is not None:
        from flexcp.report.plan_time import PlanTime

        with compiling("simulating the plan"):
            timed = PlanTime.of_plan(found, planner.training)
        report_plan(html, found, timed)
    if as_json:
        keys = summary(found, times) | (_rounds_of(found) if rounds else {})
        typer.echo(json.dumps(keys, indent=2))
    else:
        typer.echo(f"{found!s}\n\n{_rounds_text(found)}" if rounds else str(found))


def _rounds_of(plan: Plan) -> dict[str, Any]:
    from flexcp.report.rounds_table import rounds_columns  # compiled: Numba is loaded only if rounds are requested

    with compiling():
        return {"rounds": {way: rounds_columns(plan, bool(i)) for i, way in enumerate(("forward", "backward"))}}


def _rounds_text(plan: Plan) -> str:
    from flexcp.report.rounds_table import rounds_table

    with compiling():
        return rounds_table(plan)


def _write(plan: Plan, path: Path) -> None:
    """Write the plan to a file, completely or not at all; raise ValueError if that is not possible."""
    from flexcp.io.atomic_files import write_whole
    from flexcp.plan.file import save_plan

    try:
        write_whole(path, save_plan(plan))
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror}; choose another place with --save") from None


def summary(plan: Plan, times_ms: list[float] | None = None) -> dict[str, Any]:
    """Return the plan's numbers with the documented JSON keys.

    ``times_ms`` are the milliseconds that planning took: the first call, and its repeats if there were any. Without
    times the keys ``planning_ms`` and ``first_plan_ms`` are left out.
    """
    from flexcp.arrays.totals import imbalance

    times = times_ms or []
    forward = plan.bytes()
    memories = [plan.memory(rank) for rank in range(plan.ranks)]
    return {
        "strategy": plan.requested,
        "chosen": plan.strategy,
        "why": plan.explain(),
        "ranks": plan.ranks,
        "tokens": plan.batch.tokens,
        **({"planning_ms": round(statistics.median(times[1:] or times), 3)} if times else {}),
        **({"first_plan_ms": round(times[0], 3)} if times else {}),
        "forward_bytes": int(forward.sum()),
        "forward_inter_node_bytes": plan.inter_node_bytes(),
        "backward_bytes": int(plan.bytes(backward=True).sum()),
        "max_rank_sent_bytes": int(forward.sum(axis=1).max()),
        "max_rank_received_bytes": int(forward.sum(axis=0).max()),
        "compute_imbalance": round(imbalance(plan.work_of_layers()), 6),
        "token_imbalance": round(imbalance(plan.placement.tokens), 6),
        "stages": plan.programs[0][0].stages,
        "max_rank_peers": max(len(plan.peers(rank)) for rank in range(plan.ranks)),
        "max_rank_arena_bytes": max(memory.arena for memory in memories),
        "max_rank_memory_bytes": max(memory.total for memory in memories),
        "hash": plan.hash,
    }

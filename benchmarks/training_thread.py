"""The cost of a planned batch in the training thread, measured.
``make training-thread`` writes docs/results/training-thread.md.

Measured is one rank of a step, without a process group: binding the plan (without the ranks' comparison of hashes,
which depends on the network) and the first use of everything that depends on the plan alone: rows and their order and
positions, programs, calls, the arena, and what attention prepares for the CPU kernel in both directions. This is done
once with the plan alone, as after ``flexcp.bind`` by hand, and once with the recipe that the loader's planner processes
derive (:mod:`flexcp.executor.run.rank_recipe`). Also measured are the pool thread's work on an answer (reading plan and
recipe), during part of which it holds the interpreter's lock, and the bytes of both.

Times are CPU times of the thread alone: the least of some turns, and the slowest of three ranks. On a machine with
other load these are the best estimate.
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date, timedelta
from functools import partial
from pathlib import Path

import torch

import flexcp
from flexcp.data.lengths import draw_lengths
from flexcp.data.planning.plan_orders import PackedPart, PlanOrder, RecipeWish, fulfil, packed, unpacked
from flexcp.data.reading.row_sharing import segments
from flexcp.executor.exchange.pass_exchanges import NOTHING, Passes
from flexcp.executor.run.message_layout import types_of
from flexcp.executor.run.rank_recipe import RankRecipe
from flexcp.executor.step import Step
from flexcp.plan.file import load_plan
from flexcp.plan.plan import Plan

A_RANK = 8192
CASES = (
    ("auto", 8, "web"),
    ("auto", 64, "web"),
    ("auto", 64, "libra256k"),
    ("blocks", 64, "web"),
    ("zigzag", 64, "web"),
    ("groups", 1024, "web"),
    ("groups", 1024, "libra256k"),
)
TURNS = 5


@dataclass(frozen=True)
class Row:
    """Milliseconds of a batch: in the training thread with the plan alone and with its recipe, in the worker for the
    recipe,
    and in the pool's thread; and bytes of plan and recipe.
    """

    strategy: str
    ranks: int
    lengths: str
    alone_ms: float
    ready_ms: float
    worker_ms: float
    reading_ms: float
    plan_bytes: int
    recipe_bytes: int


def first_use(plan: Plan, rank: int, recipe: RankRecipe | None) -> None:
    """Do what the training thread does with a plan at its first use."""
    calls = NOTHING if recipe is None else recipe.calls
    step = Step(Passes(plan, rank, None, timedelta(seconds=60), calls=calls), recipe)
    segments(plan.placement, rank)
    step.positions, step.indices  # noqa: B018  (made on first use)
    types = types_of(torch.empty(0, dtype=getattr(torch, plan.shape.dtype)))
    for backward in (False, True):
        step.prepared(0, backward, "cpu", types)
        step.passes.calls(0, backward)
    step.tables.order_on(types.device)


def thread_ms(work: Callable[[], object]) -> float:
    begin = time.thread_time()
    work()
    return (time.thread_time() - begin) * 1e3


def measured(strategy: str, ranks: int, lengths: str, turns: int) -> Row:
    machine = flexcp.cluster("h100", max(1, ranks // 8), min(ranks, 8))
    planner = flexcp.Planner(32, 8, 128, cluster=machine, strategy=strategy)
    order = PlanOrder(draw_lengths(lengths, ranks * A_RANK, 0))
    plan = fulfil(planner, order, None)[0].plan
    rows = [_of_rank(plan, rank, strategy, lengths, turns) for rank in (0, ranks // 2, ranks - 1)]
    return max(rows, key=lambda row: row.ready_ms)


def _of_rank(plan: Plan, rank: int, strategy: str, lengths: str, turns: int) -> Row:
    def chosen(*_: object, **__: object) -> Plan:
        return plan

    order, wish = PlanOrder(plan.batch.lengths), RecipeWish(rank, "fields")
    parts: list[PackedPart] = packed(fulfil(chosen, order, wish))
    found: list[tuple[float, ...]] = []
    for _ in range(turns):
        answer = unpacked(parts)[0]  # fresh, because a plan keeps some of what was derived from it
        alone = thread_ms(lambda: first_use(load_plan(parts[0][1]), rank, None))
        alone -= thread_ms(lambda: load_plan(parts[0][1]))
        ready = thread_ms(partial(first_use, answer.plan, rank, answer.recipe))
        found.append(
            (alone, ready, thread_ms(lambda: packed(fulfil(chosen, order, wish))), thread_ms(lambda: unpacked(parts)))
        )
    sizes = (len(parts[0][1]), len(parts[0][2] or b""))
    return Row(strategy, plan.ranks, lengths, *(min(column) for column in zip(*found, strict=True)), *sizes)


def page(rows: list[Row], turns: int) -> str:
    lines = [
        "# What a planned batch costs the training thread",
        "",
        f"**Measured** on {date.today()}, `make training-thread` (benchmarks/training_thread.py): {A_RANK:,} tokens a "
        f"rank, 32 / 8 heads of 128, h100, one rank of each plan on one core ({platform.machine()}), milliseconds of "
        f"the processor, the least of {turns} turns, the slowest of three ranks. *Plan alone* is binding and the first "
        "use of everything that depends on the plan alone (rows, positions, programs, calls, arena, what attention "
        "prepares for the CPU kernel), all in the training thread; *with its recipe* is the same where a planner "
        "process of the loader derived the integers ahead. *In the worker* is what deriving costs there, plan and "
        "recipe made bytes included; *reading* is what the loader's thread beside the training thread spends on an "
        "answer. The comparison of hashes with other ranks, reading samples and everything a GPU adds (uploads, a "
        "kernel's own tiles) are not in it.",
        "",
        "| strategy | ranks | lengths | plan alone | with its recipe | in the worker | reading | plan, "
        "KB | recipe, KB |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for r in rows:
        times = " | ".join(f"{x:.2f}" for x in (r.alone_ms, r.ready_ms, r.worker_ms, r.reading_ms))
        lines.append(
            f"| {r.strategy} | {r.ranks:,} | {r.lengths} | {times} | {r.plan_bytes / 1e3:.0f} | "
            f"{r.recipe_bytes / 1e3:.0f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, help="the page to write; without it the page is printed")
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--quick", action="store_true", help="the first case alone")
    asked = parser.parse_args()
    rows = [measured(*case, asked.turns) for case in (CASES[:1] if asked.quick else CASES)]
    text = page(rows, asked.turns)
    if asked.write is None:
        print(text)
    else:
        asked.write.write_text(text)


if __name__ == "__main__":
    main()

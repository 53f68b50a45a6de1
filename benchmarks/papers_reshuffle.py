"""FCP's reshuffle before and after attention, measured on four ranks in the box: `fcp` and ``auto``
with tokens where they want them and in contiguous order, beside the simulation of the same plans.

Links are slow and kernels are replaced by waits, as in ``box.py``. Without root there is no box, and the row says so.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from box import COST, DTYPE
from flexcp.clusters import Cluster
from flexcp.cost import PEAK_PERMILLE
from flexcp.masks import causal
from flexcp.plan.plan import Plan
from flexcp.planner import Planner
from flexcp.simulator.training import simulate
from lib.box import Box, why_not
from lib.step_time import slowest_ms, time_steps
from papers_rows import BOX_TIME, MEASURED, SAME, SIMULATED, Row, absent, whole

LENGTHS = (8192, 1024, 2048, 512, 700, 300, 1500, 96, 2000)
MBIT, GFLOPS = 200, 20.0
PLANNERS = ("fcp:1024", "auto")
HEADS = 8
HIDDEN = "hidden behind local work"
FREE, CONTIGUOUS = "tokens where the planner wants them", "tokens in contiguous order"
LAYOUTS = {FREE: "free", CONTIGUOUS: "contiguous"}
BOX, BOX_SIMULATED = "in the box", "the box simulated"
WHAT = (
    f"{PLANNERS[0]} and `auto`, {HEADS} / {HEADS} heads, {sum(LENGTHS):,} tokens, 2 x 2 ranks in the box, ports of "
    f"{MBIT} Mb/s: ms of attention forward and backward"
)


def machine() -> Cluster:
    """Return the box as planners see it: ranks whose peak in the dtype that is run is the paced one."""
    peak = round(GFLOPS * 1000 / PEAK_PERMILLE[DTYPE])
    return Cluster("box", 2, 2, peak, intra_mbps=1000, inter_mbps=MBIT // 8, latency_ns=500_000)


def plans() -> dict[str, list[Plan]]:
    """Return the plans of `fcp` and of ``auto`` in each layout."""
    where = machine()
    planners = [Planner(HEADS, HEADS, 64, dtype=DTYPE, cluster=where, cost=COST, strategy=each) for each in PLANNERS]
    return {
        words: [planner(LENGTHS, causal(), layout=layout) for planner in planners] for words, layout in LAYOUTS.items()
    }


def measured_in_the_box(repeats: int) -> list[Row]:
    """Make the rows of a layer's attention in each layout, measured and simulated; only measured ones are judged."""
    reason = why_not()
    if reason is not None:
        return [absent("reshuffle", WHAT, HIDDEN, f"not measured: {reason}")]
    rows, load, made = [], os.getloadavg()[0], plans()
    how = f"{MEASURED}, kernels replaced by waits, load {load:.1f} on {os.cpu_count()} cores before it began"
    with Box(2, 2) as box:
        box.network.limit(MBIT)
        for words, pair in made.items():
            ms = [slowest_ms(box.run(time_steps, plan, "whole", repeats, GFLOPS)) for plan in pair]
            rows.append(_row(words, ms, how, BOX))
    for words, pair in made.items():
        rows.append(_row(words, [simulate(plan).attention_ns / 1e6 for plan in pair], SIMULATED, BOX_SIMULATED))
    return rows


def _row(layout: str, ms: Sequence[float], how: str, part: str) -> Row:
    theirs, aspect = HIDDEN if layout == CONTIGUOUS else "not shown", BOX_TIME if part == BOX else None
    words = f"{WHAT}, {layout}"
    return Row("reshuffle", words, theirs, *ms, how, False, whole, aspect=aspect, part=f"{layout}, {part}")


def order(rows: Sequence[Row]) -> str:
    """Return what ``auto`` takes of `fcp`'s time in the box by layout, measured and simulated, in words;
    empty if nothing was measured.
    """
    found = {row.part: row.auto / row.planner for row in rows if row.figure == "reshuffle" and row.planner and row.auto}
    texts, reversed_, open_ = [], [], []
    for layout in LAYOUTS:
        parts = [f"{layout}, {each}" for each in (BOX, BOX_SIMULATED)]
        if not all(part in found for part in parts):
            return ""
        measured, simulated = (found[part] for part in parts)
        texts.append(f"{measured:.2f} with {layout} (simulated {simulated:.2f})")
        if min(abs(measured - 1), abs(simulated - 1)) <= SAME:
            open_.append(layout)
        elif (measured - 1) * (simulated - 1) < 0:
            reversed_.append(layout)
    told = f"In the box `auto` takes, of `fcp`'s time, {' and '.join(texts)}."
    rest = [layout for layout in LAYOUTS if layout not in (*reversed_, *open_)]
    for layouts, words in (
        (rest, "the order is the simulated one"),
        (reversed_, "the order is the reverse of the simulated one"),
        (open_, f"the measured or the simulated difference is no more than {SAME:.0%}, which is no order"),
    ):
        if layouts:
            told += f" With {' and with '.join(layouts)} {words}."
    return told

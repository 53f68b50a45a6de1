"""FCP's reshuffle before and after attention, measured on four ranks in the box: `fcp` and ``auto``
with tokens where they want them and in contiguous order.

Links are slow and compute is paced, as in ``box.py``. Without root there is no box, and the row says so.
"""

from __future__ import annotations

import os

from box import COST, DTYPE
from flexcp.clusters import Cluster
from flexcp.masks import causal
from flexcp.planner import Planner
from lib.box import Box, why_not
from lib.step_time import slowest_ms, time_steps
from papers_rows import MEASURED, Row, absent, whole

LENGTHS = (8192, 1024, 2048, 512, 700, 300, 1500, 96, 2000)
MBIT, GFLOPS = 200, 20.0
PLANNERS = ("fcp:1024", "auto")
HEADS = 8
HIDDEN = "hidden behind local work"
WHAT = (
    f"{PLANNERS[0]} and `auto`, {HEADS} / {HEADS} heads, {sum(LENGTHS):,} tokens, 2 x 2 ranks in the box, ports of "
    f"{MBIT} Mb/s: ms forward and backward more than with tokens where the planner wants them"
)


def measured_in_the_box(repeats: int) -> list[Row]:
    """Make the row of what contiguous order costs a layer's attention, both directions."""
    reason = why_not()
    if reason is not None:
        return [absent("reshuffle", WHAT, HIDDEN, f"not measured: {reason}")]
    machine = Cluster("box", 2, 2, round(GFLOPS), intra_mbps=1000, inter_mbps=MBIT // 8, latency_ns=500_000)
    more, bases = [], []
    with Box(2, 2) as box:
        box.network.limit(MBIT)
        for strategy in PLANNERS:
            planner = Planner(HEADS, HEADS, 64, dtype=DTYPE, cluster=machine, cost=COST, strategy=strategy)
            free, kept = planner(LENGTHS, causal()), planner(LENGTHS, causal(), layout="contiguous")
            ms = [slowest_ms(box.run(time_steps, plan, "whole", repeats, GFLOPS)) for plan in (free, kept)]
            bases.append(f"{ms[0]:,.0f}")
            more.append(ms[1] - ms[0])
    how = f"{MEASURED}, compute paced, load {os.getloadavg()[0]:.0f} on {os.cpu_count()} cores"
    words = f"{WHAT}, which take {bases[0]} (`auto` {bases[1]})"
    return [Row("reshuffle", words, HIDDEN, *more, how, False, whole, part="in the box")]

"""FCP's reshuffle at the door of attention, measured: four ranks in the box, `fcp` and ``auto`` with tokens where they want them and in
contiguous order.

Links are slow and compute is paced, as in ``box.py``; without root there is no box, and the row says so.
"""

from __future__ import annotations

from box import COST, DTYPE
from flexcp.clusters import Cluster
from flexcp.masks import causal
from flexcp.planner import Planner
from lib.box import Box, why_not
from lib.step_time import slowest_ms, time_steps
from papers_rows import MEASURED, Row, absent

LENGTHS = (8192, 1024, 2048, 512, 700, 300, 1500, 96, 2000)
MBIT, GFLOPS = 200, 20.0
PLANNERS = ("fcp:1024", "auto")
WHAT = f"2 x 2 ranks in the box, ports of {MBIT} Mb/s: ms forward and backward more than with tokens where the planner wants them"


def measured_in_the_box(repeats: int) -> list[Row]:
    """What keeping tokens in order costs a layer's attention, both directions."""
    reason = why_not()
    if reason is not None:
        return [absent("reshuffle", WHAT, "hidden", f"not measured: {reason}")]
    machine = Cluster("box", 2, 2, round(GFLOPS), intra_mbps=1000, inter_mbps=MBIT // 8, latency_ns=500_000)
    more = []
    with Box(2, 2) as box:
        box.network.limit(MBIT)
        for strategy in PLANNERS:
            planner = Planner(8, 8, 64, dtype=DTYPE, cluster=machine, cost=COST, strategy=strategy)
            free, kept = planner(LENGTHS, causal()), planner(LENGTHS, causal(), layout="contiguous")
            ms = [slowest_ms(box.run(time_steps, plan, "whole", repeats, GFLOPS)) for plan in (free, kept)]
            more.append(ms[1] - ms[0])
    return [Row("reshuffle", WHAT, "hidden", more[0], more[1], f"{MEASURED}, compute paced", False)]

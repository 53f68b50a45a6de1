"""``groups`` against the best fixed grid of CP x DP, by predicted step time, and its planning time.

``make groups`` writes docs/results/groups.md.

DHP (arXiv 2602.21788) published speed-ups of ``1.46`` on average and ``2.24`` on extremely unbalanced batches over the
fixed degrees of Megatron and DeepSpeed, measured on 8 to 64 NPUs. Here the same comparison is simulated.

A *fixed grid* has one degree for all batches of a distribution, the best one over these batches: zig-zag rings (DHP's
first baseline), or any static method. Ranks may keep at most twice the mean of tokens, as a limit of memory; a grid
that exceeds this for some batch is not considered.

``half`` is a batch with one document of half the tokens and others drawn from ``web``.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from dataclasses import replace
from datetime import date
from pathlib import Path

import numpy as np
from rich.console import Console

import flexcp
import groups_by_keys
from flexcp.batch import make_batch
from flexcp.clusters import Cluster, cluster
from flexcp.cost import CostModel
from flexcp.data.lengths import draw_lengths
from flexcp.plan.placement import Placement
from flexcp.planners.groups.groups import groups
from flexcp.planners.request import Refused, Request
from flexcp.planners.static.bounds import static_methods
from flexcp.schedule.predict import lower_bound, predict
from flexcp.schedule.transfers import make_plan
from flexcp.shape import Shape
from lib.progress import tracked

SHAPE = Shape(32, 8, 128, 128)
COST = CostModel()
PRESETS = ("h100", "a100", "h20", "ascend910b")
DISTRIBUTIONS = ("libra256k", "video", "web", "half")
SEEDS = 5


def lengths_of(name: str, tokens: int, seed: int) -> list[int]:
    """Return a batch of about this many tokens."""
    if name == "half":
        return [tokens // 2, *draw_lengths("web", tokens - tokens // 2, seed)]
    return draw_lengths(name, tokens, seed)


def compare(where: Cluster, name: str, tokens: int) -> tuple[float, float, float, str, set[int]]:
    """Return the speed-ups over zig-zag grids and over all static grids, the time over the bound, the best static grid,
    and the degrees that groups used.
    """
    ours, bound, degrees = 0, 0, set()
    totals: dict[str, int] = {}
    for seed in range(SEEDS):
        batch = make_batch(lengths_of(name, tokens * where.ranks, seed), flexcp.causal())
        request = Request(batch, SHAPE, where, COST, max_tokens_per_rank=2 * tokens)

        def predicted(placement: Placement) -> int:
            return predict(placement, SHAPE, where, COST).total_ns

        found = groups(request)
        assert found.tokens.max() <= 2 * tokens
        ours += predicted(found)
        bound += lower_bound(batch, SHAPE, where, COST)
        degrees |= {int(d) for d in np.unique(_ranks_of_documents(found))}
        for method in static_methods(request):
            try:
                ns = predicted(method.place(replace(request, argument=method.argument)))
            except Refused:
                ns = 1 << 60  # over the cap
            totals[method.name] = totals.get(method.name, 0) + ns
    best = min(totals, key=totals.__getitem__)
    rings = min(ns for name, ns in totals.items() if name.split(":")[0] in ("zigzag", "dp"))
    return rings / ours, totals[best] / ours, ours / bound, best, degrees


def _ranks_of_documents(placement: Placement) -> np.ndarray:
    """Return how many ranks each document has."""
    regions = placement.regions[0]
    pairs = np.unique(regions.document * placement.ranks + regions.rank)
    return np.bincount(pairs // placement.ranks)


def comparison() -> list[str]:
    """Return a table with one row for every preset, size and distribution, and the averages."""
    lines = [
        "| cluster | tokens a rank | lengths | over the best zig-zag grid | over the best static grid | which | time / "
        "bound | degrees |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    averages = []
    for preset in tracked(PRESETS, "groups"):
        where = cluster(preset, 8, 8)
        for tokens in (8192, 32768):
            rows = []
            for name in DISTRIBUTIONS:
                rings, static, gap, which, degrees = compare(where, name, tokens)
                rows.append((rings, static))
                shown = ", ".join(map(str, sorted(degrees)))
                lines.append(
                    f"| {preset} 8x8 | {tokens:,} | {name} | {rings:.2f} | {static:.2f} | {which} | {gap:.3f} | "
                    f"{shown} |"
                )
            rings, static = (statistics.mean(column) for column in zip(*rows, strict=True))
            averages.append(f"| {preset} 8x8 | {tokens:,} | **average** | **{rings:.2f}** | **{static:.2f}** | | | |")
    return [*lines, *averages]


def speed() -> list[str]:
    """Measure planning of 512 documents on 64 ranks."""
    lines = ["| lengths | placement ms | with schedule ms |", "| --- | --- | --- |"]
    for name in ("libra256k", "video", "web"):
        lengths = draw_lengths(name, 64 * 32768, 0)
        lengths = (lengths * (512 // len(lengths) + 1))[:512]
        where = cluster("h100", 8, 8)
        request = Request(make_batch(lengths, flexcp.causal()), SHAPE, where, COST)
        times: list[tuple[float, float]] = []
        for _ in range(12):
            begin = time.process_time()
            placement = groups(request)
            middle = time.process_time()
            make_plan(placement, SHAPE, where, COST, "groups")
            times.append((middle - begin, time.process_time() - begin))
        place, whole = (1000 * statistics.median(column) for column in zip(*times[2:], strict=True))
        lines.append(f"| {name} | {place:.1f} | {whole:.1f} |")
    return lines


def main() -> None:
    """Make the tables and write them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path)
    asked = parser.parse_args()
    text = "\n".join(
        [
            "# groups against fixed grids",
            "",
            f"**Simulated**, by `make groups` on {date.today().isoformat()} ({platform.machine()}); only planning "
            f"times, in the last table, are measured. Predicted whole-step time (cost model `{COST.name}`, "
            f"[errors](errors.md)), sum over {SEEDS} batches, 32 / 8 heads of 128, causal, at most twice the mean of "
            "tokens on a rank. A fixed grid has one degree for all batches of a distribution. DHP (arXiv 2602.21788) "
            "published 1.46 (average) and 2.24 (extremely unbalanced batches) over fixed degrees, measured on its own "
            "machines. *Bound* is all compute divided perfectly.",
            "",
            *comparison(),
            "",
            *groups_by_keys.section(),
            "## Planning 512 documents on 64 ranks",
            "",
            "Measured, CPU milliseconds of one process, the median of ten. DHP published 86 ms for its solver and 0.9 "
            "s in all.",
            "",
            *speed(),
            "",
        ]
    )
    Console(width=300).print(text, markup=False)
    if asked.write:
        asked.write.write_text(text)


if __name__ == "__main__":
    main()

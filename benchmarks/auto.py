"""``auto`` against every strategy, by predicted step time. ``make auto`` writes docs/results/auto.md.

All named length distributions x all masks x one node, four and 32 nodes of 8 H100, 8,192 tokens a rank, 64 / 8 heads of 128. Beside
``auto`` stand every static method in every degree that ``auto`` knows, ``blocks``, ``groups`` and the rivals. Two things must hold in every
cell, or this ends with an error: ``auto`` is predicted no slower than any static strategy, and no slower than any other by more than the
cost model's margin. Everything is *simulated* (closed-form prediction); no time here was measured on GPUs.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path

from rich.console import Console
from rich.progress import track

import flexcp
from flexcp.batch import make_batch
from flexcp.clusters import cluster
from flexcp.cost import CostModel
from flexcp.data.lengths import DISTRIBUTIONS, draw_lengths
from flexcp.masks import Mask
from flexcp.plan.placement import Placement
from flexcp.planners.auto import auto
from flexcp.planners.request import Refused, Request
from flexcp.planners.static.bounds import static_methods
from flexcp.planners.strategies import find_strategy
from flexcp.schedule.predict import lower_bound, predict
from flexcp.shape import Shape

SHAPE = Shape(64, 8, 128, 128)
COST = CostModel()
TOKENS = 8192
MASKS: dict[str, Callable[[int], Mask]] = {
    "causal": lambda n: flexcp.causal(),
    "full": lambda n: flexcp.full(),
    "window": lambda n: flexcp.window(4096),
    "lambda": lambda n: flexcp.lambda_(),
    "shared question": lambda n: flexcp.shared_question(),
    "causal blockwise": lambda n: flexcp.causal_blockwise(),
    "prefix": lambda n: flexcp.prefix(1024),
    "modality": lambda n: flexcp.modality([(n // 4, n // 2), (n // 2, n - n // 5)]),
}
OTHERS = ("blocks", "groups", "minheap", "pow2", "hdp", "wlb")


@dataclass(frozen=True)
class Cell:
    """One batch: what auto took, and the predicted nanoseconds of auto, the best static strategy, the best other one, and the bound."""

    distribution: str
    mask: str
    choice: str
    auto: int
    static: tuple[int, str]
    other: tuple[int, str]
    bound: int
    planning_ms: float

    @property
    def broken(self) -> list[str]:
        """What does not hold."""
        found = []
        if self.auto > self.static[0]:
            found.append(f"{self.static[1]} is faster than auto by {self.auto / self.static[0] - 1:.2%}")
        if self.auto * 1000 > self.other[0] * (1000 + COST.error_permille):
            found.append(f"{self.other[1]} is faster than auto by {self.auto / self.other[0] - 1:.2%}")
        return [f"{self.distribution}, {self.mask}: {what}" for what in found]


def measure(nodes: int, distribution: str, mask: str, seed: int = 0) -> Cell:
    """Place one batch in every way."""
    where = cluster("h100", nodes, 8)
    lengths = draw_lengths(distribution, TOKENS * where.ranks, seed)
    batch = make_batch(lengths, [MASKS[mask](n) for n in lengths] if mask == "modality" else MASKS[mask](0))
    request = Request(batch, SHAPE, where, COST)

    def predicted(placement: Placement) -> int:
        return predict(placement, SHAPE, where, COST).total_ns

    begin = time.process_time()
    ours = auto(request)
    planning = (time.process_time() - begin) * 1000
    static, others = [], []
    for method in static_methods(request):
        try:
            static.append((predicted(method.place(replace(request, argument=method.argument))), method.name))
        except Refused:
            continue
    for name in OTHERS:
        try:
            others.append((predicted(find_strategy(name)[0](request)), name))
        except Refused:
            continue
    choice = ours.note.split(": ")[0].split(" (")[0]
    best = (min(static), min(others))
    bound = lower_bound(batch, SHAPE, where, COST)
    return Cell(distribution, mask, choice, predicted(ours), *best, bound, planning)


def table(nodes: int, cells: list[Cell]) -> list[str]:
    """Rows are distributions, columns masks: predicted speed-up over the best static strategy, and the choice."""
    lines = [f"## {nodes}x8 H100", "", "| lengths | " + " | ".join(MASKS) + " |", "| --- " * (len(MASKS) + 1) + "|"]
    for distribution in DISTRIBUTIONS:
        row = [c for c in cells if c.distribution == distribution]
        texts = [f"{c.static[0] / c.auto:.2f} {c.choice}" for c in row]
        lines.append(f"| {distribution} | " + " | ".join(texts) + " |")
    ratio = [c.auto / c.bound for c in cells]
    behind = max(c.auto / c.other[0] for c in cells)
    times = [c.planning_ms for c in cells]
    lines += [
        "",
        f"Worst against the best other strategy: {behind:.3f} of its time. Against perfectly divided compute: mean "
        f"{statistics.mean(ratio):.3f}, worst {max(ratio):.3f}. Placing and scoring: median {statistics.median(times):.0f} ms, "
        f"worst {max(times):.0f} ms (process time).",
        "",
    ]
    return lines


def main() -> None:
    """Make the tables and write them; exit 1 when something does not hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path)
    parser.add_argument("--nodes", type=int, nargs="*", default=[1, 4, 32])
    parser.add_argument("--lengths", nargs="*", default=list(DISTRIBUTIONS))
    parser.add_argument("--masks", nargs="*", default=list(MASKS))
    asked = parser.parse_args()
    lines = [
        "# auto against every strategy",
        "",
        f"**Simulated**, by `make auto` on {date.today().isoformat()} ({platform.machine()}); nothing here was measured on GPUs. "
        "Predicted time of a whole step (forward and backward attention, exposed communication, the rest of the layer) in closed form, "
        f"cost model `{COST.name}` ([errors](errors.md)). 8,192 tokens a rank, 64 / 8 heads of 128. A cell is the "
        "best static strategy's time over `auto`'s, and what `auto` took; 1.00 with a static name means it stayed. In every cell `auto` "
        "is no slower than every static strategy, and than `blocks`, `groups`, `minheap`, `pow2`, `hdp` and `wlb` by no more than the "
        "margin.",
        "",
    ]
    console, broken = Console(stderr=True), []
    for nodes in asked.nodes:
        wanted = [(d, m) for d in asked.lengths for m in asked.masks]
        measure(nodes, "web", "causal")  # compiled code is loaded before anything is timed
        cells = [measure(nodes, d, m) for d, m in track(wanted, f"{nodes}x8", console=console)]
        lines += table(nodes, cells)
        broken += [f"{nodes}x8, {what}" for c in cells for what in c.broken]
    text = "\n".join(lines)
    Console(width=400).print(text, markup=False)
    for what in broken:
        console.print(what, markup=False)
    if asked.write and not broken:
        asked.write.write_text(text)
    raise SystemExit(1 if broken else 0)


if __name__ == "__main__":
    main()

"""``auto``'s regret if its prices are wrong: ``python benchmarks/perturbed.py --cells 200``.

All plans are made with the analytic cost model and then simulated with one of its prices 30 % higher or lower: links
(their efficiency), contention (how much compute and transfers slow each other) or kernels (efficiency of attention, and
the cost of a row tile). *Regret* is the time of ``auto`` over that of the fastest plan; the candidates are rivals,
every static method in its best degree, and ``auto`` itself. Cells are drawn in turn from clusters, tokens a rank,
lengths, seeds, what is timed and which price is wrong, so that the first cells are a sample. Everything is simulated.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count, islice

from flexcp.compare.compare import NAMES, attention_only, planned
from flexcp.cost import Contention, CostModel
from flexcp.plan.plan import Plan
from flexcp.planners.request import Refused
from flexcp.simulator.training import simulate
from gap import LENGTHS, TOKENS, Cell, experiment_of
from lib.progress import tracked
from simulated import table

SETTINGS = (
    ("h100:4x8", "step"),
    ("a100:4x4", "32/8"),
    ("tp8:32x1", "8/1"),
    ("h100:1x8", "8/1"),
    ("h100:4x8", "32/8"),
    ("a100:4x4", "step"),
)
"""(cluster, what is timed)."""
PRICES = ("links", "contention", "kernels")
WRONG_PERCENT = (70, 130)


@dataclass(frozen=True)
class Regret:
    """A cell, the wrong price, and the fastest strategy."""

    cell: Cell
    price: str
    percent: int
    auto: str
    best: str
    ratio: float


def perturbed(cost: CostModel, price: str, percent: int) -> CostModel:
    """Return the cost model with a price at ``percent`` of its value."""
    if price == "links":
        return replace(cost, link_efficiency=cost.link_efficiency * percent // 100)
    if price == "kernels":
        return cost.with_kernels(percent)
    inside, across = (tuple(_contention(row, percent) for row in cost.rows_beside(way)) for way in (False, True))
    return replace(cost, contention=inside, contention_across=across)


def _contention(row: Contention, percent: int) -> Contention:
    """Return a row with its slowdowns, and the loss of a link, at ``percent`` of their values."""
    names = ("forward", "backward", "forward_alone", "backward_alone", "link")
    return replace(row, **{name: 1000 + (getattr(row, name) - 1000) * percent // 100 for name in names})


def cells() -> Iterator[tuple[Cell, str, int]]:
    """Yield cells without end: settings in turn, for each all prices in both directions,
    then other numbers of tokens and seeds.
    """
    for number in count():
        where, kind = SETTINGS[number % 6]
        price, percent = PRICES[number // 6 % 3], WRONG_PERCENT[number // 18 % 2]
        yield (where, kind, TOKENS[number // 36 % 2], LENGTHS[number % 7], number // 72), price, percent


def regret(cell: Cell, price: str, percent: int) -> Regret:
    """Plan everything with the right prices, and time it with a wrong one."""
    experiment, lengths = experiment_of(cell)
    request = experiment.request(lengths)
    request = attention_only(request) if experiment.training is None else request
    times: dict[str, int] = {}
    auto = ""
    for name in NAMES:
        try:
            _, plan = planned(request, name)
        except Refused:
            continue
        times[name] = _ns(plan, perturbed(request.cost, price, percent), cell)
        auto = plan.strategy if name == "auto" else auto
    best = min(times, key=times.__getitem__)
    return Regret(cell, price, percent, auto, best, times["auto"] / times[best])


def _ns(plan: Plan, cost: CostModel, cell: Cell) -> int:
    found = simulate(plan, cost, training=experiment_of(cell)[0].training)
    return found.attention_ns if found.step is None else found.step.total_ns


def main() -> None:
    """Print a row for each wrong price, the worst cells, and mean and worst of all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", type=int, default=200)
    parser.add_argument(
        "--from", dest="first", type=int, default=0, help="the first cell, to divide them among processes"
    )
    asked = parser.parse_args()
    wanted = list(islice(cells(), asked.first, asked.first + asked.cells))
    found = [regret(*each) for each in tracked(wanted, "cells")]
    rows = []
    for price in PRICES:
        for percent in WRONG_PERCENT:
            mine = [r.ratio for r in found if (r.price, r.percent) == (price, percent)]
            if mine:
                rows.append(
                    [price, f"{percent - 100:+d} %", str(len(mine)), f"{statistics.mean(mine):.4f}", f"{max(mine):.3f}"]
                )
    ratios = [r.ratio for r in found]
    rows.append(["all", "", str(len(found)), f"{statistics.mean(ratios):.4f}", f"{max(ratios):.3f}"])
    print("\n".join(table(["wrong price", "by", "cells", "mean regret", "worst"], rows)))
    worst = sorted(found, key=lambda r: -r.ratio)[:10]
    lines = [[*map(str, r.cell), r.price, f"{r.percent - 100:+d} %", r.auto, r.best, f"{r.ratio:.3f}"] for r in worst]
    heads = [
        "cluster",
        "timed",
        "tokens a rank",
        "lengths",
        "seed",
        "wrong price",
        "by",
        "auto took",
        "fastest",
        "regret",
    ]
    print("\n".join(table(heads, lines)))


if __name__ == "__main__":
    main()

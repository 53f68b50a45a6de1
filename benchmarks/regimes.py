"""When ``auto`` pays, by regime: simulated speed-ups over the best static method of each batch.

``make regimes`` writes docs/results/regimes.md.

A regime is a number of KV heads on a rank and a cluster. In each, batches of several length distributions and two sizes are planned by
``auto`` and by every static method in its best degree, and the event simulator times both. The best static method *of the batch* is a
stronger baseline than a training run has, because a run keeps one method for all its batches. ``--only NAME`` makes one table.
"""

from __future__ import annotations

import argparse
import platform
import statistics
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from rich.console import Console
from rich.progress import track

from flexcp.clusters import Cluster, cluster
from flexcp.cost import CostModel
from flexcp.data.lengths import draw_lengths
from flexcp.models.find import find_model
from flexcp.shape import Shape
from simulated import STATIC, Experiment, row_of, step_of, table

LENGTHS = ("web", "libra256k", "longalign", "longtail", "bimodal", "video")
TOKENS = (8192, 32_768)
EIGHT, ONE = Shape(32, 8, 128, 128), Shape(8, 1, 128, 128)


@dataclass(frozen=True)
class Regime:
    """A kind of machine and model: ``name`` is for ``--only``, ``words`` are what a reader recognises."""

    name: str
    words: str
    clusters: tuple[Cluster, ...]
    shape: Shape
    whole_step: bool = False

    def experiment(self, where: Cluster) -> Experiment:
        return step_of(find_model("llama3-8b"), where) if self.whole_step else Experiment(where, self.shape)


NODE, NODES = (cluster("h100", 1, 8),), (cluster("h100", 4, 8), cluster("h100", 8, 8))
SINGLE = tuple(cluster("h100", nodes, 1) for nodes in (8, 16, 32))
REGIMES = (
    Regime("one-kv-head", "attention, 1 KV head a rank (multi-query, or after tensor parallelism), nodes of 8", NODE + NODES, ONE),
    Regime("one-rank-a-node", "attention, 1 KV head a rank, 1 rank a node (tensor parallelism takes the node)", SINGLE, ONE),
    Regime("several-nodes", "attention, 8 KV heads, 4 and 8 nodes of 8", NODES, EIGHT),
    Regime("several-nodes-step", "whole step of llama3-8b, 8 KV heads, 4 and 8 nodes of 8", NODES, EIGHT, whole_step=True),
    Regime("one-node", "attention, 8 KV heads, one node of 8", NODE, EIGHT),
    Regime("one-node-step", "whole step of llama3-8b, 8 KV heads, one node of 8", NODE, EIGHT, whole_step=True),
)  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """One batch: the fastest static method and what ``auto`` took, in simulated nanoseconds."""

    regime: Regime
    where: str
    lengths: str
    tokens: int
    static: tuple[int, str]
    auto: tuple[int, str]

    @property
    def gain(self) -> float:
        return self.static[0] / self.auto[0]


def simulated_cell(regime: Regime, where: Cluster, lengths: str, tokens: int) -> Cell:
    """Plan and simulate one batch."""
    found = regime.experiment(where).compare(draw_lengths(lengths, tokens * where.ranks, 0), ["auto", *STATIC])
    best, auto = found.best_static, row_of(found, "auto")
    assert best is not None
    assert auto.simulation is not None
    shape = f"{where.nodes}x{where.ranks_per_node}"
    return Cell(regime, shape, lengths, tokens, (best.ns, best.name), (auto.ns, auto.simulation.plan.strategy))


def cells_of(regime: Regime) -> list[Cell]:
    cases = [(where, lengths, tokens) for where in regime.clusters for tokens in TOKENS for lengths in LENGTHS]
    return [simulated_cell(regime, *case) for case in track(cases, regime.name, console=Console(stderr=True))]


def summary(regimes: dict[Regime, list[Cell]]) -> list[str]:
    """A row for each regime."""
    rows = []
    for regime, cells in regimes.items():
        gains = [cell.gain for cell in cells]
        dynamic = sum(cell.auto[1].partition(":")[0] not in STATIC for cell in cells)
        numbers = [statistics.geometric_mean(gains), min(gains), max(gains)]
        rows.append([regime.words, str(len(cells)), *(f"{x:.2f}" for x in numbers), f"{dynamic} of {len(cells)}"])
    return table(["regime", "batches", "mean gain", "worst", "best", "auto leaves static"], rows)


def details(regime: Regime, cells: list[Cell]) -> list[str]:
    """A row for each batch of a regime."""
    rows = [
        [
            c.where,
            f"{c.tokens:,}",
            c.lengths,
            f"{c.static[0] / 1e6:,.1f} ({c.static[1]})",
            f"{c.auto[0] / 1e6:,.1f} ({c.auto[1]})",
            f"{c.gain:.2f}",
        ]
        for c in cells
    ]
    heads = ["nodes x ranks", "tokens a rank", "lengths", "best static, ms", "auto, ms", "gain"]
    return [f"## {regime.words[0].upper()}{regime.words[1:]}", "", *table(heads, rows)]


def page(regimes: dict[Regime, list[Cell]]) -> str:
    """The whole page."""
    lines = [
        "# When it pays, by regime",
        "",
        f"**Simulated**, by `make regimes` on {date.today().isoformat()} ({platform.machine()}); no time here was measured. The event "
        f"simulator with the analytic cost model (stated error {CostModel().error_permille / 10:g} %), presets of H100 nodes, causal "
        "documents, heads of 128, seed 0. *Gain* is the time of the fastest static method of the batch, in its best degree, over the time "
        "of `auto`; means are geometric. The static method may be another in every batch, which a training run cannot do. Names in "
        "parentheses say which static method was fastest and what `auto` took.",
        "",
        *summary(regimes),
    ]
    for regime, cells in regimes.items():
        lines += details(regime, cells)
    return "\n".join(lines)


def main() -> None:
    """Simulate what is asked for and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path)
    parser.add_argument("--only", choices=[regime.name for regime in REGIMES])
    asked = parser.parse_args()
    text = page({regime: cells_of(regime) for regime in REGIMES if asked.only in (None, regime.name)})
    print(text)
    if asked.write:
        asked.write.write_text(text)


if __name__ == "__main__":
    main()

"""When ``auto`` pays, by regime: simulated speed-ups over static methods, each with the name of its baseline.

``make regimes`` writes docs/results/regimes.md.

A regime is a number of KV heads on a rank and a cluster. In each, batches of several length distributions and two sizes
are planned by ``auto`` and by every static method in its best degree, and timed by the event simulator. There are four
baselines: the best static method *of the batch*, which is stronger than what a training run can use, and the best one
*fixed for the run*, chosen on other batches of the same distribution; each with documents dealt by tokens and by load.
``--only NAME`` makes one table.
"""

from __future__ import annotations

import argparse
import platform
import statistics
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from flexcp.clusters import Cluster, cluster
from flexcp.compare.compare import STATIC, STATIC_BY_LOAD
from flexcp.compare.static_choice import DEALINGS, fixed_static
from flexcp.data.lengths import draw_lengths
from flexcp.models.find import find_model
from flexcp.models.topology import divided_preset, topology
from flexcp.planners.static.dealing import method_of
from flexcp.shape import Shape
from flexcp.simulator.step_parts import Training
from lib.progress import tracked
from regimes_heads import LENGTHS, TOKENS, section
from simulated import Experiment, row_of, step_of, table

OTHER_SEEDS = (1, 2)
"""Seeds of the batches on which the method of a run is chosen; the timed batch has seed 0."""
LARGE = find_model("llama3-70b")
EIGHT, ONE = Shape(32, 8, 128, 128), Shape(8, 1, 128, 128)


@dataclass(frozen=True)
class Regime:
    """A kind of machine and model: ``name`` is for ``--only``, ``words`` describe it on the page."""

    name: str
    words: str
    clusters: tuple[Cluster, ...]
    shape: Shape
    whole_step: bool = False
    tp: int = 1

    def experiment(self, where: Cluster) -> Experiment:
        """Return attention alone, or a step of llama3-8b, or of llama3-70b under tensor parallelism."""
        if not self.whole_step:
            return Experiment(where, self.shape)
        if self.tp == 1:
            return step_of(find_model("llama3-8b"), where)
        part = divided_preset(LARGE, tp=self.tp)
        return Experiment(where, part.shape, training=Training(part, tp=self.tp))


NODE, NODES = (cluster("h100", 1, 8),), (cluster("h100", 4, 8), cluster("h100", 8, 8))
SINGLE = tuple(topology(cluster("h100", nodes, 8), LARGE.shape, tp=8).cluster for nodes in (8, 16, 32))
REGIMES = (
    Regime(
        "one-kv-head",
        "attention, 1 KV head a rank (multi-query, or after tensor parallelism), nodes of 8",
        NODE + NODES,
        ONE,
    ),
    Regime("one-rank-a-node", "attention, 1 KV head a rank, 1 rank a node (llama3-70b under tp 8)", SINGLE, ONE),
    Regime(
        "one-rank-a-node-step",
        "whole step of llama3-70b under tp 8: 1 KV head a rank, 1 rank a node",
        SINGLE,
        ONE,
        True,
        tp=8,
    ),
    Regime("several-nodes", "attention, 8 KV heads, 4 and 8 nodes of 8", NODES, EIGHT),
    Regime(
        "several-nodes-step", "whole step of llama3-8b, 8 KV heads, 4 and 8 nodes of 8", NODES, EIGHT, whole_step=True
    ),
    Regime("one-node", "attention, 8 KV heads, one node of 8", NODE, EIGHT),
    Regime("one-node-step", "whole step of llama3-8b, 8 KV heads, one node of 8", NODE, EIGHT, whole_step=True),
)


@dataclass(frozen=True)
class Cell:
    """One batch: ``auto``'s choice, the fastest static method of the batch and the one fixed for the run,
    in simulated nanoseconds.

    Static methods are in the order of ``DEALINGS``: documents dealt by tokens, by load.
    """

    regime: Regime
    where: str
    lengths: str
    tokens: int
    of_batch: tuple[tuple[int, str], ...]
    fixed: tuple[tuple[int, str], ...]
    auto: tuple[int, str]

    @property
    def gain(self) -> float:
        """Speed-up of ``auto`` over the best static method of the batch, documents dealt by tokens."""
        return self.of_batch[0][0] / self.auto[0]

    @property
    def gains(self) -> list[float]:
        """Speed-ups of ``auto`` over the baselines in the order of ``BASELINES``."""
        return [ns / self.auto[0] for ns, _ in (*self.of_batch, *self.fixed)]


BASELINES = [f"{what}, by {dealing}" for what in ("of the batch", "fixed for the run") for dealing in DEALINGS]


def simulated_cell(regime: Regime, where: Cluster, lengths: str, tokens: int) -> Cell:
    """Plan and simulate one batch."""
    experiment = regime.experiment(where)
    batch = draw_lengths(lengths, tokens * where.ranks, 0)
    found = experiment.compare(batch, ["auto", *STATIC, *STATIC_BY_LOAD])
    auto = row_of(found, "auto")
    assert auto.simulation is not None
    best = [found.best_static, found.best_static_by_load]
    others = [experiment.request(draw_lengths(lengths, tokens * where.ranks, seed)) for seed in OTHER_SEEDS]
    chosen = [fixed_static(others, dealing, experiment.rules) for dealing in DEALINGS]
    run = experiment.compare(batch, [choice.strategy for choice in chosen], search=False).rows
    return Cell(
        regime,
        f"{where.nodes}x{where.ranks_per_node}",
        lengths,
        tokens,
        tuple((row.ns, row.name) for row in best if row is not None),
        tuple((row.ns, row.name) for row in run),
        (auto.ns, auto.simulation.plan.strategy),
    )


def cells_of(regime: Regime) -> list[Cell]:
    cases = [(where, lengths, tokens) for where in regime.clusters for tokens in TOKENS for lengths in LENGTHS]
    return [simulated_cell(regime, *case) for case in tracked(cases, regime.name)]


def summary(regimes: dict[Regime, list[Cell]]) -> list[str]:
    """Return a table with a row for each regime."""
    rows = []
    for regime, cells in regimes.items():
        gains = [cell.gain for cell in cells]
        dynamic = sum(method_of(cell.auto[1]) not in STATIC for cell in cells)
        means = [statistics.geometric_mean(each) for each in zip(*(cell.gains for cell in cells), strict=True)]
        numbers = [means[0], min(gains), max(gains), *means[1:]]
        rows.append([regime.words, str(len(cells)), *(f"{x:.2f}" for x in numbers), f"{dynamic} of {len(cells)}"])
    return table(
        [
            "regime",
            "batches",
            f"gain over static {BASELINES[0]}",
            "worst",
            "best",
            *BASELINES[1:],
            "auto leaves static",
        ],
        rows,
    )


def details(regime: Regime, cells: list[Cell]) -> list[str]:
    """Return a table with a row for each batch of a regime."""
    rows = [
        [
            c.where,
            f"{c.tokens:,}",
            c.lengths,
            *(f"{ns / 1e6:,.1f} ({name})" for ns, name in (*c.of_batch, *c.fixed, c.auto)),
            f"{c.gain:.2f}",
        ]
        for c in cells
    ]
    heads = ["nodes x ranks", "tokens a rank", "lengths", *(f"{each}, ms" for each in BASELINES), "auto, ms", "gain"]
    return [f"## {regime.words[0].upper()}{regime.words[1:]}", "", *table(heads, rows)]


def page(regimes: dict[Regime, list[Cell]], heads: list[str]) -> str:
    """Return the page; ``heads`` is its section about few KV heads."""
    lines = [
        "# When it pays, by regime",
        "",
        f"**Simulated**, by `make regimes` on {date.today().isoformat()} ({platform.machine()}); no time here was "
        "measured. The event simulator with the analytic cost model ([errors](errors.md)), presets of H100 nodes, "
        "causal documents, heads of 128, seed 0. *Gain* is the time of a static method over the time of `auto`; means "
        "are geometric. *Of the batch*: the fastest method, in its best degree, of each batch; it may be another in "
        f"every batch, which a training run cannot do. *Fixed for the run*: the one fastest over {len(OTHER_SEEDS)} "
        "other batches of the same lengths, cluster and size. *By tokens*: documents dealt to groups as Megatron-Core, "
        "DeepSpeed and torchtitan do; *by load*: as WLB-LLM does. Worst and best, and the last column of the tables "
        "below, are over the first baseline. Names in parentheses are the static methods and what `auto` took.",
        "",
        *summary(regimes),
        *heads,
    ]
    for regime, cells in regimes.items():
        lines += details(regime, cells)
    return "\n".join(lines)


def main() -> None:
    """Simulate the requested regimes and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path)
    parser.add_argument("--only", choices=[regime.name for regime in REGIMES])
    asked = parser.parse_args()
    regimes = {regime: cells_of(regime) for regime in REGIMES if asked.only in (None, regime.name)}
    text = page(regimes, section() if asked.only is None else [])
    print(text)
    if asked.write:
        asked.write.write_text(text)


if __name__ == "__main__":
    main()

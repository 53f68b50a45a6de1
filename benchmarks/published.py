"""Published figures and simulated ones: ``python benchmarks/published.py FILE`` simulates every figure of a file and
prints its error.

``lib/published_figures.py`` describes the format of the file. Every figure is planned with the strategy that represents
its method and simulated on the cluster it names. Links and kernels are those of ``published_parameters.py``, which come
from other measurements; nothing is fitted to a figure. Without FILE the figures are those of
benchmarks/published.jsonl. ``--write`` makes the page of results and records the errors that flexcp prints (``make
published``). A file with mistakes is refused, with their lines and fields, before anything is simulated.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
from rich.console import Console

import published_page
from block_fcp import efficiency
from flexcp.data.lengths import parse_lengths
from flexcp.masks import Mask
from flexcp.masks.text import parse_mask
from flexcp.models.find import find_model
from flexcp.simulator.copies import copy_mbps
from flexcp.simulator.step_parts import Training
from flexcp.simulator.training import Simulation
from flexcp.simulator.training import simulate as run_plan
from lib.published_fields import RATES, distribution
from lib.published_figures import Figure, FiguresError, read_figures
from lib.published_judging import Result
from published_merges import with_merges
from published_parameters import place
from simulated import Experiment, cut_lengths, mean, scaled_lengths

FIGURES = Path(__file__).with_name("published.jsonl")


@dataclass(frozen=True)
class Setting:
    """A figure's batches on its cluster, ready to be simulated with any method."""

    figure: Figure

    @cached_property
    def experiment(self) -> Experiment:
        figure = self.figure
        cluster, rules, cost = place(figure.cluster, figure.kernel)
        rules = replace(rules, **dict(figure.rules))
        training = None if figure.model is None else Training(find_model(figure.model), figure.sync)
        return Experiment(cluster, figure.shape, cost, rules, training)

    @cached_property
    def batches(self) -> list[list[int]]:
        figure = self.figure
        drawn = distribution(figure.lengths) if isinstance(figure.lengths, str) else None
        if drawn is not None:
            found = [scaled_lengths(*drawn, figure.scale, seed) for seed in range(figure.seeds)]
        elif isinstance(figure.lengths, str):
            found = [parse_lengths(figure.lengths)]
        else:
            found = [list(batch) for batch in figure.lengths]
        return found if figure.longest is None else [cut_lengths(batch, figure.longest) for batch in found]

    def simulate(self, method: str) -> list[Simulation]:
        """Simulate all batches with one method; raises ValueError if it refuses one."""
        mask = parse_mask(self.figure.mask)
        assert isinstance(mask, Mask)
        found = []
        for lengths in self.batches:
            row = self.experiment.compare(lengths, [method], mask).rows[0]
            if row.simulation is None:
                raise ValueError(f"{method} refuses: {row.refused}")
            found.append(row.simulation if self.figure.executor is None else self._with_merges(row.simulation, method))
        return found

    def _with_merges(self, ran: Simulation, method: str) -> Simulation:
        """Simulate the same plan with the figure's own executor,
        which sends keys from where they are and merges after every step.
        """
        speed = copy_mbps(ran.plan.cluster) if ran.rules.copy_mbps is None else ran.rules.copy_mbps
        measured = with_merges(ran.plan, ran.cost, method, speed)
        return run_plan(ran.plan, ran.cost, replace(ran.rules, copy_mbps=0), self.experiment.training, measured)


def simulate(line: int, figure: Figure) -> Result:
    """Simulate a figure; if it lists several methods, the one that is fastest over all batches together."""
    setting = Setting(figure)
    try:
        method, value = _fastest(setting, figure.method)
        if figure.unit == "ratio":
            # Both sides are milliseconds here; the figure is the ratio of their times.
            other, slow = _fastest(setting, figure.over)
            method, value = f"{method} over {other}", slow / value
    except (ValueError, NotImplementedError, ImportError) as error:
        return Result(line, figure, None, refused=str(error))
    return Result(line, figure, value, method)


def _fastest(setting: Setting, methods: Sequence[str]) -> tuple[str, float]:
    found = {method: _measure(setting.figure, setting.simulate(method)) for method in methods}
    choose = max if setting.figure.unit in RATES and setting.figure.unit != "ratio" else min
    best = choose(found, key=lambda m: found[m])
    return best, found[best]


def _measure(figure: Figure, ran: Sequence[Simulation]) -> float:
    """Return the value over all batches in the figure's unit; milliseconds for a ratio."""
    seconds = [_ns(figure, s) / 1e9 for s in ran]
    if figure.unit == "TFLOP/s":
        return mean(s.tflops(figure.direction == "backward") for s in ran)
    way = {"forward": False, "backward": True}.get(figure.direction)
    if figure.unit == "MFU":
        return mean(s.mfu(way) for s in ran)
    if figure.unit == "efficiency":
        return mean(efficiency(s, way) for s in ran)
    if figure.unit == "iter/s":
        return 1 / mean(seconds)
    if figure.unit == "tokens/s":
        return sum(s.plan.batch.tokens / s.plan.ranks for s in ran) / sum(seconds)
    return mean(seconds) * (1 if figure.unit == "s" else 1000)


def _ns(figure: Figure, s: Simulation) -> int:
    if figure.direction == "step":
        assert s.step is not None
        return s.step.total_ns + (_forward_again_ns(s) if figure.recompute else 0)
    ways = (False, True) if figure.direction == "both" else (figure.direction == "backward",)
    return sum(s.pass_ns(way) for way in ways)


def _forward_again_ns(s: Simulation) -> int:
    """Return the time of attention and the rest of every layer forward once more,
    the cost of recomputing in the backward.
    """
    layers = sum(mask.layers for mask in s.plan.batch.masks)
    linear = s.cost.linear_ns(np.asarray(s.plan.placement.tokens), s.plan.shape, s.plan.cluster)
    return s.pass_ns(False) + layers * int(linear.max()) // 3


def main() -> None:
    """Read the figures, simulate them and print a table; write the page if requested."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, nargs="?", default=FIGURES, metavar="FILE")
    parser.add_argument("--write", type=Path, metavar="PAGE")
    parser.add_argument("--only", metavar="TEXT", help="figures whose source or system holds this text")
    asked = parser.parse_args()
    try:
        figures = read_figures(asked.file)
    except FiguresError as error:
        sys.exit(str(error))
    if asked.only:
        figures = [(n, f) for n, f in figures if asked.only.lower() in f"{f.source} {f.system}".lower()]
        if not figures:
            sys.exit(f"no figure of {asked.file} has {asked.only!r} in its source or system")
    console = Console(stderr=True)
    results = []
    for number, figure in figures:
        with console.status(f"{len(results) + 1} of {len(figures)}: {figure.system}, {figure.cluster}"):
            results.append(simulate(number, figure))
    print("\n".join([*published_page.figures_table(results), *published_page.summary(results)]))
    if asked.write:
        asked.write.write_text(published_page.page(results))
        if asked.file == FIGURES and not asked.only:
            published_page.record(results)


if __name__ == "__main__":
    main()

"""``auto`` against static methods, simulated: its gain, and how much of the possible gain that is.
``make auto`` writes docs/results/auto.md.

A *setting* is a cluster, a number of tokens a rank, a mask, and whether attention alone or a whole step of llama3-8b is
timed. In each setting, batches of seven length distributions and three seeds are planned by ``auto`` and by every
static method, and timed by the event simulator. For each batch there are

- four *baselines*: the best static method of the batch, and the one fixed for the run (chosen on the batches of the
  other seeds), each with documents dealt by tokens and by load; a method is taken with the degree that is best by the
  closed form;
- the *floor*, a lower bound for every placement: all compute divided perfectly over the ranks, or the unavoidable
  communication, whichever takes longer;
- the *share of the gap closed*: (best static of the batch by tokens - auto) / (best static of the batch by tokens -
  floor).

If a static method of a batch is more than ``MOST_BEHIND`` faster than ``auto``, the page says so and this script ends
with an error. Everything but planning times is *simulated*; no time here was measured on GPUs.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import platform
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from datetime import date
from functools import cached_property
from itertools import repeat
from pathlib import Path

from rich.console import Console

from flexcp.clusters import cluster
from flexcp.compare.compare import attention_only, planned
from flexcp.compare.static_choice import DEALINGS
from flexcp.cost import CostModel
from flexcp.data.lengths import draw_lengths
from flexcp.masks import Mask, causal, causal_blockwise, lambda_, shared_question
from flexcp.models.find import find_model
from flexcp.planners.auto.auto import auto_plan
from flexcp.planners.request import Refused, Request
from flexcp.planners.static.bounds import dealt_by_load, static_methods
from flexcp.planners.static.dealing import deals_by_load, method_of
from flexcp.planners.static.static import STATIC
from flexcp.planners.strategies import find_strategy
from flexcp.schedule.predict import lower_bound, predict
from flexcp.simulator.bounds import pass_bounds
from flexcp.simulator.training import simulate
from lib.progress import tracked
from simulated import Experiment, step_of, table

MODEL = find_model("llama3-8b")
LENGTHS = ("web", "libra256k", "longalign", "longtail", "bimodal", "video", "half")
SEEDS = (0, 1, 2)
MOST_BEHIND = 0.005
HEADROOM = 1.01
"""Shares of a gap are given only if the best static method takes at least this many times the floor."""
MASKS: dict[str, Mask] = {
    "causal": causal(),
    "lambda": lambda_(),
    "shared question": shared_question(),
    "causal blockwise": causal_blockwise(),
}
BASELINES = [f"{what}, by {dealing}" for what in ("of the batch", "fixed for the run") for dealing in DEALINGS]
INTRODUCTION = """
**Simulated**, by `make auto` on {date} ({machine}); no time here was measured on GPUs. The event simulator with the
cost model `{cost}`, llama3-8b (32 / 8 heads of 128), whole steps under FSDP or attention alone, {distributions}
distributions of lengths, {seeds} seeds. *half* is one document of half of all tokens among web documents. *Headroom*:
the best static method of the batch, documents dealt by tokens, over the floor, which is perfectly divided compute or
unavoidable communication, whichever takes longer. *Share of the gap closed*: the share of the time between the two that
`auto` saves; the mean over batches with a headroom of at least {headroom}. The next four columns are the time of a
static method over that of `auto`, geometric means: *of the batch*, the fastest method of each batch, which no training
run can use; *fixed for the run*, the fastest over the batches of the other seeds; *by tokens* as Megatron-Core,
DeepSpeed and torchtitan deal documents to groups, *by load* as WLB-LLM does. *Worst of the batch* is the least speed-up
over either. *Dynamic* counts the batches for which `auto` chose no static method. {ahead}
"""
PLANNING = (("h100:1x8", 8192), ("h100:4x8", 8192), ("h100:8x8", 8192), ("h100:32x8", 32_768))
"""Clusters and tokens a rank for the table of planning times."""


@dataclass(frozen=True)
class Setting:
    """The cluster, tokens, mask and kind of time for which batches are planned."""

    cluster: str
    tokens: int
    mask: str = "causal"
    whole_step: bool = True

    @property
    def words(self) -> str:
        what = "whole step" if self.whole_step else "attention"
        return f"{what}, {self.mask}, {self.cluster}, {self.tokens:,} a rank"

    @property
    def experiment(self) -> Experiment:
        where = cluster(self.cluster)
        return step_of(MODEL, where) if self.whole_step else Experiment(where, MODEL.shape)


CAUSAL = [
    Setting(where, tokens, whole_step=step)
    for step in (True, False)
    for where in ("h100:4x8", "h100:8x8", "a100:4x4")
    for tokens in (8192, 32_768)
]
SETTINGS = [*CAUSAL, *(Setting("h100:4x8", 8192, mask) for mask in list(MASKS)[1:])]


def lengths_of(name: str, tokens: int, seed: int) -> list[int]:
    """Return document lengths with this many tokens; ``half`` is one document of half of them among web documents."""
    if name == "half":
        return [tokens // 2, *draw_lengths("web", tokens - tokens // 2, seed)]
    return draw_lengths(name, tokens, seed)


class Batch:
    """One batch of a setting; times of strategies are computed once and kept."""

    def __init__(self, setting: Setting, lengths: str, seed: int) -> None:
        self.setting = setting
        experiment = setting.experiment
        tokens = setting.tokens * experiment.cluster.ranks
        asked = experiment.request(lengths_of(lengths, tokens, seed), MASKS[setting.mask])
        self.request = asked if setting.whole_step else attention_only(asked)
        self._predicted: dict[str, int | None] = {}
        self._simulated: dict[str, int] = {}

    @cached_property
    def static_names(self) -> list[str]:
        methods = static_methods(self.request)
        return [m.name for m in (*methods, *dealt_by_load(methods, self.request))]

    def predicted(self, name: str) -> int | None:
        """Return the nanoseconds by the closed form, or None if the strategy refuses."""
        if name not in self._predicted:
            self._predicted[name] = _predicted(self.request, name)
        return self._predicted[name]

    def simulated(self, name: str) -> int:
        """Return the nanoseconds by the event simulator."""
        if name not in self._simulated:
            _, plan = planned(self.request, name, search=False)
            found = simulate(plan, training=self.setting.experiment.training)
            self._simulated[name] = found.attention_ns if found.step is None else found.step.total_ns
        return self._simulated[name]

    @cached_property
    def auto(self) -> tuple[int, str]:
        """Nanoseconds and name of ``auto``'s choice."""
        plan = auto_plan(self.request)
        found = simulate(plan, training=self.setting.experiment.training)
        return found.attention_ns if found.step is None else found.step.total_ns, plan.strategy

    @cached_property
    def floor(self) -> int:
        """A lower bound, in nanoseconds, for every placement."""
        asked, batch = self.request, self.request.batch
        known = (asked.shape, asked.cluster, asked.cost)
        passes = [
            (mask.layers, pass_bounds(batch, number, *known, backward))
            for number, mask in enumerate(batch.masks)
            for backward in (False, True)
        ]
        if not self.setting.whole_step:
            return sum(layers * bound.floor for layers, bound in passes)
        compute = lower_bound(batch, *known, MODEL.head_flops_per_token)
        return max(compute, sum(layers * bound.link for layers, bound in passes))

    def best(self, dealing: str, others: Sequence[Batch] = ()) -> tuple[int, str]:
        """Return nanoseconds and name of the fastest static method of this batch;
        with ``others``, of the method that is fastest on those batches.
        """
        judges = list(others) or [self]
        found = []
        for method in DEALINGS[dealing]:
            totals = {}
            for name in self.static_names:
                times = [judge.predicted(name) for judge in judges]
                if (
                    method_of(name) == method_of(method)
                    and deals_by_load(name) == deals_by_load(method)
                    and None not in times
                ):
                    totals[name] = sum(t for t in times if t is not None)
            if totals:
                name = min(totals, key=totals.__getitem__)
                found.append((sum(judge.simulated(name) for judge in judges), name))
        name = min(found)[1]
        return self.simulated(name), name


def _predicted(request: Request, name: str) -> int | None:
    place, argument = find_strategy(name)
    try:
        placement = place(replace(request, argument=argument))
    except Refused:
        return None
    return predict(placement, request.shape, request.cluster, request.cost).total_ns


@dataclass(frozen=True)
class Cell:
    """One batch: ``auto``'s choice, the baselines in the order of ``BASELINES``, and the floor,
    all in simulated nanoseconds.
    """

    setting: Setting
    lengths: str
    seed: int
    auto: tuple[int, str]
    baselines: tuple[tuple[int, str], ...]
    floor: int

    @property
    def gains(self) -> list[float]:
        """Speed-ups of ``auto`` over each baseline."""
        return [ns / self.auto[0] for ns, _ in self.baselines]

    @property
    def headroom(self) -> float:
        """The first baseline over the floor: the gain of a perfect placement."""
        return self.baselines[0][0] / self.floor

    @property
    def share(self) -> float:
        """The share of the gap between the first baseline and the floor that ``auto`` closed."""
        static = self.baselines[0][0]
        return (static - self.auto[0]) / (static - self.floor)

    @property
    def broken(self) -> list[str]:
        """Messages about static methods of the batch that are clearly faster than ``auto``."""
        where = f"{self.setting.words}, {self.lengths}, seed {self.seed}"
        behind = [(self.auto[0] / ns - 1, name) for ns, name in self.baselines[:2]]
        return [
            f"{where}: {name} is faster than auto ({self.auto[1]}) by {x:.1%}" for x, name in behind if x > MOST_BEHIND
        ]


def cells_of(setting: Setting, lengths: str, seeds: Sequence[int] = SEEDS) -> list[Cell]:
    """Return a cell for each seed; the method fixed for the run is chosen on the other seeds."""
    batches = {seed: Batch(setting, lengths, seed) for seed in seeds}
    found = []
    for seed, batch in batches.items():
        others = [other for number, other in batches.items() if number != seed]
        baselines = [batch.best(dealing) for dealing in DEALINGS]
        baselines += [batch.best(dealing, others) for dealing in DEALINGS]
        found.append(Cell(setting, lengths, seed, batch.auto, tuple(baselines), batch.floor))
    return found


# --- the page ---------------------------------------------------------------------------------------------------------


def summary(name: str, cells: Sequence[Cell]) -> list[str]:
    """Return a table row for some cells."""
    shares = [cell.share for cell in cells if cell.headroom >= HEADROOM]
    gains = list(zip(*(cell.gains for cell in cells), strict=True))
    means = [statistics.geometric_mean(each) for each in gains]
    left = sum(method_of(cell.auto[1]) not in STATIC for cell in cells)
    return [
        name,
        str(len(cells)),
        f"{statistics.geometric_mean(cell.headroom for cell in cells):.3f}",
        f"{statistics.mean(shares):.2f}" if shares else "-",
        *(f"{x:.3f}" for x in means),
        f"{min(gains[0]):.3f}, {min(gains[1]):.3f}",
        f"{left}",
    ]


def summaries(cells: Sequence[Cell]) -> list[str]:
    """Return a table with a row for each setting, and one for all causal settings together."""
    heads = ["setting", "batches", "headroom", "share of the gap closed", *BASELINES, "worst of the batch", "dynamic"]
    rows = []
    for step in (True, False):
        mine = [c for c in cells if c.setting.mask == "causal" and c.setting.whole_step == step]
        if mine:
            rows.append(summary(f"**{'whole steps' if step else 'attention'}, causal, all**", mine))
    other = [c for c in cells if c.setting.mask != "causal"]
    if other:
        rows.append(summary("**other masks, all**", other))
    for setting in dict.fromkeys(cell.setting for cell in cells):
        rows.append(summary(setting.words, [c for c in cells if c.setting == setting]))
    return table(heads, rows)


def by_lengths(cells: Sequence[Cell]) -> list[str]:
    """Return a table with a row for each setting and a column for each distribution:
    the mean gain over the best static method of the batch, and what ``auto`` chose.
    """
    names = list(dict.fromkeys(cell.lengths for cell in cells))
    rows = []
    for setting in dict.fromkeys(cell.setting for cell in cells):
        row = [setting.words]
        for name in names:
            mine = [c for c in cells if (c.setting, c.lengths) == (setting, name)]
            gain = statistics.geometric_mean(c.gains[0] for c in mine)
            row.append(f"{gain:.2f} {', '.join(dict.fromkeys(c.auto[1] for c in mine))}")
        rows.append(row)
    return table(["setting", *names], rows)


def planning_times(clusters: Sequence[tuple[str, int]], lengths: Sequence[str], repeats: int = 3) -> list[str]:
    """Measure the milliseconds of process time of one plan by ``auto``, the least of some repeats."""
    rows = []
    for where, tokens in clusters:
        times = []
        for name in lengths:
            request = Batch(Setting(where, tokens), name, 0).request
            auto_plan(request)  # loads compiled code before anything is timed
            mine = []
            for _ in range(repeats):
                begin = time.process_time()
                auto_plan(request)
                mine.append((time.process_time() - begin) * 1000)
            times.append(min(mine))
        rows.append([where, f"{tokens:,}", f"{statistics.median(times):.0f}", f"{max(times):.0f}"])
    return table(["cluster", "tokens a rank", "median, ms", "worst, ms"], rows)


def ahead_words(cells: Sequence[Cell]) -> str:
    """Return a sentence on the batches in which a static method is faster."""
    broken = [what for cell in cells for what in cell.broken]
    if not broken:
        return f"In no batch is a static method more than {MOST_BEHIND:.1%} faster than `auto`."
    which = "; ".join(broken)
    return f"In {len(broken)} of {len(cells)} batches a static method is more than {MOST_BEHIND:.1%} faster: {which}."


def page(cells: Sequence[Cell], planning: Sequence[str]) -> str:
    """Return the page."""
    words = INTRODUCTION.format(
        date=date.today().isoformat(),
        machine=platform.machine(),
        cost=CostModel().name,
        distributions=len({cell.lengths for cell in cells}),
        seeds=len({cell.seed for cell in cells}),
        headroom=HEADROOM,
        ahead=ahead_words(cells),
    )
    return "\n".join(
        [
            "# auto against static methods",
            "",
            " ".join(words.split()),
            "",
            *summaries(cells),
            "## By lengths",
            "",
            "Mean speed-up over the best static method of the batch by tokens, and what `auto` chose.",
            "",
            *by_lengths(cells),
            "## Planning time",
            "",
            "Measured where this page was made: process time of one core, "
            "warm, whole steps, over the distributions, seed 0.",
            "",
            *planning,
        ]
    )


def main() -> None:
    """Make the tables and write them; exit with 1 if a static method is faster."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path)
    parser.add_argument("--only", default="", help="settings whose words contain this")
    parser.add_argument("--lengths", nargs="*", default=list(LENGTHS))
    parser.add_argument("--seeds", type=int, nargs="*", default=list(SEEDS), help="at least two")
    parser.add_argument("--no-planning", action="store_true", help="no table of planning times")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="that plan and simulate batches")
    asked = parser.parse_args()
    console = Console(stderr=True)
    wanted = [(s, n) for s in SETTINGS if asked.only in s.words for n in asked.lengths]
    cells: list[Cell] = []
    with ProcessPoolExecutor(asked.processes, multiprocessing.get_context("spawn")) as pool:
        found = pool.map(cells_of, (s for s, _ in wanted), (n for _, n in wanted), repeat(asked.seeds))
        for some in tracked(found, "batches", len(wanted)):
            cells += some
    # Planning is timed when nothing else runs.
    planning = [] if asked.no_planning else planning_times(PLANNING, asked.lengths)
    text = page(cells, planning)
    Console(width=400).print(text, markup=False)
    broken = [what for cell in cells for what in cell.broken]
    for what in broken:
        console.print(what, markup=False)
    if asked.write:
        asked.write.write_text(text)
    raise SystemExit(1 if broken else 0)


if __name__ == "__main__":
    main()

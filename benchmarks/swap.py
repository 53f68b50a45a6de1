"""``auto`` in a layout that it may not change, against static methods in the same layout, simulated.
``make swap`` writes docs/results/swap.md.

Who swaps attention alone keeps a layout: every rank has the tokens that its data loader gave it. ``auto`` then plans
where they are computed, and so does each static method, in its best degree. A static method that deals documents to
ranks cannot keep the layout, so it is no rival here. The last column says what planning the layout as well, with
flexcp's loader, would gain on top.

The page says so, and this script ends with an error, if a static method is more than ``MOST_BEHIND`` faster in any
batch.
"""

from __future__ import annotations

import argparse
import platform
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path

from flexcp.clusters import cluster
from flexcp.compare.compare import attention_only, compare
from flexcp.data.lengths import draw_lengths
from flexcp.models.find import find_model
from flexcp.plan.user_layouts import user_layout
from flexcp.planners.static.dealing import method_of
from flexcp.shape import Shape
from lib.progress import tracked
from simulated import STATIC, Experiment, row_of, step_of, table

MODEL = find_model("llama3-8b")
KINDS = {
    "whole step of llama3-8b": None,
    "attention, 32 / 8 heads": MODEL.shape,
    "attention, 8 / 1 heads": Shape(8, 1, 128, 128),
}
CLUSTERS = ("h100:1x8", "h100:4x8", "a100:4x4")
LAYOUTS = ("contiguous", "zigzag")
LENGTHS = ("web", "libra256k", "longalign", "longtail", "bimodal", "video")
TOKENS = (8192, 32_768)
SEEDS = (0, 1, 2)
MOST_BEHIND = 0.005
INTRODUCTION = """
**Simulated**, by `make swap` on {date} ({machine}); no time here was measured. The event simulator with the analytic
cost model ([errors](errors.md)), causal documents, heads of 128, {tokens} tokens a rank, {lengths} distributions of
lengths, {seeds} seeds. Tokens stay in a layout over the whole stream, as they do where attention is swapped in a script
with a data loader of its own: *contiguous* gives every rank one part, *zigzag* one of each half. *Gain* is the time of
the fastest static method in that layout over the time of `auto` in it, geometric mean. *With the loader* is the time of
`auto` in the layout over its time where it may lay tokens as it likes. {behind}
"""


@dataclass(frozen=True)
class Cell:
    """One batch in one layout: the gain over static methods in it, what the loader adds, and whether ``auto`` left
    static methods.
    """

    what: str
    cluster: str
    layout: str
    gain: float
    loader: float
    dynamic: bool


def cells(what: str, where: str, lengths: Sequence[str], seeds: Sequence[int]) -> list[Cell]:
    """Return a cell for each layout, number of tokens, distribution of lengths and seed."""
    machine, shape = cluster(where), KINDS[what]
    experiment = step_of(MODEL, machine) if shape is None else Experiment(machine, shape)
    found = []
    for tokens in TOKENS:
        for name in lengths:
            for seed in seeds:
                asked = experiment.request(draw_lengths(name, tokens * machine.ranks, seed))
                asked = asked if shape is None else attention_only(asked)
                free = row_of(compare(asked, ["auto"]), "auto").ns
                for layout in LAYOUTS:
                    fixed = replace(asked, layout=user_layout(layout, asked.batch.tokens, machine.ranks))
                    compared = compare(fixed, ["auto", *STATIC])
                    chosen, static = row_of(compared, "auto"), compared.best_static
                    assert static is not None and chosen.simulation is not None
                    dynamic = method_of(chosen.simulation.plan.strategy) not in STATIC
                    found.append(Cell(what, where, layout, static.ns / chosen.ns, chosen.ns / free, dynamic))
    return found


def row(name: str, mine: Sequence[Cell]) -> list[str]:
    """Return a row of the table for some cells."""
    gains, loader = [cell.gain for cell in mine], [cell.loader for cell in mine]
    means = (statistics.geometric_mean(gains), min(gains), max(gains), statistics.geometric_mean(loader))
    gain, worst, best, more = (f"{x:.3f}" for x in means)
    return [name, str(len(mine)), gain, worst, best, f"{sum(cell.dynamic for cell in mine)}", more]


def page(found: Sequence[Cell], seeds: Sequence[int]) -> str:
    """Return the page of results."""
    behind = sum(cell.gain < 1 - MOST_BEHIND for cell in found)
    words = f"{behind or 'no'} batch{'es' if behind > 1 else ''}"
    says = f"In {words} is a static method more than {MOST_BEHIND:.1%} faster than `auto`."
    head = INTRODUCTION.format(
        date=date.today(),
        machine=platform.machine(),
        tokens=" and ".join(f"{tokens:,}" for tokens in TOKENS),
        lengths=len(LENGTHS),
        seeds=len(seeds),
        behind=says,
    )
    rows = [row("**all**", found)]
    for what in KINDS:
        rows.append(row(f"**{what}**", [cell for cell in found if cell.what == what]))
        for where in CLUSTERS:
            for layout in LAYOUTS:
                key = (what, where, layout)
                rows.append(row(", ".join(key), [c for c in found if (c.what, c.cluster, c.layout) == key]))
    columns = ["what, where, layout", "batches", "gain", "worst", "best", "dynamic", "with the loader"]
    return "\n".join(["# In a layout of your own", head, *table(columns, rows), ""])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=len(SEEDS))
    parser.add_argument("--write", type=Path, metavar="PAGE")
    asked = parser.parse_args()
    seeds = range(asked.seeds)
    parts = [(what, where) for what in KINDS for where in CLUSTERS]
    found = []
    for what, where in tracked(parts, "swap"):
        found += cells(what, where, LENGTHS, seeds)
    text = page(found, seeds)
    print(text)
    if asked.write:
        asked.write.write_text(text)
    return int(any(cell.gain < 1 - MOST_BEHIND for cell in found))


if __name__ == "__main__":
    raise SystemExit(main())

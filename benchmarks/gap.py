"""The share of the gap between static methods and perfect plans that a strategy closes: ``python benchmarks/gap.py
groups``.

A cell is a cluster, a number of tokens a rank, what is timed (a step of llama3-8b; attention of 32 / 8 or of 8 / 1
heads of 128) and a distribution of lengths. The *gap* of a cell is the time between the fastest static method of the
batch and a lower bound for every plan: the larger of perfectly divided compute and unavoidable communication. A
strategy that is as fast as the static method closes 0 of it, a perfect one 1, a slower one less than 0. Rows are means
over lengths and numbers of tokens (shares arithmetic, speed-ups geometric), relative to the best static method with
documents dealt by tokens and, in the last two columns, by load. Everything is simulated.

The lower bound ignores costs of every plan that moves anything: multiprocessors left to transfers, copies of messages,
row tiles and kernels of cut documents. ``--parts`` prints for each cell the parts of a strategy's time over perfectly
divided compute (:mod:`lib.lost_time`), which separates what a planner could still gain (imbalance, exposed
communication) from what none can.

Static methods take most of the run time: ``--baselines FILE`` keeps their results for other strategies and other
versions of the planners.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator
from pathlib import Path

from flexcp.clusters import Cluster, cluster
from flexcp.compare.compare import STATIC, STATIC_BY_LOAD, Row, attention_only, planned
from flexcp.data.lengths import draw_lengths
from flexcp.models.find import find_model
from flexcp.models.topology import topology
from flexcp.schedule.predict import lower_bound
from flexcp.shape import Shape
from flexcp.simulator.bounds import pass_bounds
from lib.lost_time import LostTime, lost_time
from lib.progress import tracked
from simulated import Experiment, step_of, table

LENGTHS = ("web", "libra256k", "longalign", "longtail", "bimodal", "video", "half")
TOKENS = (8192, 32_768)
KINDS = {"step": None, "32/8": Shape(32, 8, 128, 128), "8/1": Shape(8, 1, 128, 128)}
Cell = tuple[str, str, int, str, int]
"""(cluster, what is timed, tokens a rank, lengths, seed)."""


def cluster_of(name: str) -> Cluster:
    """Return a preset, or for ``tp8:32x1`` one rank of llama3-70b under tensor parallelism in each of 32 nodes
    of 8 H100.
    """
    if name.startswith("tp8:"):
        nodes = int(name.removeprefix("tp8:").partition("x")[0])
        return topology(cluster("h100", nodes, 8), find_model("llama3-70b").shape, tp=8).cluster
    return cluster(name)


def cells_of(clusters: list[str], seeds: int) -> Iterator[Cell]:
    for name in clusters:
        for kind in ["8/1"] if name.startswith("tp8:") else list(KINDS):
            yield from ((name, kind, n, lengths, s) for n in TOKENS for lengths in LENGTHS for s in range(seeds))


def experiment_of(cell: Cell) -> tuple[Experiment, list[int]]:
    """Return where the cell's batch runs, and its documents; ``half`` is one document
    of half the tokens among documents of ``web``.
    """
    name, kind, each, lengths, seed = cell
    where, shape = cluster_of(name), KINDS[kind]
    tokens = each * where.ranks
    found = step_of(find_model("llama3-8b"), where) if shape is None else Experiment(where, shape)
    if lengths == "half":
        return found, [tokens // 2, *draw_lengths("web", tokens - tokens // 2, seed)]
    return found, draw_lengths(lengths, tokens, seed)


def bound_ns(experiment: Experiment, lengths: list[int]) -> int:
    """Return a lower bound for every plan."""
    request = experiment.request(lengths)
    request = attention_only(request) if experiment.training is None else request
    how = (request.shape, request.cluster, request.cost)
    masks = list(enumerate(request.batch.masks))
    bounds = [(m, pass_bounds(request.batch, i, *how, backward)) for i, m in masks for backward in (False, True)]
    if experiment.training is None:
        return sum(m.layers * b.floor for m, b in bounds)
    compute = lower_bound(request.batch, *how, experiment.training.model.head_flops_per_token)
    return max(compute, sum(m.layers * b.link for m, b in bounds))


def perfect_ns(experiment: Experiment, lengths: list[int]) -> int:
    """Return the time of all compute, divided perfectly: of a whole step, or of attention."""
    request = experiment.request(lengths)
    how = (request.shape, request.cluster, request.cost)
    if experiment.training is not None:
        return lower_bound(request.batch, *how, experiment.training.model.head_flops_per_token)
    masks = list(enumerate(request.batch.masks))
    return sum(m.layers * pass_bounds(request.batch, i, *how, way).compute for i, m in masks for way in (False, True))


def parts_row(cell: Cell, strategy: str, by_tokens: int, bound: int) -> list[str]:
    """Return a table row of where a cell's time goes, each number over the lower bound."""
    experiment, lengths = experiment_of(cell)
    request = experiment.request(lengths)
    request = attention_only(request) if experiment.training is None else request
    _, plan = planned(request, strategy, search=False)
    perfect = perfect_ns(experiment, lengths)
    lost = lost_time(plan, experiment.training, perfect)
    total = perfect + round(sum(lost.shares(1)))
    numbers = [by_tokens / bound, total / bound, perfect / bound, *lost.shares(bound)]
    return [*map(str, cell), plan.strategy, f"{bound / 1e6:.1f}", *(f"{x:.3f}" for x in numbers)]


def baselines_of(cell: Cell) -> tuple[int, int, int]:
    """Return the nanoseconds of the best static method by tokens, by load, and of the lower bound."""
    experiment, lengths = experiment_of(cell)
    found = experiment.compare(lengths, [*STATIC, *STATIC_BY_LOAD])
    best = (found.best_static, found.best_static_by_load)
    by_tokens, by_load = (row.ns for row in best if row is not None)
    return by_tokens, by_load, bound_ns(experiment, lengths)


def row_of(cell: Cell, strategy: str) -> Row:
    experiment, lengths = experiment_of(cell)
    return experiment.compare(lengths, [strategy], search=False).rows[0]


def main() -> None:
    """Simulate all cells and print a row for each cluster, kind and strategy."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("strategies", nargs="+")
    parser.add_argument("--clusters", nargs="*", default=["h100:4x8", "h100:8x8", "a100:4x4", "tp8:32x1"])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--parts", action="store_true", help="a row for each cell: where its time goes")
    parser.add_argument("--baselines", type=Path)
    asked = parser.parse_args()
    kept = asked.baselines is not None and asked.baselines.exists()
    known: dict[str, list[int]] = json.loads(asked.baselines.read_text()) if kept else {}
    found: dict[tuple[str, str, str], list[tuple[float, ...]]] = {}
    parts: list[list[str]] = []
    cells = list(cells_of(asked.clusters, asked.seeds))
    for cell in tracked(cells, "cells"):
        key = json.dumps(cell)
        if key not in known:
            known[key] = list(baselines_of(cell))
            if asked.baselines is not None:
                asked.baselines.write_text(json.dumps(known))
        by_tokens, by_load, bound = known[key]
        if asked.parts:
            parts += [parts_row(cell, strategy, by_tokens, bound) for strategy in asked.strategies]
            continue
        for strategy in asked.strategies:
            row = row_of(cell, strategy)
            numbers = [
                x for static in (by_tokens, by_load) for x in ((static - row.ns) / (static - bound), static / row.ns)
            ]
            found.setdefault((*cell[:2], strategy), []).append((*numbers, row.planning_ms))
    if asked.parts:
        heads = ["cluster", "timed", "tokens a rank", "lengths", "seed", "plan", "floor, ms", "static", "strategy"]
        print("\n".join(table([*heads, "perfect compute", *LostTime.names()], parts)))
        return
    rows = []
    for of, values in found.items():
        share, gain, share_by_load, gain_by_load, planning = zip(*values, strict=True)
        shares = [f"{statistics.mean(x):.2f}" for x in (share, share_by_load)]
        gains = [f"{statistics.geometric_mean(x):.3f}" for x in (gain, gain_by_load)]
        rows.append(
            [
                *of,
                str(len(values)),
                shares[0],
                gains[0],
                f"{min(gain):.3f}",
                shares[1],
                gains[1],
                f"{statistics.median(planning):.0f}",
            ]
        )
    heads = [
        "cluster",
        "timed",
        "strategy",
        "cells",
        "share of the gap",
        "speed-up",
        "worst",
        "share, @load",
        "speed-up, @load",
        "planning ms",
    ]
    print("\n".join(table(heads, rows)))


if __name__ == "__main__":
    main()

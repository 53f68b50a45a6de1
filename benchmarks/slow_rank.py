"""One slow rank, measured in the box: how much of the lost time the loader wins back by following speeds.

    sudo python benchmarks/slow_rank.py                                            # 2 nodes of 2 ranks, one at 70 %
    sudo python benchmarks/slow_rank.py --write docs/results/slow-rank.md

Every rank is a network namespace with ports of ``--mbit`` (benchmarks/lib/box.py) and a device paced at ``--gflops``.
Real loaders give out the same batches in three cases, in turns: with all ranks at full speed, with one at ``--speed``
of it, and the latter again with ``Planning(follow_speeds=...)``, with which the loader learns of the slow rank from
telemetry alone. A step is a forward and a backward of one layer, with all ranks starting together, and takes as long as
its slowest rank; planning is not included.

The loss of a step is its time beyond that with all ranks at full speed. Needs root and iproute2; without them it says
so and ends with exit code 0.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist

import flexcp
from box_options import box_cluster, box_parser, parsed
from flexcp.clusters import Cluster
from flexcp.cost import PEAK_PERMILLE, CostModel, Model
from flexcp.data import Loader, LocalBatch, Planning
from lib.box import Box
from lib.step_time import paced_kernel

DTYPE, HEADS, KV_HEADS, HEAD_DIM = "float32", 8, 2, 32
COST = CostModel(
    "box",
    1000,
    1000,
    1000,
    link_efficiency=950,
    row_tile_pairs=0,
    kernel_ns=300_000,
    message_ns=100_000,
    model=Model("attention only", hidden=1, layers=1, feed_forward=1),
)
BUDGET, LONGEST = 16_384, 6_000
LOOKAHEAD, EVERY, STEPS, AFTER = 4, 4, 24, 16


@dataclass(frozen=True)
class Run:
    """A rank's results in a case: seconds of every repeat of its steps, and the corrections at the end."""

    seconds: list[list[float]]
    corrections: list[Any]


class Sized:
    """A map-style dataset with known lengths of all sizes and tokens that cost nothing to make."""

    def __init__(self, count: int = 4000) -> None:
        drawn = np.random.default_rng(0).lognormal(6.8, 1.1, count)
        self.lengths = np.clip(drawn.astype(np.int64), 16, LONGEST)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, number: int) -> np.ndarray:
        return np.zeros(self.lengths[number], np.int64)


@dataclass(frozen=True)
class Case:
    """The speed of the slow rank, and the number of steps between corrections (0: none)."""

    speed: float
    every: int


def run(
    group: dist.ProcessGroup,
    machine: Cluster,
    gflops: float,
    strategy: str,
    cases: list[Case],
    steps: int,
    repeats: int,
) -> list[Run]:
    """Train some steps of every case, in turns, with the last rank slow; collective over ``group``."""
    sizes: dict[str, Any] = {"dtype": DTYPE, "cluster": machine, "cost": COST, "strategy": strategy}
    planner = flexcp.Planner(HEADS, KV_HEADS, HEAD_DIM, **sizes)
    found = [Run([], []) for _ in cases]
    with ExitStack() as stack:
        loaders = []
        for case in cases:
            planning = Planning(lookahead=LOOKAHEAD, workers=0, follow_speeds=case.every)
            telemetry = flexcp.Telemetry(stall=None) if case.every else None
            loader = Loader(Sized(), planner, budget=BUDGET, group=group, telemetry=telemetry, planning=planning)
            loaders.append(stack.enter_context(loader))
        iterators = [iter(loader) for loader in loaders]
        for _ in range(steps):
            batches = [next(iterator) for iterator in iterators]
            for told in found:
                told.seconds.append([])
            for _ in range(repeats):
                for case, batch, told in zip(cases, batches, found, strict=True):
                    pace = gflops * (case.speed if group.rank() == group.size() - 1 else 1.0)
                    told.seconds[-1].append(_timed(batch, group, pace))
        for loader, told in zip(loaders, found, strict=True):
            told.corrections.extend(loader.state_dict()["speeds"])
    return found


def _timed(batch: LocalBatch, group: dist.ProcessGroup, gflops: float) -> float:
    """Return the seconds of forward and backward."""
    rows = len(batch.tokens)
    batch.step.prepare("cpu")
    q = torch.zeros(rows, HEADS, HEAD_DIM, requires_grad=True)
    k, v = (torch.zeros(rows, KV_HEADS, HEAD_DIM) for _ in range(2))
    with paced_kernel(gflops):
        dist.barrier(group)
        begin = time.perf_counter()
        flexcp.attention(q, k, v, batch.step).sum().backward()  # type: ignore[union-attr]
        return time.perf_counter() - begin


def main() -> None:
    """Measure and print, or write the page."""
    parser = box_parser(__doc__, nodes=2, mbit=400, repeats=3)
    parser.add_argument("--gflops", type=float, default=24.0, help="speed of a paced device")
    parser.add_argument("--speed", type=float, default=0.7, help="of the slow rank, as a share of the others'")
    parser.add_argument("--strategy", default="groups")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--write", type=Path, help="the page to write")
    asked = parsed(parser)
    if asked is None:
        return
    signal.signal(signal.SIGTERM, _end)  # so that the box is removed
    machine = box_cluster(asked, round(asked.gflops * 1000 / PEAK_PERMILLE[DTYPE]) or 1)
    with Box(asked.nodes, asked.ranks) as box:
        box.network.limit(asked.mbit)
        cases = [Case(1.0, 0), Case(asked.speed, 0), Case(asked.speed, EVERY)]
        ranks = box.run(run, machine, asked.gflops, asked.strategy, cases, asked.steps, asked.repeats)
    text = page(asked, machine, ranks)
    print(text)
    if asked.write is not None:
        asked.write.write_text(text)


def page(asked: argparse.Namespace, machine: Cluster, told: list[list[Run]]) -> str:
    """Return the page: the three cases by ranges of steps."""
    took = [np.max([rank[case].seconds for rank in told], axis=0).min(axis=1) * 1e3 for case in range(3)]
    corrections = told[0][2].corrections
    ranks, speed = machine.ranks, asked.speed
    best = 1 - (ranks / (ranks - 1 + speed) - 1) / (1 / speed - 1)
    lines = [
        "# One rank slowed down",
        "",
        f"**Measured** on {date.today()}, `sudo python benchmarks/slow_rank.py --write docs/results/slow-rank.md`: "
        f"{machine.nodes} x {machine.ranks_per_node} ranks in the box (network namespaces, ports of {asked.mbit} "
        f"Mbit/s, devices paced at {asked.gflops:g} GFLOP/s, `{asked.strategy}`, {HEADS} / {KV_HEADS} heads of "
        f"{HEAD_DIM}, batches of at most {BUDGET:,} tokens), rank {ranks - 1} at {speed:.0%} of the others' speed from "
        f"the first step on. `Planning(follow_speeds={EVERY}, lookahead={LOOKAHEAD})` is told nothing of it. "
        f"Milliseconds of forward and backward of one layer, the slowest rank in the fastest of {asked.repeats} "
        "repeats, medians over the steps, the three cases in turns; the loss is what a step takes longer than with all "
        "ranks at full speed.",
        "",
        "| steps | all at full speed | one slow | one slow, followed | of the loss won back |",
        "| --- | --- | --- | --- | --- |",
    ]
    last = min(AFTER, asked.steps)
    for first, end in ((0, EVERY + LOOKAHEAD), (EVERY + LOOKAHEAD, last), (last, asked.steps)):
        if first < end:
            a, b, c = (float(np.median(ms[first:end])) for ms in took)
            lines.append(f"| {first} to {end - 1} | {a:.0f} | {b:.0f} | {c:.0f} | {(b - c) / (b - a):.0%} |")
    words = "; ".join(f"from step {step} on {', '.join(map(str, speeds))} per mille" for _, step, speeds in corrections)
    lines += [
        "",
        f"Corrections agreed on: {words or 'none'}. With {ranks} ranks of which one computes at {speed:.0%}, work "
        f"divided perfectly by speed wins back {best:.0%}.",
    ]
    return "\n".join(lines) + "\n"


def _end(*_: object) -> NoReturn:
    sys.exit(143)


if __name__ == "__main__":
    main()

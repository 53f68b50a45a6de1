"""A cluster in a box, measured: steps of attention over slow links, compared with compute and communication alone.

    sudo python benchmarks/box.py --nodes 2 --ranks 2 --mbit 200 --gflops 20    # every rank paced at 20 GFLOP/s
    sudo python benchmarks/box.py --nodes 2 --ranks 2 --mbit 50 --real          # real kernels on this machine's cores

Ranks are network namespaces, a rank's network port carries ``--mbit`` in each direction, and messages are real TCP
(benchmarks/lib/box.py). By default compute is paced, because ranks that share two cores wait for each other, which
devices of a cluster do not. ``--real`` runs the CPU kernel, calibrates the planner on it, and compares results. A row
marked "no relays" is the placement above it with every key sent straight from its owner.

Columns: MB between nodes in a step, planned and counted by the links (headers included); milliseconds of the slowest
rank in the fastest of ``--repeats`` for compute alone, communication alone and the step; the step over the longer of
the two; the step over that of the first row. Needs root and iproute2; without them it says so and ends with exit code
0.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import NoReturn

from box_options import box_cluster, box_parser, parsed
from flexcp.clusters import Cluster, cluster
from flexcp.cost import PEAK_PERMILLE, CostModel, Model
from flexcp.data.lengths import parse_lengths
from flexcp.masks import causal
from flexcp.plan.plan import Plan
from flexcp.planner import Planner
from flexcp.planners.strategies import split_names
from flexcp.schedule.transfers import make_plan
from lib.box import Box
from lib.step_time import Arrays, StepPart, difference, slowest_ms, time_steps

DTYPE = "float32"
# Only attention is timed, so a token costs nothing else. Starting a pass through Python and gloo takes a fraction of a
# millisecond.
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
PARTS: tuple[StepPart, ...] = ("compute", "communication", "whole")


def main() -> None:
    """Measure the requested plans and print a table."""
    parser = box_parser(__doc__, nodes=2, mbit=200, repeats=3)
    parser.add_argument("--gflops", type=float, default=20.0, help="speed of a paced device")
    parser.add_argument("--real", action="store_true", help="compute with the CPU kernel instead")
    parser.add_argument("--lengths", default="8192,1024,2048,512,700,300,1500,96,2000")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--strategies", default="auto,ring,zigzag,allgather")
    asked = parsed(parser)
    if asked is None:
        return
    signal.signal(signal.SIGTERM, _end)  # so that the box is removed
    with Box(asked.nodes, asked.ranks) as box:
        gflops = _real_gflops(box, asked) if asked.real else asked.gflops
        machine = box_cluster(asked, round(gflops * 1000 / PEAK_PERMILLE[DTYPE]) or 1)
        print(
            f"{machine}, {asked.mbit} Mbit/s a rank, {gflops:.1f} GFLOP/s a rank ({'real' if asked.real else 'paced'})"
        )
        print(
            "| plan | stages | MB planned | MB counted | compute | communication | step | step / longer | step / "
            "first's |"
        )
        print("| --- " * 9 + "|")
        box.network.limit(asked.mbit)
        first: float | None = None
        exact: Arrays | None = None
        for name, plan in _plans(asked, machine):
            row, step, results = _measured(box, plan, asked)
            first = step if first is None else first
            print(f"| {name} | {row} | {step / first:.2f} |", flush=True)
            if results is not None:
                exact = exact or results
                print(f"  results differ from the first row's by {difference(results, exact):.1e}", flush=True)


def _plans(asked: argparse.Namespace, machine: Cluster) -> Iterator[tuple[str, Plan]]:
    lengths = parse_lengths(asked.lengths)
    for strategy in split_names(asked.strategies):
        plan = _planner(asked, machine, strategy)(lengths, causal())
        yield strategy, plan
        traffic = plan.placement.traffic
        if traffic.kind == "needed" and traffic.relay:
            placement = replace(plan.placement, traffic=replace(traffic, relay=False))
            yield f"{strategy}, no relays", make_plan(placement, plan.shape, machine, COST, strategy)


def _planner(asked: argparse.Namespace, machine: Cluster, strategy: str) -> Planner:
    return Planner(
        asked.heads, asked.kv_heads, asked.head_dim, dtype=DTYPE, cluster=machine, cost=COST, strategy=strategy
    )


def _measured(box: Box, plan: Plan, asked: argparse.Namespace) -> tuple[str, float, Arrays | None]:
    """Return the middle cells of a table row, the step's milliseconds, and the results of real kernels."""
    gflops = None if asked.real else asked.gflops
    ms = {}
    for part in PARTS:
        before = sum(box.network.sent_bytes())
        ranks = box.run(time_steps, plan, part, asked.repeats, gflops, asked.real and part == "whole")
        crossed = sum(box.network.sent_bytes()) - before
        ms[part] = slowest_ms(ranks)
        if part == "communication":
            counted = crossed / (asked.repeats + 1)
    planned = plan.inter_node_bytes() + plan.inter_node_bytes(backward=True)
    longer = max(ms["compute"], ms["communication"])
    stages = "/".join(str(program.stages) for program in plan.programs[0])
    cells = [stages, f"{planned / 1e6:.2f}", f"{counted / 1e6:.2f}", *(f"{ms[part]:.0f}" for part in PARTS)]
    return " | ".join([*cells, f"{ms['whole'] / longer:.2f}"]), ms["whole"], ranks[0].results


def _real_gflops(box: Box, asked: argparse.Namespace) -> float:
    """Return the GFLOP/s of the CPU kernel on one rank while all are busy with a document each."""
    machine = cluster("cpu", asked.nodes, asked.ranks)
    plan = _planner(asked, machine, "dp")([2048] * machine.ranks, causal())
    work = int(plan.work().max()) * 7 * 2 * asked.head_dim
    return work / slowest_ms(box.run(time_steps, plan, "compute", asked.repeats)) / 1e6


def _end(*_: object) -> NoReturn:
    sys.exit(143)


if __name__ == "__main__":
    main()

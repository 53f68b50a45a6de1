"""``auto``'s regret, judged by times that it was not chosen by: every strategy's plan is replayed with real kernels.

    python benchmarks/regret.py                  # CPU kernels on this machine; takes minutes, wants an idle machine
    python benchmarks/regret.py --device cuda    # on a GPU machine
    python benchmarks/regret.py --device cuda --calibration h200.json    # planned with a file of `flexcp calibrate`

In steps, so that a GPU machine only times kernels (planning and simulating are slow where Numba is missing):

    python benchmarks/regret.py --device cuda --plans plans.pkl --make-plans
    python benchmarks/regret.py --device cuda --plans plans.pkl --times times.pkl --make-times    # on the GPU machine
    python benchmarks/regret.py --device cuda --plans plans.pkl --times times.pkl

For each batch all strategies are planned, the kernels of every rank run one after the other, and communication is
simulated around them (flexcp/measure/calibrate/replay.py). Regret is the time of ``auto`` over that of the best
strategy. Plans of several strategies that compute and move the same are timed once, because two replays of one plan may
differ by several percent. All plans take turns in rounds, every second one in the opposite order. After two rounds only
plans within 10 % of the fastest are timed further, and that of ``auto``. Regret is stated twice: by each plan's fastest
round, and by the median of each slot over the rounds, which one lucky or unlucky round does not move. On a CPU the cost
model is calibrated first, because a planner with a GPU's cost model could not be judged; on a GPU it is the analytic
one if no calibration is given.
"""

from __future__ import annotations

import argparse
import pickle
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from flexcp.batch import make_batch
from flexcp.calibration import Calibration, read_calibration
from flexcp.clusters import cluster
from flexcp.compare.compare import NAMES, attention_only, planned
from flexcp.cost import CostModel
from flexcp.data.lengths import draw_lengths
from flexcp.masks import causal
from flexcp.measure.calibrate.calibrate import calibrate_here
from flexcp.measure.calibrate.replay import slot_times
from flexcp.plan.plan import Plan, digest
from flexcp.planners.request import Refused, Request
from flexcp.shape import Shape
from flexcp.simulator.passes import Rules
from flexcp.simulator.training import simulate

BATCHES = ("web", "libra256k", "longalign", "longtail", "bimodal", "video", "equal")
ALL, CLOSE = 2, 1.1
"""In how many rounds every plan takes part, and how much slower than the fastest one a plan of later rounds may be."""
Plans = dict[str, dict[str, Plan]]
"""The plan of each strategy, by batch (``web:0``)."""
Round = dict[tuple[int, bool], Any]
"""Nanoseconds ``[rank, slot]`` of kernels by (mask, backward)."""
Times = dict[str, list[Round]]
"""The rounds of each plan, by :func:`tables_hash`."""


def tables_hash(plan: Plan) -> str:
    """Return a hash of what a plan computes and moves.

    The plan's own hash also covers which strategy was asked for, so the plan that ``auto`` took would have another.
    """
    return digest({}, plan.tables())


def made_plans(device: str, ranks: int, tokens: int, seeds: int, shape: Shape, found: Calibration) -> Plans:
    """Return the plans of all strategies for every batch; strategies that refuse a batch are missing."""
    machine = found.on(cluster("cpu" if device == "cpu" else "h200", 1, ranks))
    plans: Plans = {}
    for name in BATCHES:
        for seed in range(seeds):
            batch = make_batch(draw_lengths(name, tokens * ranks, seed), causal())
            request = attention_only(Request(batch, shape, machine, found.cost))
            plans[f"{name}:{seed}"] = {}
            for strategy in NAMES:
                with suppress(Refused):
                    plans[f"{name}:{seed}"][strategy] = planned(request, strategy)[1]
    return plans


def measured(plans: Plans, device: str, rounds: int = 2) -> Iterator[tuple[str, Times]]:
    """Time the kernels of plans in ``rounds`` rounds, batch by batch, and yield (batch, times).

    All plans take part in the first ``ALL`` rounds, those that may still be the fastest in the others.
    """
    for batch, by_strategy in plans.items():
        distinct = {tables_hash(plan): plan for plan in by_strategy.values()}
        times: Times = {name: [] for name in distinct}
        names = list(distinct)
        for turn in range(rounds):
            if turn == ALL:
                reached = {name: fastest_round_ms(distinct[name], times[name], device) for name in names}
                within = CLOSE * min(reached.values())
                names = [x for x in names if reached[x] <= within or x == tables_hash(by_strategy["auto"])]
            for name in names[:: -1 if turn % 2 else 1]:
                plan = distinct[name]
                passes = [(mask, backward) for mask in range(len(plan.programs)) for backward in (False, True)]
                times[name].append({x: slot_times(plan, *x, device) for x in passes})
        yield batch, times


def fastest_round_ms(plan: Plan, rounds: list[Round], device: str) -> float:
    """Return the shortest time of the plan over its rounds, communication simulated, in milliseconds."""
    return min(_attention_ms(plan, one, device) for one in rounds)


def median_slots_ms(plan: Plan, rounds: list[Round], device: str) -> float:
    """Return the time of the plan if each slot takes its median over the rounds, in milliseconds."""
    medians = {way: np.median([one[way] for one in rounds], axis=0).astype(np.int64) for way in rounds[0]}
    return _attention_ms(plan, medians, device)


def _attention_ms(plan: Plan, times: Round, device: str) -> float:
    return simulate(plan, rules=Rules(contention=device != "cpu"), measured=partial(_passes, times)).attention_ns / 1e6


def regret(
    plans: dict[str, Plan], times: Times, device: str, ms: Callable[[Plan, list[Round], str], float] = fastest_round_ms
) -> tuple[str, float, float]:
    """Return (best strategy, auto's ms, best ms); plans that do the same have the same time."""
    names = {strategy: tables_hash(plan) for strategy, plan in plans.items()}
    distinct = {names[strategy]: plan for strategy, plan in plans.items()}
    found = {name: ms(plan, times[name], device) for name, plan in distinct.items()}
    best = min(plans, key=lambda strategy: found[names[strategy]])
    return best, found[names["auto"]], found[names[best]]


def _passes(times: Round, mask: int, backward: bool) -> Any:
    return times[mask, backward]


def _calibration(path: Path | None, shape: Shape, cpu: bool) -> Calibration:
    """Return the calibration to plan with: of a file, of this machine's CPU kernels, or the analytic one."""
    if path is not None:
        return read_calibration(path)
    return calibrate_here(shape, 1, "cpu") if cpu else Calibration(CostModel())


def main() -> None:
    """Print the table, and worst and mean regret, or make what a later step needs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=0, help="of a rank; 1,024 on CPUs, 8,192 on GPUs by default")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--calibration", type=Path, help="a file of flexcp calibrate --write, made where kernels run")
    parser.add_argument("--plans", type=Path, help="plans made by --make-plans; planned here without it")
    parser.add_argument("--make-plans", action="store_true")
    parser.add_argument("--times", type=Path, help="times made by --make-times; kernels run here without it")
    parser.add_argument("--make-times", action="store_true", help="the file is written after every batch")
    asked = parser.parse_args()
    cpu = asked.device == "cpu"
    shape = Shape(4, 4, 32, 32, "float32") if cpu else Shape(32, 8, 128, 128)
    tokens = asked.tokens or (1024 if cpu else 8192)
    if asked.plans and not asked.make_plans:
        # The file was written by --make-plans, by the same user, so unpickling it is safe.
        plans: Plans = pickle.loads(asked.plans.read_bytes())
    else:
        found = _calibration(asked.calibration, shape, cpu)
        plans = made_plans(asked.device, asked.ranks, tokens, asked.seeds, shape, found)
    if asked.make_plans:
        asked.plans.write_bytes(pickle.dumps(plans))
        return
    if asked.make_times:
        times: dict[str, Times] = {}
        begin = time.monotonic()
        for batch, one in measured(plans, asked.device, asked.rounds):
            times[batch] = one
            asked.times.write_bytes(pickle.dumps(times))
            print(f"{batch}: {len(one)} plans, {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)
        return
    known = (
        pickle.loads(asked.times.read_bytes()).items() if asked.times else measured(plans, asked.device, asked.rounds)
    )
    print("| batch | best by rounds | auto ms | best ms | regret | best by slots | auto ms | best ms | regret |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    ratios: dict[str, list[float]] = {"fastest rounds": [], "median slots": []}
    for batch, one in known:
        cells = [batch]
        for found, ms in zip(ratios.values(), (fastest_round_ms, median_slots_ms), strict=True):
            best, mine, least = regret(plans[batch], one, asked.device, ms)
            found.append(mine / least)
            cells += [best, f"{mine:.2f}", f"{least:.2f}", f"{mine / least:.3f}"]
        print(f"| {' | '.join(cells)} |", flush=True)
    print()
    for name, found in ratios.items():
        print(f"by {name}, {len(found)} batches: mean {statistics.mean(found):.3f}, worst {max(found):.3f}")


if __name__ == "__main__":
    main()

"""``auto``'s regret, judged by times that it was not chosen by: every strategy's plan is replayed with real kernels.

    python benchmarks/regret.py                  # CPU kernels on this machine; takes minutes, wants an idle machine
    python benchmarks/regret.py --device cuda    # on a GPU machine

For each batch all strategies are planned, the kernels of every rank run one after the other, and communication is
simulated around them (flexcp/measure/calibrate/replay.py). Regret is the time of ``auto`` over that of the best
strategy. A plan that several strategies made is timed once, because two replays of one plan may differ by several
percent; all plans take turns in two rounds, the second in the opposite order, and the shorter time counts. On a CPU the
cost model is calibrated first, because a planner with a GPU's cost model could not be judged.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from contextlib import suppress
from dataclasses import replace

from flexcp.batch import make_batch
from flexcp.calibration import Calibration
from flexcp.clusters import cluster
from flexcp.compare.compare import NAMES, attention_only, planned
from flexcp.cost import CostModel
from flexcp.data.lengths import draw_lengths
from flexcp.masks import causal
from flexcp.measure.calibrate.calibrate import calibrate_here
from flexcp.measure.calibrate.replay import replay
from flexcp.plan.plan import Plan
from flexcp.planners.request import Refused, Request
from flexcp.shape import Shape
from flexcp.simulator.passes import Rules

BATCHES = ("web", "longtail", "libra256k", "equal")


def regrets(
    device: str, ranks: int, tokens: int, seeds: int, shape: Shape, found: Calibration
) -> list[tuple[str, str, float, float]]:
    """Return (batch, best strategy, auto's ms, best ms) for every batch."""
    rows = []
    machine = found.on(cluster("cpu" if device == "cpu" else "h200", 1, ranks))
    for name in BATCHES:
        for seed in range(seeds):
            batch = make_batch(draw_lengths(name, tokens * ranks, seed), causal())
            request = attention_only(Request(batch, shape, machine, found.cost))
            plans: dict[str, Plan] = {}
            for strategy in NAMES:
                with suppress(Refused):
                    plans[strategy] = planned(request, strategy)[1]
            times = replayed(plans, device)
            best = min(times, key=lambda n: times[n])
            rows.append((f"{name}:{seed}", best, times["auto"], times[best]))
            print(f"{name}:{seed}: auto {times['auto']:.2f} ms, best {best} {times[best]:.2f} ms", file=sys.stderr)
    return rows


def replayed(plans: dict[str, Plan], device: str) -> dict[str, float]:
    """Return the milliseconds of the plan of each strategy; equal plans have the same time."""
    distinct = list({plan.hash: plan for plan in plans.values()}.values())
    found: dict[str, float] = {}
    for plan in [*distinct, *reversed(distinct)]:
        ms = replay(plan, device, rules=Rules(contention=device != "cpu"), repeats=3).attention_ns / 1e6
        found[plan.hash] = min(ms, found.get(plan.hash, ms))
    return {strategy: found[plan.hash] for strategy, plan in plans.items()}


def main() -> None:
    """Print the table, and worst and mean regret."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=0, help="of a rank; 1,024 on CPUs, 8,192 on GPUs by default")
    parser.add_argument("--seeds", type=int, default=3)
    asked = parser.parse_args()
    cpu = asked.device == "cpu"
    shape = Shape(4, 4, 32, 32, "float32") if cpu else Shape(32, 8, 128, 128)
    found = calibrate_here(shape, 1, "cpu") if cpu else Calibration(replace(CostModel(), name="analytic"))
    rows = regrets(asked.device, asked.ranks, asked.tokens or (1024 if cpu else 8192), asked.seeds, shape, found)
    print("| batch | best | auto ms | best ms | regret |\n| --- | --- | --- | --- | --- |")
    for batch, best, mine, least in rows:
        print(f"| {batch} | {best} | {mine:.2f} | {least:.2f} | {mine / least:.3f} |")
    ratios = [mine / least for _, _, mine, least in rows]
    where = f"{len(ratios)} batches on {asked.ranks} ranks ({asked.device})"
    print(f"\nregret over {where}: worst {max(ratios):.3f}, mean {statistics.mean(ratios):.3f}")


if __name__ == "__main__":
    main()

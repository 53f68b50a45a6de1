"""Predicted against measured steps in the box (2 nodes x 2 ranks in network namespaces), after calibrating at the same occupancy.

    flock /tmp/heavy.lock sudo python benchmarks/box_error.py        # an idle machine; a few minutes

All four ranks measure kernels, layers and links at once (so cores are shared as in the steps); the network's bandwidth is what ``tc`` was
told. Then strategies x batches run for real, and the event simulator predicts each. Prints every pair and the median error, to be at most
15 %; and ``auto``'s regret by wall clock. Needs root and iproute2; without them it says so and ends with exit code 0.
"""

from __future__ import annotations

import statistics
from dataclasses import replace

from box_options import box_parser, parsed, rank_mbps
from flexcp.clusters import cluster
from flexcp.compare.compare import without_linear
from flexcp.cost import dense_model
from flexcp.data.lengths import draw_lengths
from flexcp.masks import causal
from flexcp.measure.bench_step import BenchTask, Measured, bench
from flexcp.measure.calibrate.calibrate import calibrated, measure
from flexcp.measure.calibrate.kernels import KernelTask
from flexcp.shape import Shape
from lib.box import Box

STRATEGIES = ("auto", "blocks", "groups", "zigzag", "ring", "allgather", "ulysses", "minheap:512")
BATCHES = ("web", "longtail", "equal")


def main() -> None:
    """Calibrate, measure, compare."""
    parser = box_parser(__doc__, nodes=2, mbit=400, repeats=3)
    parser.add_argument("--tokens", type=int, default=2048, help="tokens of a rank")
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--head-dim", type=int, default=32)
    asked = parsed(parser)
    if asked is None:
        return
    shape = Shape(asked.heads, asked.heads, asked.head_dim, asked.head_dim, "float32")
    with Box(asked.nodes, asked.ranks) as box:
        model, task = dense_model(shape), KernelTask(shape)
        found = calibrated(
            measure(box.run, box.size, task, model), task, model, "box", "all ranks at once, no limit on links"
        )
        for name, e in found.held_out.items():
            print(f"held out, {name}: median {e.median:.1%}, 90th percentile {e.p90:.1%}")
        box.network.limit(asked.mbit)
        machine = replace(found.on(cluster("cpu", asked.nodes, asked.ranks)), inter_mbps=rank_mbps(asked))
        errors, regrets = [], []
        print("| batch | strategy | measured ms | predicted ms | error |\n| --- | --- | --- | --- | --- |")
        for name in BATCHES:
            lengths = tuple(draw_lengths(name, asked.tokens * machine.ranks, 0))
            job = BenchTask(
                lengths, causal(), shape, machine, without_linear(found.cost), STRATEGIES, repeats=asked.repeats
            )
            rows: list[Measured] = [r for r in box.run(bench, job)[0] if r.predicted_ms is not None]
            for row in rows:
                print(
                    f"| {name} | {row.name} | {row.step_ms:.1f} | {row.predicted_ms:.1f} | {row.error:+.0%} |",
                    flush=True,
                )
                errors.append(abs(row.error or 0.0))
            times = {row.name: row.step_ms or 0.0 for row in rows}
            regrets.append(times["auto"] / min(times.values()))
    print(
        f"\nmedian error {statistics.median(errors):.1%}, worst {max(errors):.1%}, over {len(errors)} steps (asked: 15 %)"
    )
    print(f"auto's regret by wall clock: worst {max(regrets):.3f}, mean {statistics.mean(regrets):.3f}")


if __name__ == "__main__":
    main()

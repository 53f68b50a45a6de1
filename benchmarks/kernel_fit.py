"""How well the cost model's form fits the H200 kernels of docs/kernels.md: leave one workload out, fit the others, look at the one.

The numbers are read from the table "Beside the others" (useful TFLOP/s, 32 / 8 heads of 128). Times come back from them as useful FLOPs
over rate. *Stated* is the analytic default model as it is, never fitted to this table (its two numbers come from an earlier probe).
Nothing is measured here; the held-out error of a calibration on a GPU is `flexcp calibrate --device cuda` there.
"""

from __future__ import annotations

import argparse
import re
import statistics
from dataclasses import replace
from pathlib import Path

import numpy as np

from flexcp.calibration import Errors
from flexcp.clusters import cluster
from flexcp.cost import TILE_ROWS, CostModel
from flexcp.measure.fit import Sample, errors, fit_kernels
from flexcp.measure.kernel_work import workload
from flexcp.pieces import Shape

KERNELS = Path(__file__).parents[1] / "docs" / "kernels.md"
SHAPE = Shape(32, 8, 128, 128)
NAMES = {
    "causal": "causal", "full": "full", "window 4,096": "window", "lambda 64 + 4,096": "lambda", "shared question": "question",
    "causal blockwise": "blockwise", "16 random documents": "docs16", "64 random documents": "docs64",
}  # fmt: skip
COLUMNS = {"hopper": 2, "triton": 3}


def samples(kernel: str, text: str) -> list[Sample]:
    """The measured rows of a kernel as times."""
    found = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("| ").split("|")]
        if len(cells) < 6 or not re.fullmatch(r"[\d,]+", cells[0]) or cells[1] not in NAMES:
            continue
        tokens, name = int(cells[0].replace(",", "")), NAMES[cells[1]]
        work = workload(name, tokens)
        tiles = int(np.sum(-(-np.array(work.lengths) // TILE_ROWS)))
        rates = re.fullmatch(r"(\d+) \(\d+ %\) / (\d+)", cells[COLUMNS[kernel]])
        if rates is None:
            raise ValueError(f"no rates of {kernel} in {line!r}")
        for backward in (False, True):
            flops = (10 if backward else 4) * work.pairs() * SHAPE.heads * SHAPE.head_dim
            ns = flops / (1000 * float(rates[2 if backward else 1]))
            found.append(Sample(f"{name} {tokens}", work.pairs() * SHAPE.heads, tiles * SHAPE.heads, backward, ns))
    return found


def left_out(all_samples: list[Sample]) -> tuple[Errors, list[tuple[Sample, float]]]:
    """Errors of every sample under the fit of all other workloads, and each signed."""
    signed = []
    for name in dict.fromkeys(s.name for s in all_samples):
        fit = fit_kernels([s for s in all_samples if s.name != name])
        signed += [(s, fit.ns(s) / s.ns - 1) for s in all_samples if s.name == name]
    return errors([1 + e for _, e in signed], [1.0] * len(signed)), signed


def stated(all_samples: list[Sample]) -> Errors:
    """Errors of the default cost model."""
    cost, machine = CostModel(), replace(cluster("h200"), ranks_per_node=1)
    predicted = []
    for s in all_samples:
        work = np.array([s.pairs + s.tiles * cost.row_tile_pairs])
        predicted.append(int(cost.attention_ns(work, SHAPE, machine, s.backward)[0]) + cost.kernel_ns)
    return errors(predicted, [s.ns for s in all_samples])


def table() -> list[str]:
    """Rows for each kernel and direction."""
    text = KERNELS.read_text()
    lines = [
        "| kernel | direction | median error, left out | 90th percentile | worst (which) | default model: median | 90th percentile |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for kernel in COLUMNS:
        found = samples(kernel, text)
        _, signed = left_out(found)
        for title, chosen in (("forward", [False]), ("backward", [True]), ("both", [False, True])):
            of = [(s, e) for s, e in signed if s.backward in chosen]
            e = errors([1 + e for _, e in of], [1.0] * len(of))
            worst, by = max(of, key=lambda each: abs(each[1]))
            plain = stated([s for s in found if s.backward in chosen])
            lines.append(
                f"| {kernel} | {title} | {e.median:.1%} | {e.p90:.1%} | {by:+.1%} ({worst.name}) | {plain.median:.1%} | {plain.p90:.1%} |"
            )
    return lines


def main() -> None:
    """Print the table and the fit over all rows."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    print("\n".join(table()))
    for kernel in COLUMNS:
        found = samples(kernel, KERNELS.read_text())
        fit = fit_kernels(found)
        flops = 2 * (SHAPE.head_dim + SHAPE.v_head_dim)
        rates = flops / fit.forward, 2.5 * flops / fit.backward
        noise = statistics.median(abs(fit.ns(s) / s.ns - 1) for s in found)
        print(
            f"{kernel}: {rates[0]:.0f} / {rates[1]:.0f} GFLOP/s beyond tiles, {fit.tile_pairs} pairs a row tile, "
            f"{fit.kernel_ns:.0f} ns a launch; median residual {noise:.1%}"
        )


if __name__ == "__main__":
    main()

"""How well the cost models fit an H200's kernels: raw times in h200.json, fitted as ``flexcp calibrate`` fits them,
with errors on the rest.

    python benchmarks/kernel_fit.py            # --record states the errors for flexcp to print (make kernel-fit)

There are two models: *pairs and row tiles*, which planners use, and *prices of tiles*, by which the simulator times a
finished plan (flexcp/measure/tile_times.py). Calls of up to 16,384 tokens (two of three) are fitted and, for prices,
slots of two plans; the first model is not fitted to documents shorter than a row tile. Errors are computed on the other
calls, on all ranks of the other plans (``ulysses``, ``groups``, ... on three distributions), and on calls longer than
any fitted one. *Stated* is the analytic default without a fit. Nothing is measured here: ``flexcp calibrate --device
cuda`` measures and fits on a GPU.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from flexcp.calibration import Errors, TileTimes
from flexcp.clusters import cluster
from flexcp.cost import CostModel
from flexcp.known_errors.entries import KnownError
from flexcp.measure.calibrate.fit import Sample, errors, fit_and_judge
from flexcp.measure.calibrate.kernels import GPU_TOKENS, sample_of
from flexcp.measure.calibrate.tiles import PlanSlots, fit_tiles, single_call, the_plan
from flexcp.measure.tile_times import call_ns
from flexcp.plan.file import version_1_hash
from flexcp.shape import Shape
from lib.record_errors import record_errors

RAW = Path(__file__).with_name("h200.json")


def singles(raw: dict[str, Any]) -> dict[Shape, list[Sample]]:
    """Return single calls by the heads they had."""
    found = {}
    for heads, rows in raw["singles"].items():
        shape = Shape(*map(int, heads.split("/")), 128, 128)
        found[shape] = [sample_of(name, tokens, shape, way, ns) for name, tokens, way, ns in rows]
    return found


def plan_slots(raw: dict[str, Any]) -> list[PlanSlots]:
    """Return slots of plans that today's planners still make; the others are not relevant any more."""
    found, shape = [], next(iter(singles(raw)))
    for p in raw["plans"]:
        name = (p["lengths"], p["ranks"], p["strategy"])
        if version_1_hash(the_plan(*name, shape)) == p["plan"]:  # kernels do not depend on how a plan is executed
            found.append(PlanSlots(*name, p["backward"], tuple(map(tuple, p["ns"]))))
    return found


def short(samples: Sequence[Sample]) -> list[Sample]:
    """Return calls of lengths that a calibration measures."""
    return [s for s in samples if int(s.name.split()[1]) <= max(GPU_TOKENS)]


def rows(raw: dict[str, Any]) -> list[tuple[str, str, Errors]]:
    """Return (model, what it is judged on, errors) rows."""
    single, units = singles(raw), raw["multiprocessors"]
    all_heads = next(iter(single))
    _, judged = fit_and_judge(short(single[all_heads]), gpu=True)
    tiles, found = fit_tiles(all_heads, units, {shape: short(s) for shape, s in single.items()}, plan_slots(raw))
    longer = [s for s in single[all_heads] if s not in short(single[all_heads])]
    calls = "calls not fitted"
    return [
        ("stated", f"all {all_heads.heads} heads, all calls", _stated(short(single[all_heads]), all_heads)),
        ("pairs and row tiles", f"{all_heads.heads} heads, {calls}", judged["kernels"]),
        ("pairs and row tiles", "the same, documents shorter than a row tile", judged["kernels, short documents"]),
        ("prices of tiles", f"{all_heads.heads} and {all_heads.queries_per_key} heads, {calls}", found["tiles"]),
        ("prices of tiles", "ranks of plans not fitted", found["plans"]),
        ("prices of tiles", "calls of 32,768 and 65,536 tokens", _longer(longer, all_heads, units, tiles)),
    ]


def _longer(samples: list[Sample], shape: Shape, units: int, tiles: TileTimes) -> Errors:
    predicted = []
    for s in samples:
        prices = tiles.backward if s.backward else tiles.forward
        predicted.append(sum(call_ns(call, prices) for call in single_call(shape, s, units).calls))
    return errors(predicted, [s.ns for s in samples])


def _stated(samples: list[Sample], shape: Shape) -> Errors:
    cost, machine = CostModel(), replace(cluster("h200"), ranks_per_node=1)
    predicted = []
    for s in samples:
        work = np.array([s.pairs + s.tiles * cost.row_tile_pairs])
        predicted.append(int(cost.attention_ns(work, shape, machine, s.backward)[0]) + cost.kernel_ns)
    return errors(predicted, [s.ns for s in samples])


def table(found: Sequence[tuple[str, str, Errors]]) -> list[str]:
    """Return the errors as a Markdown table."""
    lines = [
        "| model | judged on | how many | median | 90th percentile | worst |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for model, what, e in found:
        lines.append(f"| {model} | {what} | {e.count} | {e.median:.1%} | {e.p90:.1%} | {e.worst:.1%} |")
    return lines


def read_table() -> list[str]:
    """Return the table for the raw times in the file."""
    return table(rows(json.loads(RAW.read_text())))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true")
    asked = parser.parse_args()
    raw = json.loads(RAW.read_text())
    found = rows(raw)
    print("\n".join(table(found)))
    if asked.record:
        keys = dict(zip(("analytic", "fitted", None, None, "tiles", None), (each for *_, each in found), strict=True))
        day = re.search(r"\d{4}-\d{2}-\d{2}", raw["about"])
        assert day is not None  # when the raw times were measured
        record_errors([KnownError(f"kernels, {name}", each, day[0]) for name, each in keys.items() if name is not None])


if __name__ == "__main__":
    main()

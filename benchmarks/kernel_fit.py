"""How well the cost models fit an H200's kernels: raw times in h200.json (the ``hopper`` kernel) and h200_cute.json
(what runs with ``flexcp[fa4]``), fitted as ``flexcp calibrate`` fits them, with errors on the rest.

    python benchmarks/kernel_fit.py            # --record states the errors for flexcp to print (make kernel-fit)
    python benchmarks/kernel_fit.py --measure benchmarks/h200_cute.json    # on a GPU machine, a minute

There are two models: *pairs and row tiles*, which planners use, and *prices of tiles*, by which the simulator times a
finished plan (flexcp/measure/tile_times.py; ``hopper`` only). Calls of up to 16,384 tokens (two of three) are fitted
and, for prices, slots of two plans; the first model is not fitted to documents shorter than a row tile. Errors are
computed on the other calls, on all ranks of the other plans (``ulysses``, ``groups``, ... on three distributions), and
on calls longer than any fitted one. *Stated* is the analytic default without a fit.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flexcp.calibration import SHORT_DOCUMENTS, Errors, TileTimes
from flexcp.clusters import cluster
from flexcp.cost import CostModel
from flexcp.executor.kernels.choose import choose_kernel
from flexcp.known_errors.entries import KnownError
from flexcp.measure.calibrate.fit import Sample, errors, fit_and_judge
from flexcp.measure.calibrate.kernels import GPU_TOKENS, GPU_WORK, KernelTask, kernel_samples, sample_of
from flexcp.measure.calibrate.tiles import PlanSlots, fit_tiles, one_kv_head, single_call, the_plan
from flexcp.measure.tile_times import call_ns
from flexcp.plan.file import version_1_hash
from flexcp.shape import Shape
from lib.record_errors import record_errors

RAW, CUTE = (Path(__file__).with_name(name) for name in ("h200.json", "h200_cute.json"))
KEYS = {"hopper": ("analytic", "fitted", None, None, "tiles", None), "fa4": ("analytic, fa4", "fitted, fa4", None)}
"""The entries of known errors that rows of the table are stated in, by kernel; None for rows that are not stated."""


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
    for p in raw.get("plans", []):
        name = (p["lengths"], p["ranks"], p["strategy"])
        if version_1_hash(the_plan(*name, shape)) == p["plan"]:  # kernels do not depend on how a plan is executed
            found.append(PlanSlots(*name, p["backward"], tuple(map(tuple, p["ns"]))))
    return found


def short(samples: Sequence[Sample]) -> list[Sample]:
    """Return calls of lengths that a calibration measures."""
    return [s for s in samples if int(s.name.split()[1]) <= max(GPU_TOKENS)]


def rows(raw: dict[str, Any]) -> list[tuple[str, str, Errors]]:
    """Return (model, what it is judged on, errors) rows; those of tiles only if slots of plans were measured."""
    single, units = singles(raw), raw["multiprocessors"]
    all_heads = next(iter(single))
    _, judged = fit_and_judge(short(single[all_heads]), gpu=True)
    calls = "calls not fitted"
    found = [
        ("stated", f"all {all_heads.heads} heads, all calls", _stated(short(single[all_heads]), all_heads)),
        ("pairs and row tiles", f"{all_heads.heads} heads, {calls}", judged["kernels"]),
        ("pairs and row tiles", "the same, documents shorter than a row tile", judged[SHORT_DOCUMENTS]),
    ]
    slots = plan_slots(raw)
    if not slots:
        return found
    tiles, more = fit_tiles(all_heads, units, {shape: short(s) for shape, s in single.items()}, slots)
    longer = [s for s in single[all_heads] if s not in short(single[all_heads])]
    return [
        *found,
        ("prices of tiles", f"{all_heads.heads} and {all_heads.queries_per_key} heads, {calls}", more["tiles"]),
        ("prices of tiles", "ranks of plans not fitted", more["plans"]),
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


def table(found: Mapping[str, Sequence[tuple[str, str, Errors]]]) -> list[str]:
    """Return the errors, by kernel, as a Markdown table."""
    lines = [
        "| kernel | model | judged on | how many | median | 90th percentile | worst |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for kernel, rows_of_kernel in found.items():
        for model, what, e in rows_of_kernel:
            lines.append(f"| {kernel} | {model} | {what} | {e.count} | {e.median:.1%} | {e.p90:.1%} | {e.worst:.1%} |")
    return lines


def read_table() -> list[str]:
    """Return the table for the raw times in the files."""
    return table({name: rows(raw) for name, raw in _read().items()})


def _read() -> dict[str, dict[str, Any]]:
    """Return the raw times by the name of the kernel they are of."""
    return {name: json.loads(path.read_text()) for name, path in zip(KEYS, (RAW, CUTE), strict=True)}


def measured(tokens: Sequence[int] = (*GPU_TOKENS, 32_768, 65_536)) -> dict[str, Any]:
    """Time single calls of the kernel that this GPU chooses, as ``flexcp calibrate`` does; return raw times."""
    shape = Shape(32, 8, 128, 128)
    gpu = torch.cuda.get_device_properties()
    name = choose_kernel(torch.device("cuda", torch.cuda.current_device()), torch.bfloat16, 128, 128).kernel
    found: dict[str, Any] = {
        "about": f"Raw times of the {name} kernel on one {gpu.name} (torch {torch.__version__}), bf16, heads of 128, "
        f"{date.today().isoformat()}: nanoseconds of single calls by heads, [workload, tokens, backward, ns]. Made by "
        "python benchmarks/kernel_fit.py --measure.",
        "multiprocessors": gpu.multi_processor_count,
        "singles": {},
    }
    for each in (shape, one_kv_head(shape)):
        samples = kernel_samples(None, KernelTask(each, "cuda", tuple(tokens), GPU_WORK))
        rows = [[*_name(s), s.backward, round(s.ns)] for s in samples]
        found["singles"][f"{each.heads}/{each.kv_heads}"] = rows
    return found


def _name(sample: Sample) -> tuple[str, int]:
    name, tokens = sample.name.split()
    return name, int(tokens)


def main() -> None:
    """Print the table, or measure what it is made of."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--measure", type=Path, help="write raw times of this GPU's kernel to this file")
    asked = parser.parse_args()
    if asked.measure is not None:
        asked.measure.write_text(json.dumps(measured()))
        return
    raws = _read()
    found = {name: rows(raw) for name, raw in raws.items()}
    print("\n".join(table(found)))
    if asked.record:
        record_errors(_entries(raws, found))


def _entries(
    raws: Mapping[str, dict[str, Any]], found: Mapping[str, Sequence[tuple[str, str, Errors]]]
) -> Iterator[KnownError]:
    """Yield what is stated, dated by the day on which raw times were measured."""
    for kernel, keys in KEYS.items():
        day = re.search(r"\d{4}-\d{2}-\d{2}", raws[kernel]["about"])
        assert day is not None
        for key, (_, _, each) in zip(keys, found[kernel], strict=True):
            if key is not None:
                yield KnownError(f"kernels, {key}", each, day[0])


if __name__ == "__main__":
    main()

"""``flexcp bench step``: measure strategies on real ranks, beside their predicted times and other packages.

Under torchrun its ranks are used (NCCL with GPUs, else gloo); otherwise local CPU ranks are started.
"""

from __future__ import annotations

import json
import os
import platform
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flexcp.cli.shared import options as o
from flexcp.cli.shared.batches import MASKS, BatchOptions
from flexcp.cli.shared.model_and_cluster_options import HeadsOptions
from flexcp.cli.shared.progress import compiling
from flexcp.io.atomic_files import write_whole

if TYPE_CHECKING:
    from flexcp.measure.bench_step import BenchTask, Measured

LocalRanks = Annotated[
    int, typer.Option("--ranks", callback=o.startable, help="Without torchrun: CPU ranks to start here.")
]
PerNode = Annotated[int | None, typer.Option("--ranks-per-node", help="Ranks of a node; torchrun's own by default.")]
Repeats = Annotated[int, typer.Option(help="How often each is timed after one to warm up; the fastest counts.")]
EXAMPLE = (8, 8, 64)
"""Default query heads, KV heads and head size."""
Write = Annotated[
    Path | None, typer.Option(callback=o.writable, help="Write everything measured as JSON, to keep or to send in.")
]


class BenchBatchOptions(BatchOptions):
    """A batch whose documents all have the same mask."""

    mask: Annotated[str, typer.Option(help=f"{MASKS}.")] = "causal"


def step(
    documents: BenchBatchOptions,
    described: HeadsOptions,
    ranks: LocalRanks = 2,
    ranks_per_node: PerNode = None,
    dtype: o.MeasuredDtype = "",
    strategies: o.Strategies = "all",
    cost: o.CostFile = None,
    repeats: Repeats = 3,
    write: Write = None,
    as_json: o.Json = False,
) -> None:
    """Measure attention, forward and backward, under every strategy on the ranks it is started on, planning included.

    Example: `torchrun --nproc-per-node 8 -m flexcp bench step --lengths @my.txt --cost here.json`
    """
    described.attention(EXAMPLE)  # finds mistakes before torch is loaded
    import torch

    given = os.environ.get("WORLD_SIZE")
    device = "cuda" if given is not None and torch.cuda.is_available() else "cpu"
    count = ranks if given is None else int(given)
    usual = count if given is None else int(os.environ.get("LOCAL_WORLD_SIZE", count))
    node = usual if ranks_per_node is None else ranks_per_node
    task = _task(
        documents.announced(count, None).lengths,
        documents.mask,
        count,
        node,
        described,
        dtype,
        strategies,
        cost,
        repeats,
        device,
    )
    with compiling("starting") as progress:
        rows = _on_pool(task, count, progress.update) if given is None else _on_torchrun(task, progress.update)
    if rows is None:  # not the first rank
        return
    data = as_data(rows, task)
    try:
        if write is not None:
            write_whole(write, json.dumps(data, indent=2) + "\n")
    finally:  # what took minutes to measure is not lost with the file
        typer.echo(json.dumps(data, indent=2) if as_json else table(rows, data))


def _task(
    lengths: list[int],
    mask: str,
    ranks: int,
    ranks_per_node: int,
    described: HeadsOptions,
    dtype: str,
    strategies: str,
    cost: Path | None,
    repeats: int,
    device: str,
) -> BenchTask:
    from flexcp.clusters import cluster
    from flexcp.compare.compare import without_linear
    from flexcp.masks import Mask, parse_mask
    from flexcp.measure.bench_step import BenchTask
    from flexcp.measure.tile_times import refuse_other_heads
    from flexcp.planners.strategies import find_strategy

    if ranks_per_node < 1 or ranks % ranks_per_node:
        raise ValueError(f"{ranks} ranks are no whole number of nodes of {ranks_per_node}")
    if repeats < 1:
        raise ValueError(f"--repeats is at least 1; got {repeats}")
    rule = parse_mask(mask)
    if not isinstance(rule, Mask):
        raise ValueError("bench step takes one mask for all documents")
    found = o.cost_of(cost)
    where = found.on(cluster("cpu" if device == "cpu" else "h100", ranks // ranks_per_node, ranks_per_node))
    shape = replace(described.attention(EXAMPLE), dtype=dtype or ("float32" if device == "cpu" else "bfloat16"))
    names = o.chosen_strategies(strategies)
    for name in names:
        find_strategy(name)
    known = (tuple(lengths), rule, shape, where, without_linear(found.cost), names)
    tiles = found.tiles if device == "cuda" else None
    if tiles is not None:
        refuse_other_heads(shape, tiles)  # before anything is measured
    return BenchTask(*known, device, repeats, tiles=tiles)


def _on_pool(task: BenchTask, ranks: int, say: Any) -> list[Measured]:
    from flexcp.measure.bench_step import bench
    from flexcp.measure.ranks import RankPool

    with RankPool(ranks) as pool:
        rows: list[Measured] = pool.run(bench, task, on_item=lambda name: say(f"measuring {name}"))[0]
    return rows


def _on_torchrun(task: BenchTask, say: Any) -> list[Measured] | None:
    import torch
    import torch.distributed as dist

    from flexcp.executor.exchange.start_group import start_group
    from flexcp.measure.bench_step import bench

    if task.device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    group = start_group(task.device == "cuda")
    try:
        first, work = dist.get_rank() == 0, bench(group, task)
        while True:
            try:
                name = next(work)
            except StopIteration as end:
                return list(end.value) if first else None
            if first:
                say(f"measuring {name}")
    finally:
        dist.destroy_process_group()


def as_data(rows: list[Measured], task: BenchTask) -> dict[str, Any]:
    """Return the measured rows and what was run, with the documented JSON keys."""
    from dataclasses import asdict

    import torch

    from flexcp.measure.bench_step import median_error

    error = median_error(rows)
    device = torch.cuda.get_device_name() if task.device == "cuda" else f"{platform.machine()} CPU"
    return {
        "date": date.today().isoformat(),
        "device": device,
        "torch": torch.__version__,
        "cluster": str(task.cluster),
        "lengths": list(task.lengths),
        "mask": str(task.mask),
        "shape": asdict(task.shape),
        "cost_model": task.cost.name,
        "median_error": None if error is None else round(error, 4),
        "rows": [{**asdict(row), "error": None if row.error is None else round(row.error, 4)} for row in rows],
    }


def table(rows: list[Measured], data: dict[str, Any]) -> str:
    """Return the rows as text, the fastest first; those that did not run come last.

    ``data`` is what :func:`as_data` returned for the same rows.
    """
    shape = data["shape"]
    lines = [
        f"measured on {data['cluster']} ({data['device']}, torch {data['torch']}): attention of "
        f"{sum(data['lengths']):,} tokens, {data['mask']}, {shape['heads']} / {shape['kv_heads']} heads of "
        f"{shape['head_dim']}, {shape['dtype']}; milliseconds of the slowest rank",
        f"{'strategy':<24} {'planning':>9} {'forward':>9} {'step':>9} {'planned + step':>15} {'predicted':>10} "
        f"{'error':>7} {'MB':>8}",
    ]
    ran = sorted((row for row in rows if row.step_ms is not None), key=lambda row: row.step_ms or 0)
    for row in ran:
        assert row.step_ms is not None and row.forward_ms is not None and row.planning_ms is not None
        predicted = "-" if row.predicted_ms is None else f"{row.predicted_ms:.2f}"
        error = "-" if row.error is None else f"{row.error:+.0%}"
        moved = "-" if row.bytes is None else f"{row.bytes / 1e6:.2f}"
        lines.append(
            f"{row.name:<24} {row.planning_ms:>9.2f} {row.forward_ms:>9.2f} {row.step_ms:>9.2f} "
            f"{row.planning_ms + row.step_ms:>15.2f} {predicted:>10} {error:>7} {moved:>8}"
        )
    if data["median_error"] is not None:
        lines.append(f"predicted with cost model {data['cost_model']}: median error {data['median_error']:.0%}")
    lines += [f"{row.name}: {row.missing}" for row in rows if row.missing is not None]
    return "\n".join(lines)

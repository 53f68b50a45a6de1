"""Calibration: measure this machine and fit a cost model to it, in under two minutes (62 s on an H200).

Kernels, the rest of a layer and links are measured separately (``kernels.py``, ``layers.py``, ``links.py``) and fitted
(``fit.py``). Every third measurement is held out and gives the error. Efficiencies are relative to a peak, the speed of
a large matrix product measured in the same run. CPU ranks all measure at the same time, because that is how they will
run; compute and transfers are then assumed not to slow each other further. On a GPU with Triton this mutual slowdown is
measured beside a copy (:mod:`flexcp.measure.kernels.margin`), and if the Hopper kernel runs there, prices of its tiles
are fitted too (``tiles.py``).
"""

from __future__ import annotations

import math
import platform
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

from flexcp.calibration import Calibration, Errors
from flexcp.cost import CONTENTIONS, NO_CONTENTION, PEAK_PERMILLE, Contention, CostModel, Model, dense_model
from flexcp.measure.calibrate.fit import Sample, errors, fit_and_judge, fit_link, split
from flexcp.measure.calibrate.kernels import CPU_TOKENS, GPU_TOKENS, GPU_WORK, KernelTask, kernel_samples, matrix_gflops
from flexcp.measure.calibrate.layers import LayerTimes, layer_times
from flexcp.measure.calibrate.links import LinkTimes, link_times
from flexcp.measure.calibrate.tiles import PlanSlots, fit_tiles, has_tiles, measure_plans, one_kv_head
from flexcp.measure.ranks import RankPool
from flexcp.shape import Shape

Run = Callable[..., list[Any]]
"""``run(function, *arguments)`` calls ``function(group, *arguments)`` on every rank and returns the results."""
STANDSTILL = 100_000
"""Slowdown, per mille, of attention that makes no progress beside a transfer."""
NOISE = 0.02
"""Transfer speeds at two margins that differ by less than this fraction count as equal."""


@dataclass(frozen=True)
class Measured:
    """The measurements of a calibration, each the median over ranks.

    ``gflops`` is the speed of a matrix product, ``samples`` are attention kernels, ``layers`` the rest of a layer, and
    ``links`` messages (None for one rank). ``one_kv_head`` and ``plans`` are measured only if prices of tiles are
    fitted.
    """

    gflops: float
    samples: list[Sample]
    layers: LayerTimes
    links: LinkTimes | None
    one_kv_head: list[Sample] = field(default_factory=list)
    plans: list[PlanSlots] = field(default_factory=list)


def measure(
    run: Run, ranks: int, task: KernelTask, model: Model, say: Callable[[str], None] = lambda _: None
) -> Measured:
    """Measure everything that a calibration needs; ``say`` is called with what is measured next.

    ``run(function, *arguments)`` calls ``function(group, *arguments)`` on every rank and returns the results. Links are
    measured only if ``ranks`` is above 1.
    """
    cpu = task.device == "cpu"
    say("matrix products")
    gflops = statistics.median(run(matrix_gflops, task, 512 if cpu else 8192))
    say("attention kernels")
    samples = _medians(run(kernel_samples, task))
    say("the rest of a layer")
    tokens = (64, 128, 192, 256, 384) if cpu else (1024, 2048, 4096, 8192, 16_384)
    layers = run(layer_times, task.shape, model, task.device, tokens)
    layer = replace(layers[0], ns=tuple(statistics.median(x) for x in zip(*(each.ns for each in layers), strict=True)))
    links = None
    if ranks > 1:
        say("links")
        links = run(link_times, task.device)[0]
    if cpu or not has_tiles(task.shape):
        return Measured(gflops, samples, layer, links)
    say("kernels of one KV head, and of real plans")
    alone = _medians(run(kernel_samples, replace(task, shape=one_kv_head(task.shape))))
    return Measured(gflops, samples, layer, links, alone, measure_plans(task))


def _medians(ranks: Sequence[list[Sample]]) -> list[Sample]:
    """Return the samples of all ranks as one list, with the median time of each."""
    return [replace(each[0], ns=statistics.median(s.ns for s in each)) for each in zip(*ranks, strict=True)]


def calibrated(found: Measured, task: KernelTask, model: Model, name: str, machine: str) -> Calibration:
    """Fit the cost model, and compute its errors on the held-out measurements.

    ``name`` becomes the name of the cost model, and ``machine`` describes the machine in words.
    """
    shape = task.shape
    kernel, held_out = fit_and_judge(found.samples, gpu=task.device != "cpu")
    flops = 2 * (shape.head_dim + shape.v_head_dim)
    speeds = {"gflops": max(1, round(found.gflops * 1000 / PEAK_PERMILLE[shape.dtype]))}
    peak = speeds["gflops"] * PEAK_PERMILLE[shape.dtype] / 1000  # FLOPs per nanosecond, as the cost model computes it
    linear_flops = 3 * model.linear_flops_per_token(shape)
    pairs = list(zip(found.layers.tokens, found.layers.ns, strict=True))
    layer_fit, layer_held = split(pairs)
    per_token = statistics.median(ns / n for n, ns in layer_fit)
    held_out["layers"] = errors([per_token * n for n, _ in layer_held], [ns for _, ns in layer_held])
    values: dict[str, Any] = {"kernel_ns": round(kernel.kernel_ns), "row_tile_pairs": kernel.tile_pairs}
    if found.links is not None:
        more, errors_of_links = _links(found.links)
        values["message_ns"] = more.pop("message_ns")
        speeds |= more
        held_out["links"] = errors_of_links
    cost = CostModel(
        name,
        forward_efficiency=_permille(flops / kernel.forward / peak),
        backward_efficiency=_permille(2.5 * flops / kernel.backward / peak),
        linear_efficiency=_permille(linear_flops / per_token / peak),
        link_efficiency=1000 if found.links is not None else CostModel().link_efficiency,
        error_permille=math.ceil(1000 * held_out["kernels"].p90),
        token_bytes=found.layers.token_bytes,
        **({"contention": NO_CONTENTION} if task.device == "cpu" else _gpu_contention()),
        **values,
    )
    tiles = None
    if found.plans:
        units = torch.cuda.get_device_properties().multi_processor_count
        singles = {one_kv_head(shape): found.one_kv_head} | {shape: found.samples}
        tiles, errors_of_tiles = fit_tiles(shape, units, singles, found.plans)
        held_out |= errors_of_tiles
    return Calibration(cost, machine, speeds, held_out, tiles)


def _permille(share: float) -> int:
    return max(1, round(1000 * share))


def _links(found: LinkTimes) -> tuple[dict[str, int], Errors]:
    """Return (speeds of links as fields of a cluster and cost model, errors on held-out sizes)."""
    pairs = list(zip(found.size, found.ns, strict=True))
    fitted, held = split(pairs)
    latency, each = fit_link(*zip(*fitted, strict=True))
    off = errors([latency + size * each for size, _ in held], [ns for _, ns in held])
    mbps = max(1, round(1000 / each))
    message = max(0.0, (found.all_peers_ns - found.ns[0]) / max(1, found.peers - 1)) if found.peers > 1 else 0.0
    return {"intra_mbps": mbps, "latency_ns": round(latency), "message_ns": round(message)}, off


def _gpu_contention() -> dict[str, tuple[Contention, ...]]:
    """Measure how much attention and a copy slow each other, and return it as arguments of a cost model.

    This is done for every margin that a plan may choose and for both kinds of transfers. Without Triton, nothing is
    measured and the result is empty.
    """
    from flexcp.executor.kernels import has_triton

    if not has_triton():
        return {}
    from flexcp.measure.kernels.margin import margin_table

    table = margin_table()
    return {
        name: contention_rows([row for row in table if row["where"] == where])
        for name, where in zip(CONTENTIONS, ("inside", "across"), strict=True)
    }


def contention_rows(table: list[dict[str, Any]]) -> tuple[Contention, ...]:
    """Make the contention rows of a cost model from the rows of a margin table for one kind of transfer.

    The table is that of :func:`flexcp.measure.kernels.margin.margin_table`. The slowdown of attention beside a transfer
    follows from a transfer that ends before attention does: attention's extra time was lost while the transfer ran. A
    margin cannot make attention faster or a transfer slower. Where noise says otherwise, attention alone counts as 1,
    attention beside a copy as no faster than alone, and transfer speeds are averaged.
    """
    measured = {(row["way"], row["margin"]): row for row in table}
    found = []
    for margin in sorted({margin for _, margin in measured}):
        both = [(measured[way, margin], measured[way, 0]["attention alone ms"]) for way in ("forward", "backward")]
        alone = [max(1000, _permille(row["attention alone ms"] / whole)) for row, whole in both]
        beside = [max(least, _slowed(row, whole)) for least, (row, whole) in zip(alone, both, strict=True)]
        links = [row["copy alone ms"] / row["copy with attention ms"] for row, _ in both]
        found.append(Contention(margin, beside[0], beside[1], alone[0], alone[1], min(1000, _permille(sum(links) / 2))))
    return tuple(replace(row, link=link) for row, link in zip(found, rising([row.link for row in found]), strict=True))


def rising(values: Sequence[int]) -> list[int]:
    """Return the nearest values that never fall and rise by at least ``NOISE``; runs that do not are averaged.

    Leaving more multiprocessors free cannot slow a transfer, and a plan should not leave more free for a gain that is
    noise.
    """
    runs: list[list[int]] = []
    for value in values:
        runs.append([value])
        while len(runs) > 1 and statistics.fmean(runs[-2]) * (1 + NOISE) > statistics.fmean(runs[-1]):
            last = runs.pop()
            runs[-1] += last
    return [round(statistics.fmean(run)) for run in runs for _ in run]


def _slowed(row: dict[str, Any], whole: float) -> int:
    """Return the time of attention during a transfer, per mille of ``whole``.

    ``whole`` is the milliseconds of attention alone with all multiprocessors.
    """
    copied = row["copy with attention ms"]
    lost = row["attention with short copy ms"] - row["attention alone ms"]
    done = copied - max(0.0, lost)  # attention's progress while the copy ran, in its own time
    return min(STANDSTILL, _permille(row["attention alone ms"] / whole * copied / done)) if done > 0 else STANDSTILL


def calibrate_here(shape: Shape, ranks: int, device: str, say: Callable[[str], None] = lambda _: None) -> Calibration:
    """Calibrate this machine: ``ranks`` CPU ranks in a pool, or this process's GPU.

    On a GPU ``ranks`` is not used; if the process is in a process group, its links are measured. ``say`` is called with
    what is measured next.
    """
    model = dense_model(shape)
    if device == "cuda":
        task = KernelTask(shape, "cuda", GPU_TOKENS, GPU_WORK)
        group = dist.group.WORLD if dist.is_initialized() else None
        size = dist.get_world_size() if group is not None else 1

        def run(function: Callable[..., Any], *arguments: Any) -> list[Any]:
            return [function(group, *arguments)]

        return calibrated(measure(run, size, task, model, say), task, model, "calibrated", torch.cuda.get_device_name())
    task = KernelTask(shape, "cpu", CPU_TOKENS)
    words = f"{platform.machine()}, {ranks} CPU ranks at once"
    with RankPool(ranks) as pool:
        return calibrated(measure(pool.run, ranks, task, model, say), task, model, "calibrated", words)

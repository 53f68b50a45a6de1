"""``flexcp calibrate``: fit the cost model to this machine, and print its errors."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flexcp.cli.shared import options as o
from flexcp.cli.shared.model_and_cluster_options import HEADS, HeadsOptions
from flexcp.cli.shared.progress import compiling, say
from flexcp.io.atomic_files import write_whole

if TYPE_CHECKING:
    from flexcp.calibration import Calibration
    from flexcp.shape import Shape

CPU_HEADS = (8, 8, 64)
"""Query heads, KV heads and head size that a CPU measures without a model; a GPU measures those of other commands."""
DOUBTFUL = 0.25
"""Median error on held-out measurements from which on a fit is called doubtful."""

Ranks = Annotated[
    int,
    typer.Option(callback=o.startable, help="CPU ranks that measure at once: as many as will run on this machine."),
]
Device = Annotated[str, typer.Option(help="cpu or cuda; cuda where there is one, by default.")]
Write = Annotated[Path | None, typer.Option(callback=o.writable, help="Write the cost model to this file, for --cost.")]


def calibrate(
    described: HeadsOptions,
    ranks: Ranks = 2,
    device: Device = "",
    dtype: o.MeasuredDtype = "",
    write: Write = None,
    as_json: o.Json = False,
) -> None:
    """Measure attention kernels, the rest of a layer and links on this machine, and fit the cost model.

    This takes under two minutes. Every third measurement is held out of the fit, and the errors printed are of those.
    With torchrun on GPUs the links between its ranks are measured too. Measure the heads that you train: without
    --model or numbers they are 32 / 8 of 128 on a GPU and 8 / 8 of 64 on a CPU.

    Example: `flexcp calibrate --ranks 4 --write here.json && flexcp simulate --lengths 4096,800 --cluster cpu:1x4
    --cost here.json`
    """
    import torch

    from flexcp.measure.calibrate.calibrate import calibrate_here

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device not in ("cpu", "cuda"):
        raise ValueError(f"--device is cpu or cuda; got {device!r}")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda needs a CUDA GPU, and torch sees none here")
    shape = described.attention(CPU_HEADS if device == "cpu" else HEADS)
    shape = replace(shape, dtype=dtype or ("float32" if device == "cpu" else "bfloat16"))
    with compiling("measuring") as progress:
        found = calibrate_here(shape, ranks, device, lambda text: progress.update(f"measuring {text}"))
    try:
        if write is not None:
            write_whole(write, json.dumps(found.to_json(), indent=2) + "\n")
    finally:  # what took minutes to measure is not lost with the file
        typer.echo(json.dumps(found.to_json(), indent=2) if as_json else text(found, shape))
    for words in doubts(found):
        say(words)


def doubts(found: Calibration) -> list[str]:
    """Return a message for each part of the fit that is too far off on held-out measurements to plan by."""
    from flexcp.calibration import SHORT_DOCUMENTS

    return [
        f"flexcp: the fit of {name} is off by {e.median:.0%} in the median, and plans made with it may be slow; "
        "measure again on an idle machine, with the heads of your model (--model, or --heads, --kv-heads, --head-dim)"
        for name, e in found.held_out.items()
        if e.median > DOUBTFUL and name != SHORT_DOCUMENTS
    ]


def text(found: Calibration, shape: Shape) -> str:
    """Return the fitted cost model for heads of this shape, and its errors on held-out measurements, as text."""
    cost, speeds = found.cost, found.speeds
    lines = [
        f"{found.machine}, {shape.heads} / {shape.kv_heads} heads of {shape.head_dim}: matrix product "
        f"{speeds['gflops']} GFLOP/s (as bf16 peak), attention at {cost.forward_efficiency / 10:g} % of it "
        f"forward and {cost.backward_efficiency / 10:g} % backward, the rest of a layer at "
        f"{cost.linear_efficiency / 10:g} %",
        f"128 rows cost {cost.row_tile_pairs:,} pairs besides their own, a kernel {cost.kernel_ns / 1000:.1f} us to "
        f"start, {cost.token_bytes:,} bytes stay of a token in a layer",
    ]
    if "intra_mbps" in speeds:
        lines.append(
            f"a link carries {speeds['intra_mbps']:,} MB/s after {speeds['latency_ns'] / 1000:.1f} us, one more "
            f"message costs {cost.message_ns / 1000:.1f} us"
        )
    lines += [
        f"held out, {name}: median error {e.median:.1%}, 90th percentile {e.p90:.1%}, worst {e.worst:.1%} ({e.count} "
        "measurements)"
        for name, e in found.held_out.items()
    ]
    return "\n".join(lines)

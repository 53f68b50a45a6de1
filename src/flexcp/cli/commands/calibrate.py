"""``flexcp calibrate``: fit the cost model to this machine, and print its errors."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flexcp.cli.shared import options as o
from flexcp.cli.shared.model_and_cluster_options import HeadsOptions
from flexcp.cli.shared.progress import compiling
from flexcp.io.atomic_files import write_whole

if TYPE_CHECKING:
    from flexcp.calibration import Calibration

Ranks = Annotated[int, typer.Option(help="CPU ranks that measure at once: as many as will run on this machine.")]
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
    With torchrun on GPUs the links between its ranks are measured too.

    Example: `flexcp calibrate --ranks 4 --write here.json && flexcp simulate --lengths 4096,800 --cluster cpu:1x4
    --cost here.json`
    """
    shape = described.attention((8, 8, 64))
    import torch

    from flexcp.measure.calibrate.calibrate import calibrate_here

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device not in ("cpu", "cuda"):
        raise ValueError(f"--device is cpu or cuda; got {device!r}")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda needs a CUDA GPU, and torch sees none here")
    if ranks < 1:
        raise ValueError(f"--ranks is at least 1; got {ranks}")
    shape = replace(shape, dtype=dtype or ("float32" if device == "cpu" else "bfloat16"))
    with compiling("measuring") as progress:
        found = calibrate_here(shape, ranks, device, lambda text: progress.update(f"measuring {text}"))
    if write is not None:
        write_whole(write, json.dumps(found.to_json(), indent=2) + "\n")
    typer.echo(json.dumps(found.to_json(), indent=2) if as_json else text(found))


def text(found: Calibration) -> str:
    """Return the fitted cost model and its errors on held-out measurements as text."""
    cost, speeds = found.cost, found.speeds
    lines = [
        f"{found.machine}: matrix product {speeds['gflops']} GFLOP/s (as bf16 peak), attention at "
        f"{cost.forward_efficiency / 10:g} % of it forward and {cost.backward_efficiency / 10:g} % backward, the rest "
        f"of a layer at {cost.linear_efficiency / 10:g} %",
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

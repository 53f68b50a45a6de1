"""``flexcp bench``: ``kernel`` times GPU kernels of flexcp and of others; ``step`` (bench_step.py) times strategies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from flexcp.cli.commands.bench_step import step
from flexcp.cli.shared.command_registry import Commands
from flexcp.cli.shared.options import Json, writable
from flexcp.io.atomic_files import write_whole

app = Commands(help="Measure on this machine.", no_args_is_help=True)


app.command()(step)


@app.command()
def kernel(
    masks: Annotated[
        str, typer.Option(help="causal, full, window, lambda, question, blockwise, docsN; or all.")
    ] = "all",
    tokens: Annotated[int, typer.Option(help="Tokens of the stream.")] = 16_384,
    heads: Annotated[int, typer.Option(help="Query heads.")] = 32,
    kv_heads: Annotated[int, typer.Option(help="KV heads.")] = 8,
    head_dim: Annotated[int, typer.Option(help="Head size.")] = 128,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    contenders: Annotated[str, typer.Option(help="hopper, triton, cudnn, flash, flex, varlen; or all.")] = "all",
    rounds: Annotated[int, typer.Option(help="Rounds of turns; the median counts.")] = 7,
    write: Annotated[Path | None, typer.Option(callback=writable, help="Write everything measured as JSON.")] = None,
    as_json: Json = False,
) -> None:
    """Check our kernels against float64 and time them beside cuDNN, FlashAttention, FlexAttention and varlen_attn.

    Example: `flexcp bench kernel --masks causal,docs16 --tokens 65536`
    """
    import torch

    if not torch.cuda.is_available():
        raise ValueError("bench kernel needs a CUDA GPU, and torch sees none here")
    from flexcp.measure.kernels import bench as b
    from flexcp.measure.kernels.work import NAMES

    if dtype not in ("bfloat16", "float16", "float32"):
        raise ValueError(f"dtype must be bfloat16, float16 or float32; got {dtype!r}")
    shape = b.Heads(heads, kv_heads, head_dim, getattr(torch, dtype))
    chosen = [*b.OURS, *b.BASELINES] if contenders == "all" else contenders.split(",")
    product = b.matrix_rate()
    results = b.bench(list(NAMES) if masks == "all" else masks.split(","), tokens, shape, chosen, rounds)
    content = json.dumps(b.as_data(results, product, shape), indent=2)
    if as_json:
        typer.echo(content)
    else:
        typer.echo(
            f"{torch.cuda.get_device_name()}, matrix product {product:.0f} TFLOP/s; useful TFLOP/s forward / backward"
        )
        typer.echo(b.table(results, product))
    for r in results:
        if r.missing:
            typer.echo(f"{r.contender} on {r.workload}: {r.missing}", err=True)
    if write:
        write_whole(write, content)

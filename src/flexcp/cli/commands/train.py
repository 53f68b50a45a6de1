"""``flexcp train``: train a model on long-tailed documents or a text file, on local CPU ranks or on torchrun's."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Annotated

import typer

from flexcp.cli.shared import options as o
from flexcp.cli.shared.model_and_cluster_options import ModelOptions
from flexcp.cli.shared.progress import console
from flexcp.cli.shared.reports import report_training

if TYPE_CHECKING:
    from collections.abc import Callable

    from flexcp.train.loop import StepReport, TrainConfig

Data = Annotated[
    str,
    typer.Option(
        help="A text file (blank lines part documents), @file of document lengths, or a length distribution "
        "(longtail, web, ...)."
    ),
]
Tokens = Annotated[int, typer.Option(parser=o.tokens, metavar="TOKENS", help="Tokens a step.")]
Steps = Annotated[int, typer.Option(help="Training steps.")]
Ranks = Annotated[
    int, typer.Option(callback=o.startable, help="CPU ranks; under torchrun its processes are the ranks.")
]
Rate = Annotated[float, typer.Option("--learning-rate", help="Of AdamW.")]
Preset = Annotated[str | None, typer.Option("--cluster", help="Whose speeds predictions use: cpu, h100, ...")]


class TrainModelOptions(ModelOptions):
    """The model to train, of which every rank holds a whole copy."""

    model: Annotated[
        str | None,
        typer.Option(
            help="A Hugging Face config.json or its folder; without, a small GPT (gpt), of the sizes that --heads, "
            "--kv-heads, --head-dim, --hidden and --layers give. Presets such as llama3-8b are too large: "
            "every rank holds the whole model."
        ),
    ] = None


def train(
    described: TrainModelOptions,
    data: Data = "longtail",
    tokens: Tokens = 4096,
    steps: Steps = 20,
    ranks: Ranks = 4,
    strategy: o.Strategy = "auto",
    layout: o.Layout = "free",
    dtype: o.Dtype = "float32",
    learning_rate: Rate = 3e-3,
    cluster: Preset = None,
    html: o.Html = None,
    as_json: o.Json = False,
) -> None:
    """Train, and say of every step: loss, tokens/s, balance, bytes, predicted and measured time.

    Example: `flexcp train --ranks 4 --steps 20`; on GPUs `torchrun --nproc-per-node 8 --no-python flexcp train --model
    config.json`
    """
    from flexcp.clusters import cluster as machine
    from flexcp.planners.strategies import find_strategy
    from flexcp.train.source import check_data, check_model, check_numbers, gpt_sizes

    # Mistakes are found here, before torch is loaded, and reported once instead of on every rank.
    if cluster and ":" in cluster:
        raise ValueError(
            f"--cluster {cluster}: train takes the preset's name alone, --cluster {cluster.partition(':')[0]}, and its "
            "ranks from --ranks or torchrun"
        )
    machine(cluster or "cpu")
    find_strategy(strategy)
    given = gpt_sizes(**described.told) if described.told else ()
    name = described.model or "gpt"
    if name != "gpt" and described.told:
        raise ValueError(f"--model {name} brings its own sizes; drop {described.flags}, or drop --model")
    check_model(name)
    check_data(data)
    check_numbers(tokens, steps, dtype, layout, learning_rate)
    from flexcp.train.loop import TrainConfig, check_run
    from flexcp.train.report import Table

    launched = "TORCHELASTIC_RUN_ID" in os.environ
    preset = cluster or ("h100" if launched and _has_gpu() else "cpu")
    config = TrainConfig(name, data, tokens, steps, strategy, layout, dtype, learning_rate, preset, given)
    if not launched:
        check_run(config, ranks)
    quiet_rank = launched and os.environ["RANK"] != "0"
    table = Table(console() if not quiet_rank else None, config)
    reports = _under_torchrun(config, table.add) if launched else _on_cpu_ranks(config, ranks, table.add)
    if quiet_rank:
        return
    table.close()
    try:
        if html is not None:
            report_training(html, reports, config)
    finally:  # what a training found is not lost with its report
        typer.echo(json.dumps([r.as_json() for r in reports], indent=2) if as_json else table.summary())


def _on_cpu_ranks(config: TrainConfig, ranks: int, add: Callable[[StepReport], None]) -> list[StepReport]:
    from flexcp.measure.ranks import RankPool
    from flexcp.train.loop import train as loop

    with RankPool(ranks) as pool:
        found: list[StepReport] = pool.run(loop, config, on_item=add)[0]
    return found


def _under_torchrun(config: TrainConfig, add: Callable[[StepReport], None]) -> list[StepReport]:
    import torch
    import torch.distributed as dist

    from flexcp.executor.exchange.start_group import start_group
    from flexcp.train.loop import train as loop

    if _has_gpu():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    group = start_group(_has_gpu())
    reports = []
    for report in loop(group, config):
        add(report)
        reports.append(report)
    dist.destroy_process_group()
    return reports


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()

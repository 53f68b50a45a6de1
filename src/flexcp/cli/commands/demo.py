"""``flexcp demo``: train a small GPT on long-tailed documents, on CPU ranks, under several strategies."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from flexcp.cli.shared.options import Json, startable
from flexcp.cli.shared.progress import console, quiet


def demo(
    ranks: Annotated[int, typer.Option(callback=startable, help="CPU ranks to train on.")] = 4,
    steps: Annotated[int, typer.Option(help="Training steps under each strategy.")] = 12,
    tokens: Annotated[int, typer.Option(help="Tokens a step.")] = 4096,
    strategies: Annotated[str, typer.Option(help="Strategies to compare, separated by spaces.")] = "dp zigzag blocks",
    as_json: Json = False,
) -> None:
    """Train a small GPT on one process and under each strategy: same loss, other bytes, balance and time.

    Example: `flexcp demo --ranks 4 --steps 12`
    """
    from rich.console import Console

    from flexcp.train.demo import DemoConfig, agree, run_demo, show

    config = DemoConfig(ranks=ranks, steps=steps, tokens=tokens, strategies=tuple(strategies.split()))
    results = run_demo(config, console())
    show(results, config, Console(stderr=as_json, quiet=as_json and quiet()))
    if as_json:
        typer.echo(json.dumps([r.as_json() for r in results], indent=2))
    if not agree(results):
        raise typer.Exit(1)

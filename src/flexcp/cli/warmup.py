"""``flexcp warmup``: compile the planners' loops ahead of time, for image builds and fresh checkouts."""

from __future__ import annotations

import json
import time

import typer

from flexcp.cli.options import Json


def warmup(as_json: Json = False) -> None:
    """Fill the compile cache, so that the first plan of a run takes milliseconds.

    Example: `flexcp warmup`
    """
    from rich.console import Console

    from flexcp.clusters import cluster
    from flexcp.planner import Planner

    begin = time.perf_counter()
    with Console(stderr=True).status("compiling the planners' loops"):
        Planner(4, 2, 32, cluster=cluster("h100", 2, 2), strategy="blocks")([3000, 700, 40, 1])
    seconds = time.perf_counter() - begin
    typer.echo(json.dumps({"seconds": round(seconds, 3)}) if as_json else f"ready after {seconds:.1f} s")

"""``flexcp warmup``: compile the planners' loops ahead of time, for image builds and fresh checkouts."""

from __future__ import annotations

import json
import sys
import time

import typer

from flexcp.cli.shared.options import Json
from flexcp.cli.shared.progress import compiling


def warmup(as_json: Json = False) -> None:
    """Compile what planning needs and keep it, so that the first plan of a run takes milliseconds.

    It is kept in NUMBA_CACHE_DIR, beside the package or in the user's cache folder, whichever can be written. These
    folders hold code: those that other users can write are not used. Exit code 1: it is kept in none.

    Example: `flexcp warmup`
    """
    from flexcp.measure.warmup import warm

    begin = time.perf_counter()
    with compiling() as found:
        warm()
    seconds = time.perf_counter() - begin
    if as_json:
        typer.echo(json.dumps({"seconds": round(seconds, 3), "compiled": found.count, "kept": not found.complaints}))
    else:
        typer.echo(f"ready after {seconds:.1f} s, {found.count} loops compiled")
    if found.complaints:
        print(
            f"flexcp: {found.complaints[-1]}; set NUMBA_CACHE_DIR to a folder of your own that can be written",
            file=sys.stderr,
        )
        raise typer.Exit(1)

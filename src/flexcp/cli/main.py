"""The command's entry: registers the commands, and turns a user's mistake into one line and exit code 2."""

from __future__ import annotations

import gc
import sys

import typer

from flexcp.cli import bench
from flexcp.cli.demo import demo
from flexcp.cli.plan import plan
from flexcp.cli.verify import verify
from flexcp.cli.warmup import warmup

QUIET = 200_000
"""Objects between collections: imports make many and no garbage, and looking for some is a tenth of a short command."""

app = typer.Typer(
    name="flexcp",
    help="Dynamic context parallelism: plan, run and verify attention over many ranks.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
app.command()(plan)
app.command()(verify)
app.command()(demo)
app.command()(warmup)
app.add_typer(bench.app, name="bench")


@app.callback(invoke_without_command=True)
def version(show: bool = typer.Option(False, "--version", help="Print the version and exit.")) -> None:
    if show:
        from flexcp import __version__

        typer.echo(__version__)
        raise typer.Exit


def run() -> None:
    """``flexcp`` on the command line. Exit codes: 0 done, 1 a check failed, 2 wrong input."""
    gc.set_threshold(QUIET)
    try:
        app()
    except (ValueError, NotImplementedError) as error:
        print(f"flexcp: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("flexcp: interrupted", file=sys.stderr)
        sys.exit(130)

"""``flexcp show``: a saved plan as text or JSON. Reading a plan file, from any source, executes no code in it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from flexcp.cli.shared.model_and_cluster_options import MOST_RANKS
from flexcp.cli.shared.options import Html, Json, refuse_same_file
from flexcp.cli.shared.reports import report_plan

LARGEST = 1 << 28

File = Annotated[Path, typer.Argument(help="A file written by flexcp plan --save.")]
Check = Annotated[bool, typer.Option("--check", help="Execute the plan symbolically, forward and backward.")]


def show(file: File, check: Check = False, html: Html = None, as_json: Json = False) -> None:
    """Show a saved plan: who keeps and computes what, and what moves.

    A damaged file, or one of an unknown version, is refused with exit code 2; with `--check`, so is a plan that would
    compute nonsense.

    Example: `flexcp plan --lengths 4096,800,1 --ranks 8 --save a.plan && flexcp show a.plan`
    """
    from flexcp.cli.commands.plan import summary
    from flexcp.plan.file import PlanFormatError, load_plan

    refuse_same_file(file=file, html=html)
    data = _read(file)
    try:
        plan = load_plan(data)
    except PlanFormatError as error:
        raise PlanFormatError(f"{file}: {error}") from None
    if check:
        plan.check()
    if plan.ranks > MOST_RANKS:
        raise ValueError(f"{file} is a plan of {plan.ranks} ranks; show draws up to {MOST_RANKS}")
    if html is not None:
        report_plan(html, plan)
    if as_json:
        typer.echo(json.dumps({**summary(plan), "file_bytes": len(data)}, indent=2))
    else:
        typer.echo(str(plan))


def _read(path: Path) -> bytes:
    try:
        if not path.is_file() and not path.is_fifo():
            raise ValueError(f"{path} is no file; name one written by flexcp plan --save")
        with path.open("rb") as file:
            data = file.read(LARGEST + 1)
        if len(data) > LARGEST:
            raise ValueError(f"{path} has more than {LARGEST} bytes; no plan is that large")
        return data
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None

"""``flexcp doctor``: what this machine has, what flexcp would use and why, a self-test, and what to fix."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from flexcp.cli.shared.options import Json
from flexcp.cli.shared.progress import compiling

if TYPE_CHECKING:
    from flexcp.measure.doctor import Finding

NoTest = Annotated[bool, typer.Option("--no-test", help="Only look; run nothing.")]


def doctor(no_test: NoTest = False, as_json: Json = False) -> None:
    """Look at this machine, try flexcp out on it (20 seconds), and say what to fix.

    Exit code 1: something has to be fixed.

    Example: `flexcp doctor`
    """
    from flexcp.measure.doctor import examine, try_out

    with compiling("looking at this machine") as progress:
        found = list(examine())
        tested = [] if no_test else list(try_out(progress.update))
    wrong = [finding for finding in (*found, *tested) if not finding.ok]
    if as_json:
        data = {
            "ok": not wrong,
            "findings": {f.name: f.value for f in found},
            "tests": {f.name: f.value for f in tested},
            "fixes": {f.name: f.fix for f in wrong},
            "hints": {f.name: f.hint for f in (*found, *tested) if f.hint},
        }
        typer.echo(json.dumps(data, indent=2))
    else:
        typer.echo(text(found, tested))
    if wrong:
        raise typer.Exit(1)


def text(found: list[Finding], tested: list[Finding]) -> str:
    """Return what was ``found`` on the machine and what was ``tested``, one line each, then what to do about them."""
    wide = max(len(f.name) for f in (*found, *tested))
    lines = [f"{'  ' if f.ok else '! '}{f.name:<{wide}}  {f.value}" for f in found]
    lines += ["", *(f"{'ok ' if f.ok else '!  '}{f.name:<{wide}} {f.value}" for f in tested)] if tested else []
    todo = [f"fix {f.name}: {f.fix}" for f in (*found, *tested) if not f.ok]
    todo += [f"hint: {f.hint}" for f in (*found, *tested) if f.hint]
    return "\n".join([*lines, "", *(todo or ["nothing to fix"])])

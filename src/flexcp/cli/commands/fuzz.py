"""``flexcp fuzz``: random cases through planners, checks, simulator, files, reports, loader and real ranks."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flexcp.cli.shared import options as o
from flexcp.cli.shared.progress import compiling, say
from flexcp.io.atomic_files import write_whole
from flexcp.io.terminal_text import visible, visible_lines

if TYPE_CHECKING:
    from flexcp.fuzz.findings import Found

Minutes = Annotated[
    float,
    typer.Option(help="How long to go on, once loops are compiled. One where neither this nor --cases is given."),
]
Cases = Annotated[int, typer.Option(help="How many cases, 0 for no limit but --minutes.")]
Seed = Annotated[int, typer.Option(help="Cases follow from it: the same seed gives the same ones, whatever --jobs is.")]
Share = Annotated[float, typer.Option(help="Share of the cases that real processes run, 0 to 1.")]
MostRanks = Annotated[int, typer.Option(callback=o.startable, help="The most processes that are started for a case.")]
Jobs = Annotated[int, typer.Option(help="Processes that judge cases, each with ranks of its own; 0 for one a core.")]
Folder = Annotated[Path, typer.Option(help="Where failing cases are written, for `flexcp verify @FILE`.")]
Write = Annotated[
    Path | None,
    typer.Option(callback=o.writable, help="Write what was done and found as JSON, every few seconds and at the end."),
]
WRITE_SECONDS = 15.0


def fuzz(
    minutes: Minutes = 0.0,
    cases: Cases = 0,
    seed: Seed = 0,
    ranks_share: Share = 0.05,
    most_ranks: MostRanks = 8,
    jobs: Jobs = 1,
    folder: Folder = Path(),
    write: Write = None,
    as_json: o.Json = False,
) -> None:
    """Look for mistakes of flexcp itself: random batches, masks, machines and options. Exit code 1: a case failed.

    Failing cases are made small and written to files.

    Example: `flexcp fuzz --minutes 10 --seed 7`, then `flexcp verify @fuzz-7-123.json` for what it found.
    """
    if not 0 <= ranks_share <= 1:
        raise ValueError(f"--ranks-share is a share between 0 and 1; got {ranks_share:g}")
    if not minutes >= 0 or cases < 0 or jobs < 0:  # NaN is not 0 or more, and would never be over
        raise ValueError(f"--minutes, --cases and --jobs are 0 or more; got {minutes:g}, {cases} and {jobs}")
    if not folder.is_dir():
        raise ValueError(f"--folder is a folder that exists; got {folder}")
    from flexcp.fuzz.campaign import Limits, campaign
    from flexcp.fuzz.worker import Task
    from flexcp.measure.warmup import warm

    limits = Limits(cases, 60 * minutes if minutes or cases else 60.0)
    with compiling("drawing the first cases") as progress:
        warm()  # once here, instead of in every worker at the same time
        written = time.monotonic()

        def tell(found: Found) -> None:
            nonlocal written
            progress.update(_now(found))
            if time.monotonic() - written > WRITE_SECONDS:
                written = time.monotonic()
                _write(write, found)
                if not sys.stderr.isatty():  # a spinner is not visible there
                    say(_now(found))

        found = campaign(Task(seed, ranks_share, folder, most_ranks), limits, jobs or os.cpu_count() or 1, tell)
    _write(write, found)
    typer.echo(json.dumps(found.as_data(), indent=2) if as_json else _as_text(found))
    if found.failures:
        raise typer.Exit(1)


def _write(path: Path | None, found: Found) -> None:
    if path is not None:
        write_whole(path, json.dumps(found.as_data(), indent=2) + "\n")


def _now(found: Found) -> str:
    return (
        f"{found.cases:,} cases in {found.seconds:.0f} s: {found.plans:,} plans, {found.refused:,} refused, "
        f"{found.on_ranks:,} on real ranks, {len(found.failures)} failed"
    )


def _as_text(found: Found) -> str:
    lines = [f"seed {found.seed}: {_now(found)}; the slowest was case {found.slowest[1]} ({found.slowest[0]:.1f} s)"]
    for what, counts in {"plans that passed": found.checks, **found.covered}.items():
        lines.append(f"  {what}: {', '.join(f'{value} {count}' for value, count in counts.most_common())}")
    for failure in found.failures:
        lines += [
            f"FAILED case {failure.number}, {failure.check}: {visible_lines(failure.message.strip(), '    ')}",
            f"  flexcp verify @{visible(str(failure.file))}",
        ]
    return "\n".join(lines)


def replay_case(path: Path, as_json: bool) -> None:
    """Run a case that ``flexcp fuzz`` wrote to a file again, and print the verdict; exit with code 1 if it fails.

    Small cases are also run on real processes (see :data:`MOST_RANKS`).
    """
    from flexcp.fuzz.cases import read_case
    from flexcp.fuzz.judge import Extras, judge
    from flexcp.measure.ranks import RankPool

    case = read_case(path)
    with compiling("starting processes"), RankPool(min(case.cluster.ranks, MOST_RANKS)) as pool:
        outcome = judge(case, Extras(pool=pool))
    result = {"verdict": outcome.verdict, "check": outcome.check, "message": outcome.message}
    if as_json:
        typer.echo(json.dumps(result, indent=2))
    else:
        said = f" ({outcome.check}): {visible_lines(outcome.message.strip(), '    ')}" if outcome.message else ""
        typer.echo(f"{'FAILED' if outcome.verdict == 'failed' else outcome.verdict}{said}")
    if outcome.verdict == "failed":
        raise typer.Exit(1)


MOST_RANKS = 16
"""The most processes that :func:`replay_case` starts; cases for more ranks are not run on processes."""

"""Options that several commands share without forming a group: their name, type and help, and how values are parsed.

Options that always go together are declared in their group, with their defaults: those of a batch in
:mod:`flexcp.cli.shared.batches`, of a model and a cluster in :mod:`flexcp.cli.shared.model_and_cluster_options`, of a
plan in :mod:`flexcp.cli.shared.plan_options`, of a simulation in :mod:`flexcp.cli.shared.scenario`. Options of a single
command are declared in its file.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flexcp.io.atomic_files import stream_to

if TYPE_CHECKING:
    from flexcp.calibration import Calibration


def tokens(text: str | int) -> int:
    """Parse a count of tokens on the command line: ``32768``, or ``32k`` for 32 x 1,024.

    A default comes as an int and is returned as it is. Raise ``typer.BadParameter`` for any other text.
    """
    from flexcp.data.lengths import parse_count

    try:
        return parse_count(str(text))
    except ValueError:
        raise typer.BadParameter(f"{text!r} is no count of tokens; write 32768 or 32k") from None


def writable(path: Path | None) -> Path | None:
    """Return the path of a file that a command will write, None if there is none.

    Raise ValueError before the work begins if the path is a folder, or if the folder for the file does not exist or
    cannot be written.
    """
    if path is None:
        return None
    try:
        parent = path.absolute().parent
    except FileNotFoundError:
        raise ValueError(f"cannot write {path}: the current folder does not exist any more") from None
    if not parent.is_dir():
        raise ValueError(f"cannot write {path}: there is no folder {path.parent}")
    if path.is_dir():
        raise ValueError(f"cannot write {path}: it is a folder")
    if stream_to(path) is not None:
        return path
    # A file is written under another name first; a device or a pipe is written directly.
    written = path if path.exists() and not path.is_file() else path.resolve().parent
    if not os.access(written, os.W_OK):
        raise ValueError(f"cannot write {path}: {written} cannot be written by this user")
    return path


def refuse_same_file(**given: Path | None) -> None:
    """Raise ValueError if two of these files are the same: what is written second would replace the first.

    They are given by parameter name, None if not given; ``file`` is the argument, which the command reads. A device, a
    pipe or a stream may be given twice, because nothing in it is replaced.
    """
    seen: dict[str, str] = {}
    for name, path in given.items():
        if path is None or stream_to(path) is not None or (path.exists() and not path.is_file()):
            continue
        option = "FILE" if name == "file" else f"--{name.replace('_', '-')}"
        first = seen.setdefault(os.path.realpath(path), option)
        if first != option:
            raise ValueError(f"{first} and {option} are the same file, {path}; give {option} another one")


def startable(option: typer.CallbackParam, ranks: int) -> int:
    """Return the number of ranks that a command will start on this machine; raise ValueError if it cannot."""
    from flexcp.measure.ranks import check_size

    check_size(ranks, option.opts[0])
    return ranks


Strategy = Annotated[
    str, typer.Option("--strategy", help="A strategy, with its degree: blocks, zigzag:4, usp:4,2, ...")
]
Strategies = Annotated[
    str,
    typer.Option(
        "--strategies", help="Names with or without degrees, as in auto,usp:8,2,ring; all, alone or among them."
    ),
]
Slow = Annotated[
    bool,
    typer.Option("--slow", help="All includes strategies that take seconds and flexcp[hypergraph]: hypergraph, dcp."),
]
Dtype = Annotated[str, typer.Option("--dtype", help="float32, bfloat16 or float64.")]
MeasuredDtype = Annotated[str, typer.Option("--dtype", help="float32 on CPUs, bfloat16 on GPUs, by default.")]
MaxTokens = Annotated[
    int | None,
    typer.Option(
        "--max-tokens-per-rank", parser=tokens, metavar="TOKENS", help="Hard cap on the tokens a rank keeps, as in 32k."
    ),
]
Layout = Annotated[str, typer.Option("--layout", help="free, contiguous or zigzag.")]
CostFile = Annotated[Path | None, typer.Option("--cost", help="A cost model written by flexcp calibrate.")]
Json = Annotated[bool, typer.Option("--json", help="Print only JSON on stdout.")]
Html = Annotated[
    Path | None,
    typer.Option("--html", callback=writable, help="Write a report to this file: one page with pictures, no network."),
]


def chosen_strategies(text: str, more: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Return the strategies that ``--strategies`` names, each once.

    ``all`` stands for :data:`flexcp.compare.compare.NAMES` and those of ``more``. Raise ValueError if none is named.
    """
    from flexcp.compare.compare import NAMES
    from flexcp.planners.strategies import split_names

    every = (*NAMES, *more)
    named = (every if name == "all" else (name,) for name in split_names(text))
    names = tuple(dict.fromkeys(name for some in named for name in some))
    if not names:
        raise ValueError(f"--strategies {text!r} names none; write all, or names as in auto,zigzag:8,ring")
    return names


def cost_of(file: Path | None) -> Calibration:
    """Return the calibration (cost model and measured speeds) in the file of ``--cost``; None gives the default."""
    from flexcp.calibration import Calibration, read_calibration
    from flexcp.cost import CostModel

    return Calibration(CostModel()) if file is None else read_calibration(file)

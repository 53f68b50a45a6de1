"""Entry of the command ``flexcp``: register its commands, and print a user's mistake as one line with exit code 2."""

from __future__ import annotations

import errno
import gc
import os
import sys

import typer

from flexcp.cli.commands import bench
from flexcp.cli.commands.accept import accept
from flexcp.cli.commands.advise import advise
from flexcp.cli.commands.calibrate import calibrate
from flexcp.cli.commands.compare import compare
from flexcp.cli.commands.demo import demo
from flexcp.cli.commands.doctor import doctor
from flexcp.cli.commands.fuzz import fuzz
from flexcp.cli.commands.plan import plan
from flexcp.cli.commands.show import show
from flexcp.cli.commands.simulate import simulate
from flexcp.cli.commands.train import train
from flexcp.cli.commands.verify import verify
from flexcp.cli.commands.warmup import warmup
from flexcp.cli.shared.command_registry import Commands, UsageError, one_line
from flexcp.cli.shared.termination import interrupted_by_sigterm
from flexcp.io.terminal_text import visible

COLLECT_EVERY = 200_000
"""How many new objects trigger a garbage collection.

Imports make many objects and no garbage; collecting would take a tenth of a short command's time.
"""

FULL = (errno.ENOSPC, errno.EDQUOT)
"""Errors of a full disk; without a file's name they are of stdout, which is sent to a file there."""

app = Commands(
    name="flexcp",
    help="Dynamic context parallelism: plan, run and verify attention over many ranks.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
app.command()(advise)
app.command()(plan)
app.command()(show)
app.command()(verify)
app.command()(simulate)
app.command()(compare)
app.command()(calibrate)
app.command()(demo)
app.command()(train)
app.command()(doctor)
app.command()(accept)
app.command()(warmup)
app.command()(fuzz)
app.add_typer(bench.app, name="bench")


@app.callback(invoke_without_command=True)
def version(show: bool = typer.Option(False, "--version", help="Print the version and exit.")) -> None:
    if show:
        from flexcp.version import __version__

        typer.echo(__version__)
        raise typer.Exit


def run() -> None:
    """Run ``flexcp`` with the arguments of the command line, and exit.

    Exit codes: 0 done, 1 a check failed, 2 wrong input, 130 interrupted, 143 terminated.
    """
    _open_standard_streams()
    gc.set_threshold(COLLECT_EVERY)
    with interrupted_by_sigterm() as heard:
        code = _code()
    if heard:
        code = 128 + heard[0]
    if code > 128:
        print(f"flexcp: {'terminated' if heard else 'interrupted'}", file=sys.stderr)
    sys.exit(code)


def _open_standard_streams() -> None:
    """Connect stdin, stdout and stderr to ``/dev/null`` where the caller has closed them.

    Otherwise the next file that is opened gets their descriptor, and messages for them would be written into it.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            # The lowest descriptor that is free is taken, which is this one; processes started later get it, too.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w", closefd=False)
    if sys.stdout is None:
        sys.stdout = os.fdopen(1, "w", closefd=False)


def _code() -> int:
    try:
        code = app(standalone_mode=False)
    except UsageError as error:
        if "NoArgs" in type(error).__name__:  # a command without arguments prints its help
            print(error.format_message(), file=sys.stderr)
        else:
            print(f"flexcp: {visible(one_line(error))}", file=sys.stderr)
        return 2
    except (ValueError, NotImplementedError) as error:
        print(f"flexcp: {visible(str(error))}", file=sys.stderr)
        return 2
    except OSError as error:
        if error.filename is None and error.errno not in FULL:
            raise
        where = "write the result" if error.filename is None else f"use {visible(str(error.filename))}"
        print(f"flexcp: cannot {where}: {error.strerror}", file=sys.stderr)
        return 2
    except (KeyboardInterrupt, typer.Abort) as error:
        if isinstance(error.__cause__, EOFError):  # typer takes every one for the end of a user's input
            raise error.__cause__ from None
        code = 130
    return code if isinstance(code, int) else 0

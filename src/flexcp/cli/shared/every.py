"""What every command has: ``--quiet``, and mistakes in one line with the nearest name.

:class:`Commands` gives each command one more option, so that a new command needs no line for it. :func:`one_line` says what was wrong with
the words of a command line the way the library says what was wrong with a value.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from typing import Annotated, Any

import typer

from flexcp.cli.shared.progress import QUIET

# Newer typer carries click inside, older ones depend on it; typer's own names are the same in both.
UsageError: Any = typer.BadParameter.__bases__[0]

Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress, no messages: only the result and errors.")]


class Commands(typer.Typer):
    """A group of commands that all take ``--quiet``."""

    def command(self, *arguments: Any, **options: Any) -> Callable[[Any], Any]:
        """Registers a function as a command, as typer's own does."""
        register = super().command(*arguments, **options)
        return lambda function: register(_with_quiet(function))


def _with_quiet(function: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(function, eval_str=True)

    @functools.wraps(function)
    def command(*arguments: Any, quiet: bool, **options: Any) -> Any:
        before = QUIET.set(quiet)
        try:
            return function(*arguments, **options)
        finally:
            QUIET.reset(before)

    more = inspect.Parameter("quiet", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Quiet)
    command.__signature__ = signature.replace(parameters=[*signature.parameters.values(), more])  # type: ignore[attr-defined]
    return command


def one_line(error: Any) -> str:
    """A usage error in one line, with the command whose help says more."""
    text = re.sub(r"\s+", " ", error.format_message()).strip().rstrip(".")
    text = re.sub(r" ?\(Possible options?: ([^)]*)\)", r"; did you mean \1?", text)
    where = error.ctx.command_path if getattr(error, "ctx", None) is not None else "flexcp"
    return f"{text} (see {where} --help)"

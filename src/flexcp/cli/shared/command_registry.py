"""The registry of commands: it adds ``--quiet`` to each, and lets them take groups of options.

:class:`Commands` adds ``--quiet`` to each command, so that a new command needs no line for it, and turns groups into
options (:mod:`flexcp.cli.shared.option_groups`). :func:`one_line` phrases mistakes in a command line, such as an
unknown option, as the library phrases wrong values.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from typing import Annotated, Any

import typer

from flexcp.cli.shared.option_groups import options_of, value_of
from flexcp.cli.shared.progress import QUIET

# Newer typer includes click, older ones depend on it; typer's own names are the same in both.
UsageError: Any = typer.BadParameter.__bases__[0]

Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress, no messages: only the result and errors.")]


class Commands(typer.Typer):
    """A ``typer.Typer`` whose commands all have ``--quiet`` and may take groups of options as arguments."""

    def command(self, *arguments: Any, **options: Any) -> Callable[[Any], Any]:
        """Register a function as a command, as typer's own method does."""
        register = super().command(*arguments, **options)
        return lambda function: register(_as_command(function))


def _as_command(function: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(function, eval_str=True)
    parameters = tuple(signature.parameters.values())

    @functools.wraps(function)
    def command(*, quiet: bool, **given: Any) -> Any:
        before = QUIET.set(quiet)
        try:
            return function(**{parameter.name: value_of(parameter, given) for parameter in parameters})
        finally:
            QUIET.reset(before)

    options = [option for parameter in parameters for option in options_of(parameter)]
    more = inspect.Parameter("quiet", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Quiet)
    command.__signature__ = signature.replace(parameters=[*options, more])  # type: ignore[attr-defined]
    return command


def one_line(error: Any) -> str:
    """Return a usage error of typer as one line, with the option probably meant and the command whose help to read."""
    text = re.sub(r"\s+", " ", error.format_message()).strip().rstrip(".")
    text = re.sub(r" ?\(Possible options?: ([^)]*)\)", r"; did you mean \1?", text)
    where = error.ctx.command_path if getattr(error, "ctx", None) is not None else "flexcp"
    return f"{text} (see {where} --help)"

"""Groups of options, which a command takes as one argument.

    class ClusterOptions(OptionGroup):
        cluster: Annotated[str | None, typer.Option(help="Preset and shape, as in h100:4x8.")] = None
        ranks: Annotated[int | None, typer.Option(help="One node of this many ranks.")] = None

    def simulate(where: ClusterOptions, strategy: options.Strategy = "auto") -> None: ...

makes a command with ``--cluster``, ``--ranks`` and ``--strategy``. A field may itself be a group; on the command line
only the names of options count. The name, type, help and default of an option are thus declared once for all commands;
a derived group can change one of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from inspect import Parameter
from typing import Any, dataclass_transform, get_type_hints


@dataclass_transform(kw_only_default=True, frozen_default=True)
class OptionGroup:
    """The base class of groups; an instance has the value of each option as an attribute.

    Type checkers see a frozen dataclass; making a real one would cost every command a millisecond per group.
    """

    def __init__(self, **options: Any) -> None:
        vars(self).update(options)


def options_of(parameter: Parameter) -> Iterator[Parameter]:
    """Yield the options that a parameter of a command stands for: itself, or all options of its group."""
    if _is_group(parameter.annotation):
        for field in fields_of(parameter.annotation):
            yield from options_of(field)
    else:
        yield parameter.replace(kind=Parameter.KEYWORD_ONLY)


def value_of(parameter: Parameter, given: Mapping[str, Any]) -> Any:
    """Return the argument that a command gets for ``parameter``: an option's value, or a group made of several.

    ``given`` are the values of all options of the command, by name.
    """
    if not _is_group(parameter.annotation):
        return given[parameter.name]
    return parameter.annotation(**{field.name: value_of(field, given) for field in fields_of(parameter.annotation)})


@cache
def fields_of(group: type[OptionGroup]) -> tuple[Parameter, ...]:
    """Return the fields of a group as parameters, with type and default; those of its base class come first."""
    return tuple(
        Parameter(name, Parameter.KEYWORD_ONLY, default=getattr(group, name, Parameter.empty), annotation=annotation)
        for name, annotation in get_type_hints(group, include_extras=True).items()
    )


def _is_group(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, OptionGroup)

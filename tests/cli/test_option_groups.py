"""Tests of option groups: the fields of a group become options of a command and come back as one object, and options
that are arguments of ``Planner`` have the names and defaults that ``Planner`` has.
"""

from __future__ import annotations

import inspect
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from flexcp import Planner
from flexcp.cli.commands.verify import VerifyOptions
from flexcp.cli.shared.command_registry import Commands
from flexcp.cli.shared.option_groups import OptionGroup, fields_of
from flexcp.cli.shared.plan_options import PlannerOptions, PlanOptions, TokenOptions


class Inner(OptionGroup):
    depth: Annotated[int, typer.Option(help="How deep.")]
    color: Annotated[str, typer.Option("--paint", help="Which color.")] = "red"


class Blue(Inner):
    color: Annotated[str, typer.Option("--paint", help="Which color.")] = "blue"


class Outer(OptionGroup):
    inner: Inner
    width: Annotated[int, typer.Option(help="How wide.")] = 2


def run(command: object, *words: str) -> str:
    app = Commands()
    app.command()(command)
    result = CliRunner().invoke(app, words)
    return result.output.strip() if result.exit_code == 0 else f"exit code {result.exit_code}"


def test_a_command_gets_its_groups_filled() -> None:
    def command(outer: Outer, last: Annotated[bool, typer.Option("--last")] = False) -> None:
        print(outer.inner.depth, outer.inner.color, outer.width, last)

    assert run(command, "--depth", "3") == "3 red 2 False"
    assert run(command, "--depth", "3", "--paint", "green", "--width", "5", "--last", "--quiet") == "3 green 5 True"


def test_an_option_without_default_is_required() -> None:
    def command(outer: Outer) -> None:
        print(outer)

    assert run(command) == "exit code 2"


def test_a_derived_group_changes_a_default_and_keeps_the_order() -> None:
    def command(inner: Blue) -> None:
        print(*vars(inner).values())

    assert run(command, "--depth", "3") == "3 blue"


@pytest.mark.parametrize(("group", "call"), [(PlannerOptions, Planner.__init__), (TokenOptions, Planner.__call__)])
def test_options_that_are_arguments_of_the_planner_have_its_names_and_defaults(
    group: type[OptionGroup], call: object
) -> None:
    arguments = inspect.signature(call).parameters  # type: ignore[arg-type]
    expected = {f.name: arguments[f.name].default for f in fields_of(group)}
    if group is PlannerOptions:
        expected["dtype"] = None  # None: the dtype of the model
    assert {f.name: f.default for f in fields_of(group)} == expected


def test_verify_has_the_options_of_plan() -> None:
    assert [f.name for f in fields_of(VerifyOptions)] == [f.name for f in fields_of(PlanOptions)]

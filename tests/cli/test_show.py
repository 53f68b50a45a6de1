"""Tests of ``flexcp plan --save`` and ``flexcp show``: the same plan comes back, and a file that holds no plan is a
clear error.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from flexcp.cli.main import app
from flexcp.plan.check import PlanError
from flexcp.plan.file import PlanFormatError, load_plan, save_plan

PLAN = ["plan", "--lengths", "300,40,1", "--ranks", "4", "--heads", "8", "--kv-heads", "2", "--strategy", "zigzag"]


def invoke(*arguments: str) -> Any:
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    file = tmp_path / "a.plan"
    invoke(*PLAN, "--save", str(file))
    return file


def test_show_prints_what_plan_printed(saved: Path) -> None:
    assert invoke("show", str(saved), "--check").stdout == invoke(*PLAN).stdout
    assert list(saved.parent.iterdir()) == [saved]


def test_json_has_the_documented_keys(saved: Path) -> None:
    shown = json.loads(invoke("show", str(saved), "--json").stdout)
    planned = json.loads(invoke(*PLAN, "--json").stdout)
    timing = {"planning_ms", "first_plan_ms"}
    assert shown == {**{k: v for k, v in planned.items() if k not in timing}, "file_bytes": saved.stat().st_size}
    commands = (Path(__file__).parents[2] / "docs" / "commands.md").read_text()
    documented = commands.partition("\n## JSON output\n")[2]
    assert "`file_bytes`" in documented and "`flexcp show`" in documented


def test_a_plan_in_the_place_of_a_dump_names_the_command_that_reads_it(saved: Path) -> None:
    with pytest.raises(ValueError, match=rf"{saved} is a plan, not a dump of a run: .*flexcp show {saved} --check"):
        CliRunner().invoke(app, ["verify", f"@{saved}"], catch_exceptions=False)


def test_no_plan_is_a_clear_error(saved: Path, tmp_path: Path) -> None:
    for file, message in (
        (tmp_path / "none.plan", "is no file"),
        (tmp_path, "is no file"),
        (Path("/dev/zero"), "is no file"),
    ):
        with pytest.raises(ValueError, match=message):
            CliRunner().invoke(app, ["show", str(file)], catch_exceptions=False)
    saved.write_bytes(saved.read_bytes()[:-1])
    with pytest.raises(PlanFormatError, match="copy it again"):
        CliRunner().invoke(app, ["show", str(saved)], catch_exceptions=False)
    with pytest.raises(ValueError, match="cannot write"):
        CliRunner().invoke(app, [*PLAN, "--save", str(tmp_path / "no" / "a.plan")], catch_exceptions=False)


def test_check_refuses_a_plan_that_computes_nonsense(saved: Path) -> None:
    from dataclasses import replace

    plan = load_plan(saved.read_bytes())
    fewer = plan.placement.regions[0].take(slice(1, None))
    saved.write_bytes(save_plan(replace(plan, placement=replace(plan.placement, regions=(fewer,)))))
    invoke("show", str(saved))
    with pytest.raises(PlanError, match="are computed"):
        CliRunner().invoke(app, ["show", str(saved), "--check"], catch_exceptions=False)

"""Proves that flexcp's rooms (folders and modules at the top) import each other in one direction only, and that
importing flexcp loads little.

Imports are read from the source (house.py). What importing, planning and asking for help must not load is checked in
fresh interpreters.
"""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import flexcp
import house
from flexcp.planners.strategies import STRATEGIES

STATIC = ["dp", "ring", "zigzag:4", "allgather", "ulysses:2", "usp"]
HEAVY = ("torch", "numba", "numpy", "triton", "rich")

PLAN = """
import flexcp
planner = flexcp.Planner(8, 8, 64, cluster=flexcp.cluster("h100", 2, 4), strategy={strategy!r})
masks = [flexcp.causal(), flexcp.full(), flexcp.window(9)]
masks += [flexcp.masks.lambda_(4, 8), flexcp.masks.shared_question(2, 0.5)]
masks += [flexcp.masks.causal_blockwise(16, 1), flexcp.masks.prefix(7), flexcp.masks.modality([(1, 3)])]
masks += [flexcp.from_slices(40, [(0, 40, 0, 40, None, 0)]), flexcp.masks.from_key_ranges([[(0, 1)]] * 40)]
lengths, _ = flexcp.masks.from_cu_seqlens([40 * i for i in range(len(masks) + 1)])
plan = planner(lengths, masks, tokens={tokens!r})
plan.check()
assert "rank" in str(plan) and len(plan.hash) == 32
"""

HELP = """
import sys
from flexcp.cli.main import run
sys.argv = ["flexcp", *{arguments!r}]
stdout, sys.stdout = sys.stdout, sys.stderr
try:
    run()
except SystemExit as end:
    assert not end.code, end.code
finally:
    sys.stdout = stdout
"""


def loaded_by(code: str) -> set[str]:
    """Return the top-level modules in ``sys.modules`` after running ``code`` in a new interpreter."""
    report = "\nimport json, sys\nprint(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"
    result = subprocess.run([sys.executable, "-c", code + report], capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr
    return set(json.loads(result.stdout))


def test_the_probe_sees_what_is_loaded() -> None:
    assert {"numpy", "json"} <= loaded_by("import numpy.linalg")


def test_importing_flexcp_loads_nothing_heavy() -> None:
    assert not loaded_by("import flexcp; dir(flexcp); flexcp.__version__") & set(HEAVY)


@pytest.mark.parametrize("tokens", ["priced", "equal"])
def test_planning_never_loads_torch(tokens: str) -> None:
    every = "\n".join(PLAN.format(strategy=strategy, tokens=tokens) for strategy in STRATEGIES)
    loaded = loaded_by(every)
    assert "numpy" in loaded
    assert "torch" not in loaded


def test_static_strategies_need_no_numba() -> None:
    every = "\n".join(PLAN.format(strategy=strategy, tokens="priced") for strategy in STATIC)
    assert not loaded_by(every) & {"torch", "numba"}


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["plan", "--help"], ["verify", "--help"], ["demo", "--help"], ["train", "--help"], ["--version"]],
)
def test_help_loads_neither_torch_nor_numpy(arguments: list[str]) -> None:
    assert not loaded_by(HELP.format(arguments=arguments)) & {"torch", "numba", "numpy"}


def test_the_plan_command_loads_neither_torch_nor_numba() -> None:
    arguments = ["plan", "--lengths", "web:4096:0", "--ranks", "4", "--strategy", "zigzag", "--json"]
    assert not loaded_by(HELP.format(arguments=arguments)) & {"torch", "numba"}


def test_every_public_name_resolves() -> None:
    assert sorted(flexcp.__all__) == list(flexcp.__all__)
    for name in flexcp.__all__:
        assert getattr(flexcp, name) is not None, name
        assert name in dir(flexcp)
    assert flexcp.__version__.count(".") == 2


@pytest.mark.parametrize("of_the_trainer", [False, True])
def test_rooms_and_their_modules_are_attributes_without_an_import_of_their_own(of_the_trainer: bool) -> None:
    """Every name can be written as on the API page, after ``import flexcp`` alone.

    The names of the Hugging Face Trainer's adapter are a case of their own: its imports take longer than all others.
    """
    page = (house.SOURCE.parent / "docs" / "api.md").read_text()
    names = set(re.findall(r"^(flexcp\.(?:data|frameworks|masks|report)\.[\w.]+)\(", page, re.MULTILINE))
    known = {"flexcp.frameworks.used", "flexcp.data.Loader", "flexcp.masks.prefix", "flexcp.report.page.write_report"}
    assert known <= names
    chosen = {name for name in names if name.startswith("flexcp.frameworks.huggingface_trainer.") == of_the_trainer}
    assert chosen
    loaded_by("import flexcp\n" + "\n".join(sorted(chosen)))
    assert {"data", "frameworks", "masks", "report"} <= set(dir(flexcp))


def test_every_adapter_is_imported_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """The Hugging Face Trainer's, too, whose import takes seconds; here nothing is imported."""
    page = (house.SOURCE.parent / "docs" / "api.md").read_text()
    adapters = set(re.findall(r"^flexcp\.frameworks\.(\w+)\.", page, re.MULTILINE))
    assert "huggingface_trainer" in adapters
    frameworks = flexcp.frameworks
    monkeypatch.setattr(importlib, "import_module", str.upper)
    for name in adapters:
        assert frameworks.__getattr__(name) == f"flexcp.frameworks.{name}".upper()


def test_asking_whether_a_step_was_used_loads_nothing_heavy() -> None:
    assert not loaded_by("import flexcp; flexcp.frameworks.used") & {*HEAVY, "transformers"}


@pytest.mark.parametrize("room", ["frameworks", "report"])
def test_an_unknown_name_of_a_room_is_an_attribute_error(room: str) -> None:
    with pytest.raises(AttributeError, match=f"'flexcp.{room}' has no attribute 'usd'"):
        _ = getattr(flexcp, room).usd


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"'flexcp' has no attribute 'atention'"):
        _ = flexcp.atention  # type: ignore[attr-defined]


def test_every_module_is_in_a_room_that_has_a_floor() -> None:
    assert {house.room_of(module) for module in house.module_files(house.SOURCE)} == set(house.FLOORS)


def test_the_tour_shows_the_rooms_in_this_order() -> None:
    """The first column of the table in CONTRIBUTING.md lists the rooms in the order of ``FLOORS``."""
    text = (house.SOURCE.parent / "CONTRIBUTING.md").read_text()
    table = text.split("| room | what belongs here |\n| --- | --- |\n")[1].split("\n\n")[0]
    shown = [name for row in table.splitlines() for name in row.split(" | ")[0].strip("| ").split(", ")]
    assert [name.strip("`/").removesuffix(".py").replace("/", ".") for name in shown] == list(house.FLOORS)


def test_the_tour_has_todays_numbers() -> None:
    """The last column of the second table in CONTRIBUTING.md."""
    text = (house.SOURCE.parent / "CONTRIBUTING.md").read_text()
    table = text.split("| | before | now |\n| --- | --- | --- |\n")[1].split("\n\n")[0]
    rows = [row.strip("| ").split(" | ") for row in table.splitlines()]
    assert {name: int(now) for name, _, now in rows} == house.counts(house.SOURCE)


def test_few_modules_lie_in_the_root() -> None:
    assert len(list((house.SOURCE / "flexcp").glob("*.py"))) <= 9


@cache
def own_imports() -> list[house.Import]:
    """Return flexcp's imports, read only once because that takes seconds."""
    return house.imports(house.SOURCE)


def test_no_arrow_runs_up() -> None:
    assert house.arrows_up(house.arrows(own_imports(), house.module_files(house.SOURCE))) == []


def test_no_circle_between_rooms() -> None:
    assert house.circles(set(house.arrows(own_imports(), house.module_files(house.SOURCE)))) == []


def test_no_way_leads_from_planning_to_torch() -> None:
    assert house.ways_to_torch(own_imports()) == []


@pytest.mark.parametrize("room", ["executor.kernels", "executor.exchange", "executor.run", "executor"])
def test_the_executor_reaches_no_planner(room: str) -> None:
    pairs = set(house.arrows(own_imports(), house.module_files(house.SOURCE)))
    assert not house.reached(room, pairs) & {"schedule", "simulator", "planners", "planner"}


def made_house(folder: Path, modules: dict[str, str]) -> list[house.Import]:
    """Return the imports of a package named flexcp with these modules."""
    for name, text in {"__init__": "", **modules}.items():
        path = folder / "flexcp" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return house.imports(folder)


LAZY = "def f():\n    from flexcp.planners.auto import auto\n"
TYPES = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import flexcp.planners.auto\n"


@pytest.mark.parametrize(
    "text",
    ["from flexcp.planners import auto\n", LAZY, TYPES, "import os\nimport flexcp.planners.auto as a\n"],
)
def test_the_reader_sees_every_kind_of_import(text: str, tmp_path: Path) -> None:
    found = made_house(
        tmp_path, {"executor/attention": text, "planners/auto": "from flexcp.executor.attention import attention\n"}
    )
    pairs = house.arrows(found, house.module_files(tmp_path))
    assert house.circles(set(pairs)) == [["executor", "planners"]]
    (up,) = house.arrows_up(pairs)
    assert up.startswith("executor.attention, line ") and up.endswith("(executor stands below planners)")


def test_the_reader_sees_torch_behind_others_and_in_packages(tmp_path: Path) -> None:
    behind = {
        "plan/plan": LAZY.replace("planners.auto", "data.order"),
        "data/__init__": "",
        "data/order": "import torch.nn\n",
    }
    assert house.ways_to_torch(made_house(tmp_path / "behind", behind)) == [
        "plan.plan reaches torch: data.order, line 1, imports torch.nn"
    ]
    package = {"plan/plan": "from flexcp.data.order import x\n", "data/__init__": "import torch\n", "data/order": ""}
    assert house.ways_to_torch(made_house(tmp_path / "package", package)) == [
        "plan.plan reaches torch: data, line 1, imports torch"
    ]
    types = {"plan/plan": TYPES.replace("flexcp.planners.auto", "torch")}
    assert house.ways_to_torch(made_house(tmp_path / "types", types)) == []


def test_the_front_door_is_a_room_too(tmp_path: Path) -> None:
    found = made_house(tmp_path, {"io/files": "from flexcp import Plan\n", "masks/a": "import flexcp\n"})
    assert [str(each) for each in found] == ["io.files, line 1, imports __init__", "masks.a, line 1, imports __init__"]
    assert len(house.arrows_up(house.arrows(found, house.module_files(tmp_path)))) == 2

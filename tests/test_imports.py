"""Proves that flexcp is light: what importing, planning and asking for help must not load, each in a fresh interpreter."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import flexcp
from flexcp.planners.strategies import STRATEGIES

STATIC = ["dp", "ring", "zigzag:4", "allgather", "ulysses:2", "usp"]
HEAVY = ("torch", "numba", "numpy", "triton", "rich")

PLAN = """
import flexcp
planner = flexcp.Planner(8, 8, 64, cluster=flexcp.cluster("h100", 2, 4), strategy={strategy!r})
masks = [flexcp.causal(), flexcp.full(), flexcp.window(9), flexcp.lambda_(4, 8), flexcp.shared_question(2, 0.5)]
masks += [flexcp.causal_blockwise(16, 1), flexcp.prefix(7), flexcp.modality([(1, 3)])]
masks += [flexcp.from_slices(40, [(0, 40, 0, 40, None, 0)]), flexcp.from_key_ranges([[(0, 1)]] * 40)]
lengths, _ = flexcp.from_cu_seqlens([40 * i for i in range(len(masks) + 1)])
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
    """Top-level modules in ``sys.modules`` after running ``code`` in a new interpreter."""
    report = "\nimport json, sys\nprint(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"
    result = subprocess.run([sys.executable, "-c", code + report], capture_output=True, text=True, timeout=120)
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


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"'flexcp' has no attribute 'atention'"):
        _ = flexcp.atention  # type: ignore[attr-defined]

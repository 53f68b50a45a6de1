"""Proves that old spellings work, with a warning that gives the new one, and that flexcp's own files do
not use them.
"""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import warnings
from pathlib import Path
from typing import Any

import pytest

import flexcp
from flexcp.data import Batches, Loader, Planning, Samples
from flexcp.data.loader_settings import OLD_ARGUMENTS
from flexcp.masks.named import SHORT_NAMES

ROOT = Path(__file__).parents[1]
OURS = ("src", "tests", "benchmarks", "examples", "docs", "README.md", "CONTRIBUTING.md")
SAMPLES = [{"tokens": [1, 2, 3], "target": [1, 2, 3]}, {"tokens": list(range(9)), "target": list(range(9))}]


def planner() -> flexcp.Planner:
    return flexcp.Planner(2, 2, 8, cluster=flexcp.cluster("cpu", ranks_per_node=1), strategy="zigzag")


@pytest.mark.parametrize("name", sorted(flexcp._MOVED))
def test_a_name_that_moved_is_found_and_says_where(name: str) -> None:
    said = rf"^flexcp\.{name} is .* 0\.4 on; write `from (\S+) import {name}`"
    with pytest.warns(DeprecationWarning, match=said) as caught:
        found = getattr(flexcp, name)
    home = re.search(r"`from (\S+) import", str(caught[0].message))
    assert home is not None and found is getattr(importlib.import_module(home[1]), name)
    assert caught[0].filename == __file__
    assert name not in flexcp.__all__ and name not in dir(flexcp)


def test_public_names_are_few_and_warn_of_nothing() -> None:
    assert 20 <= len(flexcp.__all__) <= 26
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert all(getattr(flexcp, name) is not None for name in flexcp.__all__)
    assert set(SHORT_NAMES) <= set(flexcp.__all__)


def described(**arguments: Any) -> list[tuple[list[int], list[int]]]:
    with Loader(SAMPLES, planner(), budget=9, **arguments) as loader:
        return [(batch.tokens.tolist(), batch.labels.tolist()) for batch in loader]


def test_old_arguments_of_a_loader_mean_what_they_meant() -> None:
    new = described(
        samples=Samples(labels="target"), batches=Batches(max_length=4, too_long="cut"), planning=Planning(workers=0)
    )
    assert new == [([1, 2, 3, 0, 1, 2, 3], [2, 3, -100, 1, 2, 3, -100])]
    with pytest.warns(DeprecationWarning) as caught:
        old = described(labels="target", max_length=4, too_long="cut", workers=0)
    assert old == new
    assert [str(w.message) for w in caught] == [
        "flexcp.data.Loader(labels=..., max_length=..., too_long=..., workers=...) is deprecated since flexcp 0.2 and "
        "an error from 0.4 on; write samples=flexcp.data.Samples(labels=...), "
        "batches=flexcp.data.Batches(max_length=..., too_long=...), planning=flexcp.data.Planning(workers=...)"
    ]
    assert caught[0].filename == __file__


@pytest.mark.filterwarnings("ignore:flexcp[.]data[.]Loader:DeprecationWarning")
@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"bugdet": 9}, TypeError, r"Loader has no argument 'bugdet'; did you mean budget=\.\.\.\?"),
        ({"wrokers": 0}, TypeError, r"'wrokers'; did you mean planning=flexcp\.data\.Planning\(workers=\.\.\.\)\?"),
        ({"zzz": 0}, TypeError, r"Loader has no argument 'zzz'$"),
        ({"workers": 0, "planning": Planning(workers=2)}, TypeError, r"workers= twice, alone and in planning="),
        ({"planning": Samples()}, ValueError, r"planning= is made by flexcp\.data\.Planning\(\.\.\.\); got Samples"),
        ({"samples": {"labels": "x"}}, ValueError, r"samples= is made by flexcp\.data\.Samples\(\.\.\.\); got \{"),
        ({"lookahead": -1}, ValueError, "lookahead is a count of steps, 0 or more; got -1"),
    ],
)
def test_mistakes_are_named(given: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Loader(SAMPLES, planner(), budget=9, **given)


def files(*kinds: str) -> list[Path]:
    """Return tracked files with these endings, except this one."""
    listed = subprocess.run(["git", "ls-files", "-z", *OURS], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    found = [ROOT / name for name in listed.stdout.split("\0") if name.endswith(kinds)]
    return [path for path in found if path.exists() and path.name != "test_deprecated.py"]


def test_nothing_of_ours_uses_a_name_that_moved() -> None:
    names = "|".join(sorted(flexcp._MOVED))
    old = re.compile(rf"(?<![\w.])flexcp\.({names})\b|^from flexcp import .*\b({names})\b", re.MULTILINE)
    assert old.search("x = flexcp.prefix(3)") and not old.search("flexcp.masks.prefix(3), flexcp.prefixes")
    assert not [f"{path}: {found[0]}" for path in files(".py", ".md") for found in old.finditer(path.read_text())]


def old_arguments(text: str) -> list[str]:
    """Return the old arguments in calls of a Loader in Python source."""
    calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    loaders = [call for call in calls if ast.unparse(call.func).rpartition(".")[2] == "Loader"]
    return [word.arg for call in loaders for word in call.keywords if word.arg in OLD_ARGUMENTS]


def test_nothing_of_ours_uses_an_old_argument_of_a_loader() -> None:
    assert old_arguments("flexcp.data.Loader(data, planner, budget=3, workers=0)") == ["workers"]
    assert not [f"{path}: {found}" for path in files(".py") for found in old_arguments(path.read_text())]
    blocks = [
        (path, block)
        for path in files(".md")
        for block in re.findall(r"^```python\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL)
    ]
    with_loaders = [(path, block) for path, block in blocks if "Loader(" in block and "DataLoader(" not in block]
    assert len(with_loaders) > 3
    assert not [f"{path}: {found}" for path, block in with_loaders for found in old_arguments(block)]

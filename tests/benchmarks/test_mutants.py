"""Tests of mutation testing: mutants are made and run in copies of the checkout; a mutant is killed where a test
checks the changed code, and survives where none does.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from textwrap import indent

import pytest

from lib.mutant_areas import AREAS, Area
from lib.mutant_runs import TEST_SECONDS, Copies, baseline, drawn, nearest_tests
from lib.mutations import mutants
from mutants import ROOT, main

SOURCE = "def both(a, b):\n    return a + 3, b + 8\n"
TEST = "from tiny import both\n\n\ndef test_both():\n    assert both(1, 5)[0] == 4\n"


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A checkout of one module, one test that checks half of the module, and one test that always fails."""
    root = tmp_path / "tiny"
    for name, text in (("src/tiny.py", SOURCE), ("tests/test_tiny.py", TEST), ("tests/test_bad.py", "assert False\n")):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_a_test_kills_what_it_looks_at(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    areas = {"tiny": Area(("src/tiny.py",), ("tests/test_bad.py", "tests/test_tiny.py"))}
    file, page = tmp_path / "found.json", tmp_path / "page.md"
    code = main(["--count", "9", "--jobs", "2", "--write", str(file), "--page", str(page)], tiny, areas)
    found = json.loads(file.read_text())
    verdicts = {row["change"].partition("-> ")[2]: row["verdict"] for row in found["mutants"]}
    assert len(verdicts) == 4 and list(found["tests"]) == ["tests/test_tiny.py"]
    assert verdicts["`return (a - 3, b + 8)`"] == "killed" and verdicts["`return (a + 3, b - 8)`"] == "survived"
    assert sorted(verdicts.values()) == ["killed", "killed", "survived", "survived"]
    assert code == 1 and "2 of 4 mutants killed (50 %)" in capsys.readouterr().out
    assert "| tiny | 4 | 2 |" in page.read_text() and "b - 8" in page.read_text() and "a - 3" not in page.read_text()
    assert (tiny / "src/tiny.py").read_text() == SOURCE


def test_a_test_that_fails_anyway_is_left_out_and_the_others_of_its_file_are_not(tiny: Path, tmp_path: Path) -> None:
    (tiny / "tests/test_tiny.py").write_text("def test_anyway():\n    assert False\n\n\n" + TEST)
    said: list[str] = []
    found = baseline(Copies(tiny, tmp_path / "copies", 1), {"tests/test_tiny.py"}, 600.0, said.append)
    assert list(found.seconds) == ["tests/test_tiny.py"] and found.left_out == ("tests/test_tiny.py::test_anyway",)
    assert len(said) == 1 and said[0].endswith(" s, without tests/test_tiny.py::test_anyway, which fails")


def test_a_mutant_that_does_not_end_is_killed(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tiny / "src/tiny.py").write_text("def both(a, b):\n    while a < 4:\n        a += 3\n    return (a, b)\n")
    monkeypatch.setattr("mutants.START_SECONDS", 0.0)
    # The others run as in the tests above, each in a process of its own.
    kind = "statement left out"
    monkeypatch.setattr("mutants.drawn", lambda *given: [place for place in drawn(*given) if place.mutant.kind == kind])
    file = tmp_path / "found.json"
    main(["--write", str(file)], tiny, {"tiny": Area(("src/tiny.py",), ("tests/test_tiny.py",))})
    found = json.loads(file.read_text())["mutants"]
    assert [(row["kind"], row["verdict"]) for row in found] == [(kind, "killed (too slow)")]


def test_equal_code_is_no_mutant() -> None:
    """Exchanging equal arguments leaves the code as it is, so it is no mutant; changing ``3 - 3`` is one."""
    assert [m.after for m in mutants("def f(a):\n    return g(a, a)\n", random.Random(0))] == []
    assert [m.after for m in mutants("def f(a):\n    return g(a, 3 - 3)\n", random.Random(0))]


def changes(body: str) -> list[str]:
    return sorted(m.after for m in mutants(f"def f(a, b, device):\n{indent(body, '    ')}\n", random.Random(0)))


def test_arguments_of_symmetric_functions_are_not_exchanged() -> None:
    assert changes("return max(a, b)") == changes("return np.maximum(a, b)") == []
    assert changes("return a.transpose(b, device)") == []
    assert changes("return max(a, b, key=len)") == ["return max(b, a, key=len)"]
    assert changes("np.maximum.at(a, b)") == ["np.maximum.at(b, a)", "pass"]
    assert changes("return max(g(a, b), b)") == ["return max(g(b, a), b)"]


def test_what_only_a_gpu_runs_is_left_to_a_gpu() -> None:
    assert changes("if device.type == 'cuda' and a > 1:\n    a += 1") == []
    assert changes("return a if device.type == 'cpu' else b + 1") == []
    assert changes("if device.type == 'cuda':\n    a += 1\nelse:\n    a += b") == ["pass"]


def test_every_area_has_sources_tests_and_mutants() -> None:
    for name, area in AREAS.items():
        for path in (*area.sources, *area.tests):
            assert (ROOT / path).is_file(), path
        places = drawn(ROOT, {name: area}, 25, 0)
        assert len({(place.source, place.mutant.source) for place in places}) == 25
    assert drawn(ROOT, {name: area}, 16, 3) == drawn(ROOT, {name: area}, 16, 3) != drawn(ROOT, {name: area}, 16, 4)


def test_the_nearest_tests_come_first() -> None:
    seconds = {"tests/masks/test_masks.py": 1.0, "tests/masks/test_tree.py": 9.0, "tests/masks/test_named.py": 2.0}
    ordered = nearest_tests(ROOT, "src/flexcp/masks/tree.py", AREAS["masks"], seconds)
    assert ordered[0] == "tests/masks/test_tree.py" and set(ordered) == set(seconds)
    slow = {**seconds, "tests/masks/test_tree.py": TEST_SECONDS - 0.5}
    of_time = nearest_tests(ROOT, "src/flexcp/masks/tree.py", AREAS["masks"], slow)
    assert of_time == ("tests/masks/test_tree.py", "tests/masks/test_masks.py"), "others where there is time for them"


def test_the_start_of_the_process_counts_once() -> None:
    """Test files share one process, so all are chosen although they would together exceed the time allowed for a
    mutant if each had a process of its own.
    """
    seconds = dict.fromkeys(AREAS["planners"].tests, TEST_SECONDS / 5)
    assert len(seconds) > 5
    assert set(nearest_tests(ROOT, "src/flexcp/planners/auto/auto.py", AREAS["planners"], seconds)) == set(seconds)

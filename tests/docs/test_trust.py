"""Tests that docs/trust.md names tests that exist, that ``make faults`` runs all of them, and that every long run in
docs/trust.md is a target of the Makefile and has its last result beside it.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/trust.md").read_text()
MAKEFILE = (ROOT / "Makefile").read_text()


def test_every_fault_has_a_test_that_make_faults_runs() -> None:
    table = PAGE.partition("## Faults")[2]
    rows = [line for line in table.splitlines() if line.startswith("| ")][2:]
    named = [re.findall(r"`(tests/\S+\.py)`", row.rpartition(" | ")[2]) for row in rows]
    assert len(rows) >= 20 and all(named), [row for row, tests in zip(rows, named, strict=True) if not tests]
    listed = re.search(r"^FAULTS := (.*?[^\\])$", MAKEFILE, re.MULTILINE | re.DOTALL)
    assert listed is not None
    run = set(listed[1].replace("\\", " ").split())
    assert {test for tests in named for test in tests} == run
    assert not [test for test in run if not (ROOT / test).is_file()]


def test_every_long_run_is_a_target_and_has_its_last_result_beside_it() -> None:
    table = PAGE.partition("## The long runs")[2].partition("\n## ")[0]
    rows = [line for line in table.splitlines() if line.startswith("| `")]
    targets = {target for row in rows for target in re.findall(r"`make ([\w-]+)", row)}
    wanted = {"fuzz", "fuzz-plans", "fuzz-readers", "planted", "mutants", "faults", "soak", "coverage"}
    assert wanted <= targets and not [t for t in targets if f"\n{t}:" not in MAKEFILE]
    for row in rows:
        result = row.strip("| ").rpartition(" | ")[2]
        assert re.search(r"20\d\d-\d\d-\d\d|not run", result), row

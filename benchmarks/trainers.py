"""Runs the tests behind the table of trainers, over 20 steps, and writes the table with the date of the run.

python benchmarks/trainers.py --write docs/trainers.md
"""

from __future__ import annotations

import argparse
import datetime
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from lib.trainer_table import ROOT, TESTS, TRAINERS, table

BEGIN, END = "<!-- written by benchmarks/trainers.py: -->", "<!-- end of what is written -->"


def failed_tests(steps: int) -> set[str]:
    """Run all tests of the table, each in its environment, and return those with a failed or skipped case."""
    failed = set()
    for environment in sorted({trainer.environment for trainer in TRAINERS}):
        tests = sorted({test for trainer in TRAINERS if trainer.environment == environment for test in trainer.tests})
        failed |= set(tests) - _passed(environment, tests, steps)
    return failed


def _passed(environment: str, tests: list[str], steps: int) -> set[str]:
    """Return those of the tests of which every case passed."""
    python = sys.executable if environment == ".venv" else ROOT / environment / "bin" / "python"
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.xml"
        command = [python, "-m", "pytest", "--long", "--trainer-steps", str(steps), f"--junitxml={results}"]
        subprocess.run([*command, *(f"{TESTS}/{test}" for test in tests)], cwd=ROOT, check=False)
        passed: dict[str, bool] = {}
        for case in ElementTree.parse(results).iter("testcase"):
            name = f"{case.get('classname', '').rpartition('.')[2]}.py::{case.get('name', '').partition('[')[0]}"
            passed[name] = passed.get(name, True) and not len(case)
    return {test for test, all_passed in passed.items() if all_passed}


def written(page: str, words: str) -> str:
    """Return the page with other words between its marks."""
    before, after = page[: page.index(BEGIN) + len(BEGIN)], page[page.index(END) :]
    return f"{before}\n\n{words}\n\n{after}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path, help="the page whose table is replaced; printed without it")
    parser.add_argument("--steps", type=int, default=20, help="of the examples")
    options = parser.parse_args()
    failed = failed_tests(options.steps)
    day = f"Run on {datetime.datetime.now(datetime.UTC).date()} on CPU ranks, examples over {options.steps} steps."
    words = f"{day}\n\n{table(failed)}"
    if options.write is None:
        print(words)
    else:
        options.write.write_text(written(options.write.read_text(), words))
    if failed:
        sys.exit(f"failed or skipped: {', '.join(sorted(failed))}")


if __name__ == "__main__":
    main()

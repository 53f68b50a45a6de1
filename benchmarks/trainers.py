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
    """Run all tests of the table and return those with a failed or skipped case."""
    tests = sorted({test for trainer in TRAINERS for test in trainer.tests})
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.xml"
        command = [sys.executable, "-m", "pytest", "-n", "0", "--trainer-steps", str(steps), f"--junitxml={results}"]
        subprocess.run([*command, *(f"{TESTS}/{test}" for test in tests)], cwd=ROOT, check=False)
        passed: dict[str, bool] = {}
        for case in ElementTree.parse(results).iter("testcase"):
            name = f"{case.get('classname', '').rpartition('.')[2]}.py::{case.get('name', '').partition('[')[0]}"
            passed[name] = passed.get(name, True) and not len(case)
    return {test for test in tests if not passed.get(test, False)}


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

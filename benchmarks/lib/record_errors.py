"""Recording of errors found by comparing commands: in src/flexcp/known_errors/errors.json, on the page
docs/results/errors.md and in the README.

All three must agree (tests/docs/test_errors.py), so :func:`record_errors` writes all of them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from textwrap import fill

from flexcp.cost import CostModel
from flexcp.known_errors.entries import FILE, ROWS, KnownError, known_errors
from flexcp.known_errors.words import PAGE, off_words
from simulated import table

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
SURE = re.compile(r"\*\*How sure\*\*: .*?\n\n", re.DOTALL)
WIDTH = 150


def record_errors(found: Iterable[KnownError]) -> None:
    """Add or replace entries, then write the page and the README."""
    entries = known_errors() | {each.key: each for each in found}
    FILE.write_text(json.dumps({key: entries[key].to_json() for key in ROWS if key in entries}, indent=1) + "\n")
    (ROOT / PAGE).write_text(errors_page(entries))
    README.write_text(SURE.sub(lambda _: how_sure() + "\n\n", README.read_text(), count=1))


def errors_page(entries: Mapping[str, KnownError]) -> str:
    """Return the page: a row for every possible comparison, with - for those that have not been run."""
    rows = []
    for key, row in ROWS.items():
        known = entries.get(key)
        cells = [row.kind, f"[{row.words}]({row.page})"]
        if known is None:
            rows.append([*cells, *["-"] * 5, f"`{row.command}`, not run"])
            continue
        e = known.errors
        order = f"{known.right} of {known.pairs}" if known.pairs else ""
        where = f"`{row.command}`, {known.date}" + (f", {known.machine}" if known.machine else "")
        rows.append([*cells, str(e.count), *(f"{x:.1%}" for x in (e.median, e.p90, e.worst)), order, where])
    heads = ["of", "what", "how many", "median", "90th percentile", "worst", "order right", "run"]
    return "\n".join(
        [
            "# How far off predictions are",
            "",
            "**Measured against simulated**: everything that flexcp says about its own errors, on one page. An error "
            "is |predicted / measured - 1|. *Order right* counts the pairs that came out in the right order, among the "
            "pairs that are 10 % apart or more (by prediction in the box, by publication for figures). `flexcp "
            "advise`, `compare`, `simulate` and reports print the row that applies: for the analytic cost model, "
            "published figures whose source states its setting; for a calibrated one, steps of CPU ranks, together "
            "with the calibration's own held-out errors. The numbers are in src/flexcp/known_errors/errors.json, "
            "written on the dates and by the commands in the last column; - marks what has not been run. Nothing here "
            "was measured on a cluster of several machines.",
            "",
            *table(heads, rows),
        ]
    )


def how_sure() -> str:
    """Return the README's paragraph."""
    words = off_words(CostModel()).replace(f"({PAGE})", f"([all errors]({PAGE}))")
    words = f"**How sure**: {words}. Ask for your own documents and [model](docs/commands.md#models):"
    return fill(words, WIDTH, break_long_words=False, break_on_hyphens=False)

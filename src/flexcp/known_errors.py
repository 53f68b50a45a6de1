"""Known errors: how far simulated and modelled times were from what they stand for, in the words that stand beside a predicted time.

``known_errors.json`` beside this file is written by the commands that compare (``make box``, ``make published``, ``make kernel-fit``),
never by hand; :data:`ROWS` says which entries there can be. What has not been run has no entry. docs/results/errors.md is the same as a
page.

Which of them applies to a time (:func:`applicable`): a cost model that nobody fitted to the machine is judged by published figures of
machines it was not fitted to either; one that ``flexcp calibrate`` fitted is judged by steps that were measured after fitting.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flexcp.calibration import Errors
from flexcp.cost import CostModel
from flexcp.io.terminal_text import visible

FILE = Path(__file__).with_suffix(".json")
PAGE = "docs/results/errors.md"


@dataclass(frozen=True)
class Row:
    """What an entry is about, the command that writes it, and the page that has its numbers one by one."""

    kind: str
    words: str
    command: str
    page: str


ROWS: dict[str, Row] = {
    "kernels, analytic": Row(
        "kernels", "attention calls on one H200, analytic cost model", "make kernel-fit", "predictions.md"
    ),
    "kernels, fitted": Row(
        "kernels", "attention calls on one H200 that were not fitted, pairs and row tiles", "make kernel-fit", "predictions.md"
    ),
    "kernels, tiles": Row(
        "kernels", "ranks of plans on one H200 that were not fitted, prices of tiles", "make kernel-fit", "predictions.md"
    ),
    "links, box": Row("links", "messages between CPU ranks that were not fitted", "make box", "box.md"),
    "steps, box at 0.1": Row("steps", "attention steps of CPU ranks, communication 0.1 of compute", "make box", "box.md"),
    "steps, box at 0.5": Row("steps", "attention steps of CPU ranks, communication 0.5 of compute", "make box", "box.md"),
    "steps, box at 1.0": Row("steps", "attention steps of CPU ranks, communication 1.0 of compute", "make box", "box.md"),
    "steps, box": Row("steps", "attention steps of CPU ranks, all loads", "make box", "box.md"),
    "published, stated": Row("published", "published figures whose source states its setting", "make published", "published.md"),
    "published, all": Row("published", "all published figures that were entered", "make published", "published.md"),
    "ratios, stated": Row(
        "published", "ratios of two published figures of one stated setting", "make published", "published.md"
    ),
    "ratios, all": Row("published", "ratios of two published figures of one setting", "make published", "published.md"),
}  # fmt: skip
PLURAL = {"published, stated": "published figures of stated settings", "steps, box": "measured steps of CPU ranks"}
"""What the entries that stand beside predicted times are called there."""


@dataclass(frozen=True)
class KnownError:
    """An entry: errors, when and on what they were found, and of pairs that were apart how many there were and came in the right order."""

    key: str
    errors: Errors
    date: str
    machine: str = ""
    pairs: int | None = None
    right: int | None = None

    @property
    def row(self) -> Row:
        return ROWS[self.key]

    @property
    def spread(self) -> str:
        """Median, 90th percentile and worst, in words."""
        e = self.errors
        median, p90, worst = (f"{100 * x:.0f} %" for x in (e.median, e.p90, e.worst))
        return f"{median} in the median, {p90} at the 90th percentile and {worst} at worst"

    def to_json(self) -> dict[str, Any]:
        """Plain values, those that are there."""
        more = {"machine": self.machine or None, "pairs": self.pairs, "right": self.right}
        return {"date": self.date, **vars(self.errors), **{k: v for k, v in more.items() if v is not None}}


def known_errors(path: Path = FILE) -> dict[str, KnownError]:
    """All entries, in the order of :data:`ROWS`."""
    values: Mapping[str, Mapping[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    found = {}
    for key in ROWS:
        if key in values:
            given = dict(values[key])
            errors = Errors(*(given.pop(name) for name in ("count", "median", "p90", "worst")))
            found[key] = KnownError(key, errors, **given)
    return found


def applicable(cost: CostModel) -> KnownError | None:
    """What is known of times that are simulated with this cost model; None where nothing has been run."""
    return known_errors().get("published, stated" if is_analytic(cost) else "steps, box")


def is_analytic(cost: CostModel) -> bool:
    """Whether nobody fitted this cost model to a machine."""
    return cost.name == CostModel().name


def off_words(cost: CostModel) -> str:
    """How far times that are simulated with this cost model may be off, and where that is from."""
    known = applicable(cost)
    if known is None:
        kind = "the analytic" if is_analytic(cost) else "a fitted"
        return f"how far off times simulated with {kind} cost model are has not been measured ({PAGE})"
    return f"simulated, {known.errors.count} {PLURAL[known.key]} come out off by {known.spread} ({PAGE})"


def order_words() -> str:
    """How far ratios of two simulated times were off, and whether the faster one was; empty where that has not been run."""
    known = known_errors().get("ratios, stated")
    if known is None or not known.pairs:
        return ""
    return (
        f"of {known.pairs} pairs of them that are 10 % apart or more {known.right} come out in the published order, their ratios off by "
        f"{known.spread} ({PAGE})"
    )


def in_a_sentence(words: str) -> str:
    """Words of this module as a sentence of their own."""
    return f"{words[:1].upper()}{words[1:]}."


def error_words(cost: CostModel, held_out: Mapping[str, Errors] | None = None) -> str:
    """How wrong a table made with this model may be, in words that stand beside it."""
    parts = [
        f"{name} {e.median:.1%} (90th percentile {e.p90:.1%}, {e.count} shapes)" for name, e in (held_out or {}).items()
    ]
    fitted = f", median error held out: {'; '.join(parts)}" if parts else ""
    return f"{visible(f'cost model {cost.name}{fitted}')}; {off_words(cost)}"


def error_data(cost: CostModel) -> dict[str, Any] | None:
    """The same for JSON: count, median, 90th percentile and worst of what, and its source."""
    known = applicable(cost)
    if known is None:
        return None
    return {"of": known.row.words, **vars(known.errors), "date": known.date, "source": PAGE}

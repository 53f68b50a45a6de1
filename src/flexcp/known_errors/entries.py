"""The entries of ``errors.json``: errors by what was compared. :data:`ROWS` lists all possible entries."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flexcp.calibration import Errors

FILE = Path(__file__).with_name("errors.json")


@dataclass(frozen=True)
class Row:
    """What an entry of ``errors.json`` is about, in words, and the command that writes it.

    ``kind`` is what was compared: kernels, links, steps or published figures. ``page`` is the file of docs/results with
    the single numbers.
    """

    kind: str
    words: str
    command: str
    page: str


ROWS: dict[str, Row] = {
    "kernels, analytic": Row(
        "kernels", "attention calls on one H200, analytic cost model", "make kernel-fit", "predictions.md"
    ),
    "kernels, fitted": Row(
        "kernels",
        "attention calls on one H200 that were not fitted, documents of a row tile or more, pairs and row tiles",
        "make kernel-fit",
        "predictions.md",
    ),
    "kernels, tiles": Row(
        "kernels",
        "ranks of plans on one H200 that were not fitted, prices of tiles",
        "make kernel-fit",
        "predictions.md",
    ),
    "kernels, analytic, fa4": Row(
        "kernels",
        "attention calls on one H200 with flexcp[fa4], whose kernels are faster, analytic cost model",
        "make kernel-fit",
        "predictions.md",
    ),
    "kernels, fitted, fa4": Row(
        "kernels",
        "attention calls on one H200 with flexcp[fa4] that were not fitted, documents of a row tile or more, pairs and "
        "row tiles",
        "make kernel-fit",
        "predictions.md",
    ),
    "links, box": Row("links", "messages between CPU ranks that were not fitted", "make box", "box.md"),
    "steps, box at 0.1": Row(
        "steps", "attention steps of CPU ranks, communication 0.1 of compute", "make box", "box.md"
    ),
    "steps, box at 0.5": Row(
        "steps", "attention steps of CPU ranks, communication 0.5 of compute", "make box", "box.md"
    ),
    "steps, box at 1.0": Row(
        "steps", "attention steps of CPU ranks, communication 1.0 of compute", "make box", "box.md"
    ),
    "steps, box": Row("steps", "attention steps of CPU ranks, all loads", "make box", "box.md"),
    "published, stated": Row(
        "published", "published figures whose source states its setting", "make published", "published.md"
    ),
    "published, all": Row("published", "all published figures that were entered", "make published", "published.md"),
    "ratios, stated": Row(
        "published", "ratios of two published figures of one stated setting", "make published", "published.md"
    ),
    "ratios, all": Row("published", "ratios of two published figures of one setting", "make published", "published.md"),
}
"""All possible entries of ``errors.json``, by key."""


@dataclass(frozen=True)
class KnownError:
    """One entry of ``errors.json``: how far predictions were off in one comparison with measured or published values.

    ``key`` is the entry's key in :data:`ROWS`, ``errors`` are the relative errors, ``date`` is the day of the
    comparison, and ``machine`` the machine it ran on, if recorded. Some comparisons also check in which order two
    values come: ``pairs`` is then the number of pairs that are about 10 % apart or more (published figures as
    published, measured steps as predicted), and ``right`` how many of them were predicted in the right order.
    Otherwise both are None.
    """

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
        """Median, 90th percentile and worst relative error, in words."""
        e = self.errors
        median, p90, worst = (f"{100 * x:.0f} %" for x in (e.median, e.p90, e.worst))
        return f"{median} in the median, {p90} at the 90th percentile and {worst} at worst"

    def to_json(self) -> dict[str, Any]:
        """Return the entry as JSON values, without fields that are not set."""
        more = {"machine": self.machine or None, "pairs": self.pairs, "right": self.right}
        return {"date": self.date, **vars(self.errors), **{k: v for k, v in more.items() if v is not None}}


def known_errors(path: Path = FILE) -> dict[str, KnownError]:
    """Read all entries of the file, in the order of :data:`ROWS`; a comparison that was never run has none."""
    values: Mapping[str, Mapping[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    found = {}
    for key in ROWS:
        if key in values:
            given = dict(values[key])
            errors = Errors(*(given.pop(name) for name in ("count", "median", "p90", "worst")))
            found[key] = KnownError(key, errors, **given)
    return found

"""Words about errors: which entry applies to a predicted time, and how it is phrased.

An analytic cost model, which was not fitted to any machine, is judged by published figures. A cost model that ``flexcp
calibrate`` fitted is judged by steps that were measured after fitting.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flexcp.calibration import Errors
from flexcp.cost import CostModel
from flexcp.io.terminal_text import visible
from flexcp.known_errors.entries import KnownError, known_errors

PAGE = "docs/results/errors.md"
PLURAL = {"published, stated": "published figures of stated settings", "steps, box": "measured steps of CPU ranks"}
"""Names of the entries that are printed beside predicted times."""


def applicable(cost: CostModel) -> KnownError | None:
    """Return the known error of times simulated with this cost model; None if it has not been measured.

    The analytic model is judged by published figures, a fitted one by measured steps of CPU ranks.
    """
    return known_errors().get("published, stated" if is_analytic(cost) else "steps, box")


def is_analytic(cost: CostModel) -> bool:
    """Return whether this is the analytic cost model, which was not fitted to a machine."""
    return cost.name == CostModel().name


def off_words(cost: CostModel) -> str:
    """Return in words how far times simulated with this cost model may be off, and the page that says so."""
    return f"{_off(cost)} ({PAGE})"


def sure_words(cost: CostModel) -> str:
    """Return the words of :func:`off_words`, and how well ratios of simulated times agree with published ones.

    The second part says how often two simulated times come in the published order, and how far their ratios are off. It
    is left out if that has not been measured.
    """
    known = known_errors().get("ratios, stated")
    if known is None or not known.pairs:
        return off_words(cost)
    return (
        f"{_off(cost)}; of {known.pairs} pairs of published figures that are 10 % apart or more {known.right} come out "
        f"in the published order, their ratios off by {known.spread} ({PAGE})"
    )


def _off(cost: CostModel) -> str:
    known = applicable(cost)
    if known is None:
        kind = "the analytic" if is_analytic(cost) else "a fitted"
        return f"how far off times simulated with {kind} cost model are has not been measured"
    return f"simulated, {known.errors.count} {PLURAL[known.key]} come out off by {known.spread}"


def in_a_sentence(words: str) -> str:
    """Return words of this module as a sentence of their own."""
    return f"{words[:1].upper()}{words[1:]}."


def error_words(cost: CostModel, held_out: Mapping[str, Errors] | None = None) -> str:
    """Return in words how wrong a table made with this cost model may be, to be printed beside the table.

    ``held_out`` are the errors of a calibration on measurements that were not fitted, by what was measured.
    """
    parts = [
        f"{name} {e.median:.1%} (90th percentile {e.p90:.1%}, {e.count} shapes)" for name, e in (held_out or {}).items()
    ]
    fitted = f", median error held out: {'; '.join(parts)}" if parts else ""
    return f"{visible(f'cost model {cost.name}{fitted}')}; {off_words(cost)}"


def error_data(cost: CostModel) -> dict[str, Any] | None:
    """Return the known error of a cost model as JSON values, or None if it has not been measured.

    The values are what was compared, count, median, 90th percentile, worst, date and source.
    """
    known = applicable(cost)
    if known is None:
        return None
    return {"of": known.row.words, **vars(known.errors), "date": known.date, "source": PAGE}

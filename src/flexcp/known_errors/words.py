"""Words about errors: which entry applies to a predicted time, and what it says.

A cost model that nobody fitted to the machine is judged by published figures of machines it was not fitted to either;
one that ``flexcp calibrate`` fitted is judged by steps that were measured after fitting.
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
"""What the entries that stand beside predicted times are called there."""


def applicable(cost: CostModel) -> KnownError | None:
    """What is known of times that are simulated with this cost model; None where nothing has been run."""
    return known_errors().get("published, stated" if is_analytic(cost) else "steps, box")


def is_analytic(cost: CostModel) -> bool:
    """Whether nobody fitted this cost model to a machine."""
    return cost.name == CostModel().name


def off_words(cost: CostModel) -> str:
    """How far times that are simulated with this cost model may be off, and where that is from."""
    return f"{_off(cost)} ({PAGE})"


def sure_words(cost: CostModel) -> str:
    """The same, and how far ratios of two simulated times were off and whether the faster one was,
    where that has been run.
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

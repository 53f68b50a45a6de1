"""Strategies side by side: a picture of their predicted times, and the table of the same.

A new column needs a field of :class:`StrategyTime`, and a header and a cell in :func:`strategies_section`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flexcp.report.markup import Cell, figure, folded, table
from flexcp.report.sections import KEYS, Section


@dataclass(frozen=True)
class StrategyTime:
    """Predicted nanoseconds of a strategy's step on its slowest rank; ``mark`` is a remark shown in the table.

    ``exposed_ns`` is time spent waiting, ``linear_ns`` everything but attention and waiting, and ``bytes`` are those
    that a layer moves. ``compute_imbalance`` is the most work of a rank divided by the mean.
    """

    name: str
    attention_ns: int
    exposed_ns: int
    linear_ns: int
    bytes: int
    compute_imbalance: float
    mark: str = ""

    @property
    def total_ns(self) -> int:
        return self.attention_ns + self.exposed_ns + self.linear_ns


def strategies_section(
    strategies: Sequence[StrategyTime], says: str, title: str = "Strategies side by side", of: str = "step"
) -> Section:
    """Return a section with the predicted times of strategies, the fastest first; ``says`` is its caption.

    ``of`` names what the times are of: a step, a pass, attention.
    """
    ordered = sorted(strategies, key=lambda s: s.total_ns)
    best = ordered[0]
    rows: list[list[Cell]] = [
        [
            s.name,
            round(s.total_ns / 1e6, 3),
            round(s.total_ns / best.total_ns, 3),
            round(s.attention_ns / 1e6, 3),
            round(s.exposed_ns / 1e6, 3),
            round(s.linear_ns / 1e6, 3),
            s.bytes,
            round(s.compute_imbalance, 3),
            s.mark,
        ]
        for s in ordered
    ]
    headers = [
        "strategy",
        f"{of} ms",
        "x fastest",
        "attention ms",
        "waiting ms",
        "rest ms",
        "bytes a layer",
        "imbalance",
        "remark",
    ]
    slowest = ordered[-1]
    first, last = (f"{row.total_ns / 1e6:.2f} ms" for row in (best, slowest))
    shown = f"{best.name} is fastest with {first}, {slowest.name} slowest with {last}."

    def body(number: int) -> str:
        return figure(
            "strategies",
            number,
            title=f"Predicted {of} time",
            says=shown,
            caption=says,
            behind=KEYS + folded("As a table", table(headers, rows, title)),
            zoom=False,
        )

    times = {"attention": "attention_ns", "exposed": "exposed_ns", "linear": "linear_ns"}
    data = {
        "names": [s.name for s in ordered],
        "marks": [s.mark for s in ordered],
        "time": {kind: [getattr(s, field) for s in ordered] for kind, field in times.items()},
    }
    return Section(title, body, data)

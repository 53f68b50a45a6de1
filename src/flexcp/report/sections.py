"""The parts a report is made of. A section is a title, words and tables as HTML, and the numbers its pictures are drawn from.

Everything a command can tell becomes one of these: words (:func:`words_section`), code to copy (:func:`code_section`), strategies side by
side (:func:`strategies_section`), lines over steps (:func:`lines_section`), and plans (:func:`flexcp.report.plan_section.plan_section`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from flexcp.report.markup import Cell, figure, folded, paragraphs, table, tiles


@dataclass(frozen=True)
class Section:
    """``body(number)`` is the HTML under the title, given the section's number on the page; ``data`` goes to its pictures as JSON."""

    title: str
    body: Callable[[int], str]
    data: Mapping[str, Any]


@dataclass(frozen=True)
class StrategyTime:
    """A strategy's predicted step, in nanoseconds of its slowest rank; ``mark`` says what is special about it."""

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


KEYS = '<p class="tools">{}</p>'.format(
    "".join(
        f'<span class="key"><i style="background:var(--{kind})"></i>{text}</span>'
        for kind, text in (("attention", "attention"), ("exposed", "waiting for others"), ("linear", "other layers"))
    )
)
"""What the colours of time mean."""


def words_section(title: str, texts: Sequence[str], figures: Sequence[tuple[str, str]] = ()) -> Section:
    """Plain words, with key figures below them."""
    return Section(title, lambda _: paragraphs(texts) + (tiles(figures) if figures else ""), {})


def code_section(title: str, blocks: Sequence[tuple[str, str]]) -> Section:
    """(what it is for, code) pairs."""
    inside = "".join(
        f'<h3>{escape(name)}</h3><pre tabindex="0"><code>{escape(code)}</code></pre>' for name, code in blocks
    )
    return Section(title, lambda _: f'<div class="words">{inside}</div>', {})


def table_section(
    title: str, headers: Sequence[str], rows: Sequence[Sequence[str | int | float]], says: str
) -> Section:
    """A table alone."""
    return Section(title, lambda _: paragraphs([says]) + table(headers, rows, title), {})


def strategies_section(
    strategies: Sequence[StrategyTime], says: str, title: str = "Strategies side by side", of: str = "step"
) -> Section:
    """Predicted time of strategies, the fastest first; ``of`` says what the times are of: a step, a pass, attention."""
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
        "other layers ms",
        "bytes a layer",
        "imbalance",
        "remark",
    ]
    slowest = ordered[-1]
    shown = f"{best.name} is fastest with {best.total_ns / 1e6:.2f} ms, {slowest.name} slowest with {slowest.total_ns / 1e6:.2f} ms."

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


def lines_section(
    title: str, steps: Sequence[int], series: Mapping[str, Sequence[float]], says: str, unit: str = "step"
) -> Section:
    """Values over steps, a line for each name."""
    for name, values in series.items():
        if len(values) != len(steps):
            raise ValueError(f"line {name!r} has {len(values)} values for {len(steps)} steps")
    rows = [[int(step), *(float(values[i]) for values in series.values())] for i, step in enumerate(steps)]
    ends = "; ".join(
        f"{name} from {values[0]:.4g} to {values[-1]:.4g}" for name, values in series.items() if len(values)
    )

    def body(number: int) -> str:
        behind = folded("As a table", table([unit, *series], rows, title))
        return figure("lines", number, title=title, says=ends, caption=says, behind=behind)

    data = {"x": list(steps), "unit": unit, "series": [{"name": n, "values": list(v)} for n, v in series.items()]}
    return Section(title, body, data)

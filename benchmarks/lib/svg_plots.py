"""Parts of plots as SVG text: axes, marks and legends, in a light and in a dark theme.

A plot is a list of such parts, wrapped by :func:`picture`. Numbers are written with one decimal, so the same data gives
the same bytes on every machine. Series differ in shape as well as in colour.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape


@dataclass(frozen=True)
class Theme:
    """Colours of a plot; ``series`` are those of the first, second, ... series."""

    name: str
    background: str
    text: str
    faint: str
    grid: str
    series: tuple[str, ...]


THEMES = (
    Theme("light", "#ffffff", "#1f2937", "#6b7280", "#e5e7eb", ("#2563eb", "#ea580c", "#6b7280", "#059669")),
    Theme("dark", "#111827", "#f3f4f6", "#9ca3af", "#374151", ("#60a5fa", "#fb923c", "#9ca3af", "#34d399")),
)
SHAPES = ("circle", "square", "diamond", "triangle")


@dataclass(frozen=True)
class Scale:
    """Where values from ``low`` to ``high`` lie between the coordinates ``begin`` and ``end``."""

    low: float
    high: float
    begin: float
    end: float
    log: bool = False

    def at(self, value: float) -> float:
        """Return the coordinate of a value."""
        low, high, value = (math.log(x) if self.log else x for x in (self.low, self.high, value))
        return self.begin + (self.end - self.begin) * (value - low) / (high - low)


def text(x: float, y: float, words: str, colour: str, anchor: str = "start", weight: str = "normal") -> str:
    """Return a line of text; ``anchor`` says which end of it is at ``x``."""
    style = f'fill="{colour}" text-anchor="{anchor}"' + ("" if weight == "normal" else f' font-weight="{weight}"')
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(words)}</text>'


def line(points: Iterable[tuple[float, float]], colour: str, width: float = 1.0, dash: str = "") -> str:
    """Return a line through points."""
    through = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<polyline points="{through}" fill="none" stroke="{colour}" stroke-width="{width:g}"{dashed}/>'


def mark(shape: str, x: float, y: float, colour: str, size: float = 5.0, opacity: float = 1.0) -> str:
    """Return a mark with its centre at a point; ``size`` is half its width."""
    style = f'fill="{colour}"' + ("" if opacity == 1.0 else f' fill-opacity="{opacity:g}"')
    if shape == "circle":
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{size:.1f}" {style}/>'
    if shape == "square":
        side = 1.8 * size
        corner = f'x="{x - side / 2:.1f}" y="{y - side / 2:.1f}"'
        return f'<rect {corner} width="{side:.1f}" height="{side:.1f}" {style}/>'
    corners = {"diamond": ((0, -1.2), (1.2, 0), (0, 1.2), (-1.2, 0)), "triangle": ((0, -1.1), (1.1, 0.9), (-1.1, 0.9))}
    points = " ".join(f"{x + size * dx:.1f},{y + size * dy:.1f}" for dx, dy in corners[shape])
    return f'<polygon points="{points}" {style}/>'


def columns(scale: Scale, ticks: Sequence[float], top: float, bottom: float, theme: Theme, form: str = "{:g}") -> str:
    """Return vertical grid lines at ``ticks``, with their values below."""
    parts = []
    for tick in ticks:
        x = scale.at(tick)
        parts.append(line([(x, top), (x, bottom)], theme.grid))
        parts.append(text(x, bottom + 18, form.format(tick), theme.faint, "middle"))
    return "\n".join(parts)


def rows(scale: Scale, ticks: Sequence[float], left: float, right: float, theme: Theme, form: str = "{:g}") -> str:
    """Return horizontal grid lines at ``ticks``, with their values on the left."""
    parts = []
    for tick in ticks:
        y = scale.at(tick)
        parts.append(line([(left, y), (right, y)], theme.grid))
        parts.append(text(left - 8, y + 4, form.format(tick), theme.faint, "end"))
    return "\n".join(parts)


def legend(names: Sequence[str], x: float, y: float, theme: Theme) -> str:
    """Return the names of series on one line, each behind its mark."""
    parts = []
    for name, shape, colour in zip(names, SHAPES, theme.series, strict=False):
        parts += [mark(shape, x + 5, y - 4, colour), text(x + 16, y, name, theme.text)]
        x += 42 + 5.7 * len(name)
    return "\n".join(parts)


def picture(width: int, height: int, title: str, parts: Iterable[str], theme: Theme) -> str:
    """Return a whole SVG file; ``title`` is drawn at its top and read out by screen readers."""
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" font-family="sans-serif" font-size="12">\n'
        f"<title>{escape(title)}</title>\n"
        f'<rect width="{width}" height="{height}" rx="6" fill="{theme.background}"/>\n'
        f"{text(16, 26, title, theme.text, weight='bold')}\n{body}\n</svg>\n"
    )

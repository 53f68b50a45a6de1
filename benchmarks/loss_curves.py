"""A picture of the losses that ``model_gpu.py`` wrote: every run's curve,
and below it its difference from the baseline.

    python benchmarks/loss_curves.py benchmarks/model_gpu.json --write docs/pictures/losses.svg

The least and the largest value are written at each panel's axis.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

WIDTH, HEIGHT, LEFT = 760, 190, 64
COLOURS = ("#2563eb", "#ea580c", "#9ca3af")


def panel(runs: dict[str, Sequence[float]], top: int, title: str, form: str) -> str:
    """Return one panel: a polyline per run, with the least and the largest value at the axis."""
    low, high = min(min(run) for run in runs.values()), max(max(run) for run in runs.values())
    steps = len(next(iter(runs.values()))) - 1
    parts = [f'<text x="{LEFT}" y="{top - 8}" font-weight="bold">{title}</text>']
    for value in (low, high):
        y = top + HEIGHT * (high - value) / (high - low)
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:{form}}</text>')
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="#d1d5db"/>')
    for colour, run in zip(COLOURS, runs.values(), strict=False):
        points = " ".join(
            f"{LEFT + (WIDTH - LEFT) * i / steps:.1f},{top + HEIGHT * (high - v) / (high - low):.1f}"
            for i, v in enumerate(run)
        )
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.2"/>')
    return "\n".join(parts)


def picture(losses: dict[str, list[float]], base: str) -> str:
    """Return the SVG of all runs; ``base`` is the run that others are compared with."""
    apart = {name: [100 * (a / b - 1) for a, b in zip(run, losses[base], strict=True)] for name, run in losses.items()}
    legend = "".join(
        f'<text x="{LEFT + 150 * i}" y="{2 * HEIGHT + 112}" fill="{colour}">{name}</text>'
        for i, (name, colour) in enumerate(zip(losses, COLOURS, strict=False))
    )
    above = panel(losses, 34, "loss", ".2f")
    below = panel(apart, HEIGHT + 84, f"percent from {base}", "+.2f")
    size = f'width="{WIDTH + 16}" height="{2 * HEIGHT + 124}"'
    style = 'font-family="sans-serif" font-size="12" fill="#6b7280"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>\n{above}\n{below}\n{legend}\n</svg>\n'


def main() -> None:
    """Draw the losses of a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measured", type=Path)
    parser.add_argument("--write", type=Path, required=True)
    asked = parser.parse_args()
    losses = json.loads(asked.measured.read_text())["losses"]["losses"]
    asked.write.write_text(picture(losses, "sdpa"))


if __name__ == "__main__":
    main()

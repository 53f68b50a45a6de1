"""The main results as pictures, drawn from the tables of the pages of results, each for light and for dark pages.

    python benchmarks/pictures.py --write docs/pictures        # make pictures

Nothing is measured or simulated here: every number is one of a table in docs/results, which the command named on that
page wrote. Run this after one of those pages changed; a test compares the pictures with the pages.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from lib.svg_plots import SHAPES, THEMES, Scale, Theme, columns, legend, line, mark, picture, rows, text

RESULTS = Path(__file__).parents[1] / "docs" / "results"
WIDTH = 860
Row = Mapping[str, str]


def table(page: str, *headers: str) -> list[Row]:
    """Return the rows of the first table on a page whose header begins with these cells, by column."""
    lines = page.splitlines()
    begin = "| " + " | ".join(headers) + " |"
    for number, found in enumerate(lines):
        if found.startswith(begin):
            names = _cells(found)
            body = lines[number + 2 :]
            end = next((n for n, row in enumerate(body) if not row.startswith("|")), len(body))
            return [dict(zip(names, _cells(row), strict=True)) for row in body[:end]]
    raise ValueError(f"no table begins with the columns {', '.join(headers)}; was its page written by another version?")


def _cells(row: str) -> list[str]:
    return [cell.strip() for cell in row.strip().strip("|").split("|")]


def by_regime(page: str, theme: Theme) -> str:
    """Draw the gains of ``auto`` by regime: the range over batches, the mean, and the gain over one fixed method."""
    found = table(page, "regime", "batches")
    left, top, step = 440, 66, 30
    bottom = top + step * len(found)
    scale = Scale(0.9, 2.3, left, WIDTH - 60)
    parts = [columns(scale, [1.0, 1.25, 1.5, 1.75, 2.0, 2.25], top, bottom, theme)]
    parts.append(line([(scale.at(1.0), top), (scale.at(1.0), bottom)], theme.faint, 1.5))
    for number, row in enumerate(found):
        y = top + step * (number + 0.5)
        mean, worst, best, fixed = (
            float(row[name])
            for name in (
                "gain over static of the batch, by tokens",
                "worst",
                "best",
                "fixed for the run, by tokens",
            )
        )
        words = re.sub(r" \((multi-query|llama3).*?\)", "", row["regime"])
        parts.append(text(left - 12, y + 4, words, theme.text, "end"))
        parts.append(line([(scale.at(worst), y), (scale.at(best), y)], theme.series[2], 4))
        parts.append(mark("square", scale.at(fixed), y, theme.series[1]))
        parts.append(mark("circle", scale.at(mean), y, theme.series[0], 6))
        parts.append(text(WIDTH - 16, y + 4, f"{mean:.2f}", theme.text, "end"))
    parts.append(
        legend(["mean over the best static of each batch", "mean over one static method for all"], 16, 50, theme)
    )
    parts.append(text(WIDTH - 16, 50, "grey: worst to best batch", theme.faint, "end"))
    title = "Simulated speed of auto over static methods, by regime (1 is as fast)"
    return picture(WIDTH, bottom + 32, title, parts, theme)


CONTENDERS = ("flexcp", "FlashAttention-4", "cuDNN", "FlexAttention, its faster backend")
_COLUMNS = (("op",), ("FlashAttention-4",), ("cuDNN",), ("FlexAttention", "FlexAttention, FlashAttention-4 backend"))


def kernels(page: str, theme: Theme) -> str:
    """Draw TFLOP/s of attention on one H200, forward and backward, for each kind of work."""
    found = table(page, "tokens", "work", "cute", "op", "FlashAttention-4") + table(
        page, "tokens", "work", "cute", "op", "FlexAttention"
    )
    left, top, step, wide = 210, 84, 26, 300
    bottom = top + step * len(found)
    parts = [legend(CONTENDERS, 16, 50, theme)]
    for number, row in enumerate(found):
        words = f"{row['work']}, {int(row['tokens'].replace(',', '')) // 1024}k"
        parts.append(text(left - 12, top + step * (number + 0.5) + 4, words, theme.text, "end"))
    for side, direction in enumerate(("forward", "backward")):
        begin = left + side * (wide + 20)
        scale = Scale(0, 700, begin, begin + wide)
        parts.append(text(begin, top - 8, f"{direction}, TFLOP/s", theme.faint))
        parts.append(columns(scale, [0, 200, 400, 600], top, bottom, theme))
        for number, row in enumerate(found):
            y = top + step * (number + 0.5)
            rates = [[_rate(row.get(name, "-"), side) for name in names] for names in _COLUMNS]
            best = [max(r for r in each if r is not None) if any(each) else None for each in rates]
            known = [rate for rate in best if rate is not None]
            parts.append(line([(scale.at(min(known)), y), (scale.at(max(known)), y)], theme.grid, 3))
            for rate, shape, colour in reversed(list(zip(best, SHAPES, theme.series, strict=True))):
                if rate is not None:
                    parts.append(mark(shape, scale.at(rate), y, colour))
    title = "Measured attention rates on one H200, bf16, 32 query and 8 KV heads of 128"
    return picture(WIDTH, bottom + 32, title, parts, theme)


def _rate(cell: str, side: int) -> float | None:
    """Return the forward or backward rate of a cell such as ``560 / 478``, None for ``-``."""
    return float(cell.split(" / ")[side]) if "/" in cell else None


def planning(page: str, theme: Theme) -> str:
    """Draw planning time against the number of ranks, both logarithmic."""
    found = table(page, "ranks", "documents", "transfers", "blocks ms", "auto ms")
    left, right, top, bottom = 84, WIDTH - 130, 66, 330
    ranks = [float(row["ranks"]) for row in found]
    across = Scale(ranks[0], ranks[-1], left, right, log=True)
    up = Scale(3, 2000, bottom, top, log=True)
    parts = [columns(across, ranks, top, bottom, theme), rows(up, [3, 10, 30, 100, 300, 1000], left, right, theme)]
    for name, shape, colour in zip(("auto", "blocks"), SHAPES, theme.series, strict=False):
        points = [(across.at(float(row["ranks"])), up.at(float(row[f"{name} ms"]))) for row in found]
        parts.append(line(points, colour, 2))
        parts += [mark(shape, x, y, colour) for x, y in points]
        parts.append(
            text(right + 12, points[-1][1] + 4, f"{name}: {float(found[-1][f'{name} ms']):,.0f} ms", theme.text)
        )
    parts.append(text(left, top - 12, "milliseconds a batch, one core", theme.faint))
    parts.append(text((left + right) / 2, bottom + 40, "ranks, each with 32K tokens", theme.faint, "middle"))
    return picture(WIDTH, bottom + 56, "Measured planning time by ranks, documents of up to 256K tokens", parts, theme)


def predictions(pages: Mapping[str, str], theme: Theme) -> str:
    """Draw predicted against measured steps of CPU ranks, and simulated against published figures of others."""
    steps = [
        (float(row["measured ms"]), float(row["predicted ms"]))
        for row in table(pages["box"], "batch", "load", "strategy")
    ]
    published = [
        (float(row["published"].split()[0].replace(",", "")), float(row["simulated"].replace(",", "")), row["setting"])
        for row in counted(pages["published"])
    ]
    parts = _diagonal(84, [(a, b, 0) for a, b in steps], (1000, 2000, 5000, 10000), "ms", theme)
    parts.append(text(84, 66, f"{len(steps)} steps of 4 CPU ranks, measured", theme.text))
    shown = [(a, b, 0 if setting.startswith("stated") else 1) for a, b, setting in published]
    parts += _diagonal(504, shown, (0.1, 1, 10, 100, 1000), "in the unit of the figure", theme)
    parts.append(text(504, 66, f"{len(published)} figures that others published", theme.text))
    parts.append(legend(["setting stated (left: every step)", "something left open"], 16, 46, theme))
    parts.append(text(WIDTH - 16, 46, "dashed: 10 % off", theme.faint, "end"))
    return picture(
        WIDTH,
        460,
        "Predicted (upwards) against measured (to the right); on the line, predictions are right",
        parts,
        theme,
    )


def counted(page: str) -> list[Row]:
    """Return the published figures that errors are stated of; others are simulated again with other planners."""
    return [row for row in table(page, "line", "system", "cluster") if "not counted" not in row["setting"]]


def _diagonal(
    left: float, points: list[tuple[float, float, int]], ticks: tuple[float, ...], unit: str, theme: Theme
) -> list[str]:
    """Return a square plot of predictions over what was measured, with the line on which they are equal."""
    side, top = 320.0, 84.0
    values = [value for point in points for value in point[:2]]
    low, high = min(values) / 1.2, max(values) * 1.2
    across, up = Scale(low, high, left, left + side, log=True), Scale(low, high, top + side, top, log=True)
    seen = [tick for tick in ticks if low <= tick <= high]
    parts = [
        columns(across, seen, top, top + side, theme, "{:,g}"),
        rows(up, seen, left, left + side, theme, "{:,g}"),
    ]
    for off, dash in ((1.0, ""), (1.1, "4 3"), (1 / 1.1, "4 3")):
        ends = [(x, x * off) for x in (max(low, low / off), min(high, high / off))]
        parts.append(line([(across.at(x), up.at(y)) for x, y in ends], theme.faint, 1, dash))
    for measured, predicted, series in points:
        parts.append(mark(SHAPES[series], across.at(measured), up.at(predicted), theme.series[series], 3.2, 0.7))
    parts.append(text(left + side / 2, top + side + 36, f"measured or published, {unit}", theme.faint, "middle"))
    return parts


def drawn() -> dict[str, str]:
    """Return every picture as SVG, by its file name."""
    pages = {page.stem: page.read_text() for page in RESULTS.glob("*.md")}
    plots: dict[str, Callable[[Theme], str]] = {
        "regimes": lambda theme: by_regime(pages["regimes"], theme),
        "kernels": lambda theme: kernels(pages["kernels"], theme),
        "planning": lambda theme: planning(pages["planning"], theme),
        "predictions": lambda theme: predictions(pages, theme),
    }
    return {f"{name}-{theme.name}.svg": plot(theme) for name, plot in plots.items() for theme in THEMES}


def main() -> None:
    """Write all pictures to a folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, required=True, help="the folder, docs/pictures")
    folder = parser.parse_args().write
    for name, svg in drawn().items():
        (folder / name).write_text(svg)
        print(folder / name)


if __name__ == "__main__":
    main()

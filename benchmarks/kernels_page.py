"""Writes measured rows into the tables of docs/results/kernels.md that have a marker of their own.

    python benchmarks/kernels_page.py --date 2026-11-18 --gpu gpu.json --ways ways.json

``gpu.json`` is what ``benchmarks/gpu.py --write`` writes (its parts ``bench`` and ``plans`` are used), ``ways.json``
what ``benchmarks/fa4_ways.py --write`` does. A row with the same first two columns is replaced, a new one is added at
the end, and the others stay: the last column is the day on which a row was measured. A table stands between
``<!-- measured: NAME -->`` and ``<!-- end -->``.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parent.parent / "docs/results/kernels.md"
WORK = {
    "causal": "causal",
    "full": "full",
    "window": "window 4,096",
    "docs16": "16 random documents",
    "docs64": "64 random documents",
    "lambda": "lambda 64 + 4,096",
    "question": "shared question",
    "blockwise": "causal blockwise",
}
CONTENDERS = {"dense": ("cute", "op", "fa4", "cudnn"), "masks": ("cute", "op", "flex", "flexfa4", "fa4")}
Rows = dict[str, list[list[str]]]


def main() -> None:
    """Write the rows of the given files into the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--date", required=True, help="the day of the measurements")
    parser.add_argument("--gpu", type=Path)
    parser.add_argument("--ways", type=Path)
    parser.add_argument("--page", type=Path, default=PAGE)
    asked = parser.parse_args()
    rows: Rows = {}
    if asked.gpu:
        found = json.loads(asked.gpu.read_text())
        rows |= bench_rows(found.get("bench", [])) | {"plans": [plans_row(x) for x in found.get("plans", [])]}
    if asked.ways:
        found = json.loads(asked.ways.read_text())
        rows["ways"] = [ways_row(x) for x in found if "ranks" in x]
        rows["block lists"] = [block_lists_row(x) for x in found if "ranks" not in x]
    asked.page.write_text(filled(asked.page.read_text(), rows, asked.date))


def plans_row(x: dict[str, Any]) -> list[str]:
    """Return a row of work lists of real plans, from the part ``plans`` of gpu.py."""
    return [
        x["data"],
        str(x["ranks"]),
        f"{x['forward share']:.3f}",
        f"{x['backward share']:.3f}",
        _both(x["forward"], x["backward"]),
        _both(x["dense forward"], x["dense backward"]),
    ]


def ways_row(x: dict[str, Any]) -> list[str]:
    """Return a row of plans' lists beside FlashAttention-4, from fa4_ways.py."""
    forward, backward = x["forward"], x["backward"]
    return [
        x["work"],
        str(x["ranks"]),
        _both(forward["ours"], backward["ours"]),
        *(_both(forward[name], backward[name]) for name in ("blocks", "blocks merged")),
        *(f"{forward[name]:.0f}" for name in ("varlen", "varlen merged")),
        *(_both(x[f"forward {name}"], x[f"backward {name}"], 2) for name in ("ratio", "ratio merged")),
    ]


def block_lists_row(x: dict[str, Any]) -> list[str]:
    """Return a row of a mask beside FlashAttention-4's block lists, from fa4_ways.py."""
    rates = {who: (x["forward"][who], x["backward"][who]) for who in ("ours", "blocks")}
    ratio = [a / b for a, b in zip(rates["ours"], rates["blocks"], strict=True)]
    return ["16,384", WORK[x["work"]], _both(*rates["ours"]), _both(*rates["blocks"]), _both(*ratio, digits=2)]


def bench_rows(results: list[dict[str, Any]]) -> Rows:
    """Return the rows of the op's tables, from the part ``bench`` of gpu.py."""
    work: dict[tuple[int, str], dict[str, Any]] = {}
    for x in results:
        if "contender" in x:
            work.setdefault((x["tokens"], x["workload"]), {})[x["contender"]] = x
    rows: Rows = {"dense": [], "masks": []}
    for (tokens, name), found in work.items():
        table = "masks" if "flex" in found else "dense"
        cells = ["-" if found[who]["forward"] is None else _rates(found[who]) for who in CONTENDERS[table]]
        others = [found[who] for who in CONTENDERS[table][2:] if found[who]["forward"] is not None]
        ratio = [found["op"][way] / max(x[way] for x in others) for way in ("forward", "backward")]
        rows[table].append([f"{tokens:,}", WORK[name], *cells, _both(*ratio, digits=2)])
    return rows


def filled(page: str, rows: Rows, date: str) -> str:
    """Return the page with these rows in its tables; raise ValueError if it lacks the table of some rows."""
    for name, new in rows.items():
        if not new:
            continue
        begin, end = f"<!-- measured: {name} -->\n", "<!-- end -->"
        if begin not in page:
            raise ValueError(f"the page has no table with the marker {begin.strip()!r}")
        before, rest = page.split(begin)
        table, after = rest.split(end, 1)
        page = before + begin + _table(table, [[*row, date] for row in new]) + end + after
    return page


def _table(table: str, new: list[list[str]]) -> str:
    """Return a table with rows replaced or added."""
    lines = [line for line in table.splitlines() if line]
    columns = lines[0].count("|") - 1
    rows = {tuple(_cells(line)[:2]): line for line in lines[2:]}
    for row in new:
        if len(row) != columns:
            raise ValueError(f"a row of {len(row)} cells does not fit a table of {columns}: {row}")
        rows[row[0], row[1]] = f"| {' | '.join(row)} |"
    return "\n".join([*lines[:2], *rows.values()]) + "\n"


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def _rates(x: dict[str, Any]) -> str:
    return _both(x["forward"], x["backward"])


def _both(forward: float, backward: float, digits: int = 0) -> str:
    return f"{forward:.{digits}f} / {backward:.{digits}f}"


if __name__ == "__main__":
    main()

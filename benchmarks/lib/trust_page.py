"""Trust, page: write the tables of docs/trust.md from the files that ``benchmarks/trust_gpu.py`` wrote.

The tables are placed between two comments in the page, ``BEGIN`` and ``END``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lib.trust_ranks import Row

PAGE = Path(__file__).parents[2] / "docs/trust.md"
BEGIN, END = "<!-- on a GPU -->\n", "<!-- end of on a GPU -->\n"
TITLES = {
    "memory": "Memory of a layer: `plan.memory(rank).total` beside the allocator's peak. Outside the allocator NCCL "
    "takes, over all ranks together, a communicator and buffers of its peers.",
    "telemetry": "Telemetry: milliseconds of a layer, forward and backward, without and with it, in turns.",
    "soak": "Soak: what a rank holds once it has settled / at the end.",
    "nccl": "What was only written for NCCL.",
    "numbers": "Numbers: the largest error against float64, of flexcp's kernel and of torch's own attention on one "
    "device.",
}
"""The text above the table of each part."""


def write_page(runs: list[dict[str, Any]], machine: str) -> None:
    """Write the tables of these runs into the page; if several runs have a part, the last one counts."""
    PAGE.write_text(with_tables(PAGE.read_text(), tables(runs, machine)))


def with_tables(page: str, made: str) -> str:
    """Return the page with its tables replaced; raise ValueError if it has no place for them."""
    before, _, rest = page.partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        raise ValueError(f"the page has no {BEGIN.strip()} ... {END.strip()}")
    return f"{before}{BEGIN}\n{made}\n{END}{after}"


def tables(runs: list[dict[str, Any]], machine: str) -> str:
    """Return the text of all tables, one for each part that was run."""
    parts = {name: part for run in runs for name, part in run["parts"].items()}
    lines = [f"**Measured** on {machine}, by `python benchmarks/trust_gpu.py`; ranks share the one GPU."]
    for name, title in TITLES.items():
        if name in parts:
            lines += ["", title, "", *_table(name, parts[name]["rows"])]
    return "\n".join(lines) + "\n"


def _table(name: str, rows: list[Row]) -> list[str]:
    """Return the lines of the table of one part."""
    cells = [_CELLS[name](row) | {"": _verdict(row)} for row in rows]
    names = max(cells, key=len, default={})
    head = [f"| {' | '.join(names)} |", f"|{' --- |' * len(names)}"]
    return head + [f"| {' | '.join(str(cell.get(column, '')) for column in names)} |" for cell in cells]


def _verdict(row: Row) -> str:
    """Return the cell that says whether a row is as it should be, and why not."""
    words = {True: "as it should be", False: "**not**", None: ""}[row.get("ok")]
    why = str(row.get("why") or "").replace("|", "/").replace("\n", " ")
    return f"{words}: {why[-200:]}" if why else words


def _memory(row: Row) -> dict[str, str]:
    """Return the cells of a row of the memory part."""
    found = {"case": row["what"], "ranks": str(row.get("ranks", ""))}
    if "cap" in row:
        what = f"{row['batches']} changing batches, at most {_mb(row['largest predicted'])} MB of {_mb(row['cap'])}"
        return found | {"case": what}
    if "predicted" not in row:
        return found
    off = "" if row["off"] is None else f"{100 * row['off']:+.1f} %"
    return found | {
        "tokens a rank": f"{row['tokens']:,}",
        "kernel": row["kernel"],
        "predicted MB": _mb(row["predicted"]),
        "peak MB": _mb(row["peak"]),
        "off": off,
        "tables MB, predicted": f"{_mb(row['tables'])}, {_mb(row['tables predicted'])}",
        "communicators, peers MB": f"{_mb(row['communicators'])}, {_mb(row['peer buffers'])}",
    }


def _telemetry(row: Row) -> dict[str, str]:
    """Return the cells of a row of the telemetry part."""
    found = {"batch": row["what"], "ranks": str(row.get("ranks", ""))}
    if "ratio" not in row:
        return found
    return found | {
        "layers": str(row["layers"]),
        "without, with": f"{row['ms without']:.3f}, {row['ms with']:.3f}",
        "cost": f"{100 * (row['ratio'] - 1):+.2f} %",
        "stamps alone": f"{row['us of stamps']:.0f} us, {100 * row['share of stamps']:.2f} %",
    }


def _soak(row: Row) -> dict[str, str]:
    """Return the cells of a row of the soak part."""
    found = {"rank": row["what"]}
    if "before" not in row:
        return found
    a, b = row["before"], row["after"]
    memory = {
        f"{name} MB": f"{_mb(a[key])} / {_mb(b[key])}"
        for name, key in (("resident", "resident"), ("allocated", "allocated"), ("reserved", "reserved"))
    }
    counts = {name: f"{a[name]} / {b[name]}" for name in ("threads", "files", "sockets", "shared")}
    return found | {"steps": f"{row['settled']:,} / {row['steps']:,}"} | memory | counts


def _nccl(row: Row) -> dict[str, str]:
    """Return the cells of a row of the NCCL part."""
    return {"what": row["what"], "ranks": str(row.get("ranks", "")), "seen": str(row.get("seen", ""))}


def _numbers(row: Row) -> dict[str, str]:
    """Return the cells of a row of the numbers part."""
    found = {"case": row["what"]}
    errors = {name: f"{pair[0]:.1e}, {pair[1]:.1e}" for name, pair in row.get("errors", {}).items()}
    return found | {"dtype": row.get("dtype", "")} | errors


def _mb(size: int | None) -> str:
    """Return bytes as text in megabytes, empty for None."""
    return "" if size is None else f"{size / 1e6:,.1f}"


_CELLS = {"memory": _memory, "telemetry": _telemetry, "soak": _soak, "nccl": _nccl, "numbers": _numbers}

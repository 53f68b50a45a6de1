"""The three papers figure by figure: theirs, ours with their planner, ours with ``auto``: ``make papers`` writes docs/results/papers.md.

Under an hour on two cores; ``--quick`` draws fewer batches and sizes. Settings are those of ``dcp.py``, ``block_fcp.py`` and
``flexible_groups.py`` in this folder, whose heads say how they differ from the papers'.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

from rich.console import Console

import papers_dcp
import papers_dhp
import papers_fcp
from papers_rows import SAME, Row
from simulated import table

HEADS = ["figure", "what", "theirs", "their planner here", "`auto` here", "`auto` beside it", "how"]
PAPERS: dict[str, tuple[str, Callable[[bool], list[Row]]]] = {
    "DCP (arXiv 2510.10620)": (
        "Figures as its artifact numbers them. `dcp:1024` cuts its hypergraph from nothing. Baselines have the degrees its public code "
        "chooses: data parallelism first, then head groups and rings. Lengths are drawn like its data sets', not from them; two ranks "
        "share a 100 Gb/s card. Its speed-ups are of measured times on A100.",
        papers_dcp.rows,
    ),
    "FCP (arXiv 2605.08524)": (
        "By subject. `fcp:4096` has its blocks, bin-packing, rounds and coalescing. GPUs are H20-like, with a kernel at 0.80 of peak, "
        "which is derived from its published figures. In the ablation `auto` runs under the same rules. The last rung keeps tokens in "
        "contiguous order: queries, keys and outputs go through the door of attention.",
        papers_fcp.rows,
    ),
    "DHP, flexible groups (arXiv 2602.21788)": (
        "By subject. `dhp` has its packing and its dynamic program. Devices are like an Ascend 910B. The baseline is the best of rings, "
        "Ulysses, USP and data parallelism, one for all batches, documents dealt by tokens; the paper compares with Megatron-LM and "
        "DeepSpeed, whose degrees it does not give in full. Tokens a second fall with more devices also because longer documents then "
        "fit a batch, whose work grows with their square.",
        papers_dhp.rows,
    ),
}


def page(quick: bool) -> str:
    """The whole page."""
    begin, console, sections, counts = time.monotonic(), Console(stderr=True), [], {"better": 0, "same": 0, "worse": 0}
    for title, (words, rows) in PAPERS.items():
        with console.status(title):
            found = rows(quick)
        for row in found:
            if row.verdict in counts:
                counts[row.verdict] += 1
        sections += [f"## {title}", "", words, "", *table(HEADS, [row.cells() for row in found])]
    minutes = (time.monotonic() - begin) / 60
    lines = [
        "# The three papers, figure by figure",
        "",
        f"**Simulated** unless a row says otherwise, by `make papers{' QUICK=1' * quick}` on {date.today().isoformat()} in {minutes:.0f} "
        "minutes: figures and tables of the three papers with what they published, what their planner reaches here and what `auto` "
        "does. Times are the event simulator's with the analytic cost model ([errors](errors.md)). *Better* and *worse* compare `auto` "
        f"with the published planner in the same row, *same* is within {SAME:.0%}; {counts['better']} are better, {counts['same']} the "
        f"same, {counts['worse']} worse. Their planners run on flexcp's executor, so a row compares plans and nothing else; a published "
        "number was measured on their machines and stands beside it for orientation. `auto` looks for the least time and may move more "
        "bytes for it. [The papers](../papers.md) says where each mechanism is.",
        "",
    ]
    return "\n".join(lines + sections)


def main() -> None:
    """Make the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path)
    parser.add_argument("--quick", action="store_true")
    asked = parser.parse_args()
    text = page(asked.quick)
    print(text)
    if asked.write:
        asked.write.write_text(text)


if __name__ == "__main__":
    main()

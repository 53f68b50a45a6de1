"""The three papers figure by figure: theirs, ours with their planner, ours with ``auto``: ``make papers`` writes docs/results/papers.md.

Under an hour on two cores; ``--quick`` draws fewer batches and sizes, ``--only dcp`` (or fcp, dhp) makes one part. The heads of
``papers_dcp.py``, ``papers_fcp.py`` and ``papers_dhp.py`` say how settings differ from the papers'. Plans and simulations are kept for the
whole run (``papers_runs.py``).
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
from papers_rows import HEADS, SAME, Row
from papers_runs import Runs
from simulated import table

PAPERS: dict[str, tuple[str, Callable[[bool, Runs], list[Row]]]] = {
    "DCP (arXiv 2510.10620)": (
        "Figures as its artifact numbers them; the arXiv version counts one more from 12 on. `dcp` cuts its hypergraph from nothing. "
        "Settings are read from its public code (benchmarks/papers_dcp.py): baselines have one degree for the run, by the longest "
        "document of the data set; DCP has the best of its block sizes; end to end a batch has as many tokens as its longest document "
        "may have, and Megatron-LM context parallelism over all 16 ranks. Lengths are drawn like its data sets', not from them; two "
        "ranks share a 100 Gb/s card. **Why ratios are not the published ones**: over all 32 ranks the baselines simulate near their "
        "published times (in brackets), but `dcp` takes a few times less here than the published 7.0 to 13.3 ms. Its own "
        "instructions, buffers and transfers may take the difference; nobody measured that. Where LongAlign's "
        "longest document is taken as 64K, rings fit into nodes, simulate far below the published times, and `dcp` gains little or "
        "nothing over them: its one weight for tokens and work leaves a rank two to three times the mean of work.",
        papers_dcp.rows,
    ),
    "FCP (arXiv 2605.08524)": (
        "By subject. `fcp:4096` has its blocks, bin-packing, rounds and coalescing. How far a rank may be over the mean of tokens, and "
        "that long documents are cut into equal blocks, were chosen with its published imbalance in sight: agreement there is no "
        "evidence. GPUs are H20-like, with a kernel at 0.80 of peak, which is derived from its published figures. MagiAttention, one of "
        "its four rivals and the strongest, is left out of ratios, which are higher for that: its dealing simulates within 10 % of its "
        "[published rates](published.md) at 16 and 32 GPUs, not at 64. In the ablation `auto` runs under the same rules. The last rung "
        "keeps tokens in contiguous order: queries, keys and outputs go through the door of attention.",
        papers_fcp.rows,
    ),
    "DHP, flexible groups (arXiv 2602.21788)": (
        "By subject. `dhp` has its packing and its dynamic program. Devices are like an Ascend 910B. The paper compares with "
        "Megatron-LM (rings) and DeepSpeed (Ulysses), whose degrees it does not give in full: here each in the best degree for all "
        "batches. **Why gains are not the published ones**: over rings and Ulysses `dhp` gains about as published where groups cross "
        "nodes, and nothing on one node of 8. `usp`, heads and a ring, which the paper does not compare with, is about as fast as its "
        "rings of any size or faster: a head group moves fewer bytes across nodes, and short documents packed beside a long one inherit "
        "its degree. A fixed degree is chosen here with all batches known and without a limit of memory; a real one must hold the "
        "longest document of the data set. Its batches and their lengths are not published. Tokens a second fall with more devices also "
        "because longer documents then fit a batch, whose work grows with their square.",
        papers_dhp.rows,
    ),
}


def page(quick: bool, only: str | None = None) -> str:
    """The whole page, or the part of one paper."""
    begin, console, sections, counts = time.monotonic(), Console(stderr=True), [], {"better": 0, "same": 0, "worse": 0}
    runs = Runs()
    for title, (words, rows) in PAPERS.items():
        if only is not None and not title.lower().startswith(only):
            continue
        started = time.monotonic()
        with console.status(title):
            found = rows(quick, runs)
        console.print(f"{title}: {len(found)} rows, {(time.monotonic() - started) / 60:.1f} minutes")
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
        "number was measured on their machines and stands beside it for orientation. The last two ratios set `auto` beside static methods "
        "of any degree: the best of each batch, and the one that a run would configure. `auto` looks for the least time and may move more "
        "bytes for it. [The papers](../papers.md) says where each mechanism is.",
        "",
    ]
    return "\n".join(lines + sections)


def main() -> None:
    """Make the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", choices=("dcp", "fcp", "dhp"), help="one paper's part")
    asked = parser.parse_args()
    text = page(asked.quick, asked.only)
    print(text)
    if asked.write:
        asked.write.write_text(text)


if __name__ == "__main__":
    main()

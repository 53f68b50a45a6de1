"""All simulated experiments, one after the other. ``make experiments`` writes docs/results/experiments.md.

Each has a script of its own beside this one that says what it repeats and where its setting differs. Seeds are fixed, so the same code
gives the same tables; ``--quick`` draws one batch a cell and fewer sizes.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from datetime import date
from pathlib import Path

from rich.console import Console

import block_fcp
import dcp
import flexible_groups
import kernel_fit
import libra
import magi
from flexcp.cost import CostModel

SPARSE = ("lambda", "shared question", "causal blockwise")


def sections(quick: bool) -> list[tuple[str, str, Callable[[], list[str]]]]:
    """(title, words, table) in the order of the page: how wrong the model is, published figures, then flexcp beside them."""
    few = 1 if quick else 3
    counts = (16, 64, 256) if quick else block_fcp.COUNTS
    return [
        (
            "How well the cost models fit kernels measured on an H200",
            "`python benchmarks/kernel_fit.py`: raw times of the `hopper` kernel on one H200 (benchmarks/h200.json), fitted as `flexcp "
            "calibrate` fits them, errors on what was not fitted. Planners use pairs and row tiles; `flexcp simulate`, `compare` and "
            "`bench step` with such a calibration time a finished plan by prices of tiles. The tables below are of other GPUs and use the "
            "analytic model. Kernels of 100 ms and more run slower than the fit says, because the chip lowers its clock.",
            lambda: [*kernel_fit.read_table(), ""],
        ),
        (
            "DCP's static methods, published and simulated",
            "`python benchmarks/dcp.py`. Forward milliseconds of one layer's attention, 4x8 A100, 131,072 tokens, 8 / 2 heads of 128, "
            "beside the best static method that DCP (arXiv 2510.10620) published. Two ranks share a 100 Gb/s card here, a choice made "
            "with knowledge of the published figures: with 6.25 GB/s for each rank alone a ring would take about twice as long. Simulated "
            "times hardly depend on the lengths, because a ring over all ranks is bound by its network. The published ones fall with the "
            "scale, on LongDataCollections by half, for a reason that is not in the model.",
            lambda: dcp.absolutes(few),
        ),
        (
            "The ring of block-level FCP, published and simulated",
            "`python benchmarks/block_fcp.py`. A zig-zag ring over all ranks, H20-like, 64 / 8 heads, 32K tokens a GPU, equal lengths, "
            "efficiency against one GPU. The published setting (arXiv 2605.08524) does not name the length of its documents, so three are "
            "shown. No single length gives both published figures.",
            lambda: block_fcp.ring_absolutes(counts),
        ),
        (
            "The ablation of block-level FCP, published and simulated",
            "128 GPUs, forward MFU. The kernel's efficiency, 0.80, is derived from the published figures (0.75 / 0.93), so agreement in "
            "the last row is no independent evidence. The first row does not agree: without overlap and rounds the simulated executor "
            "still sends exactly what is needed, in at most four stages.",
            block_fcp.ablation,
        ),
        (
            "MagiAttention's weak scaling, published and simulated",
            "`python benchmarks/magi.py`. TFLOP/s a GPU on web documents, 64 / 8 heads, 8,192 tokens a GPU, H100. `minheap` is the way "
            "MagiAttention deals chunks to ranks; `auto` and `blocks` are flexcp's strategies.",
            lambda: magi.weak_scaling(1 if quick else 5),
        ),
        (
            "flexcp in DCP's setting, causal",
            "Speed-ups against the best of ring, zig-zag, LoongTrain-like and all-gather over all ranks (*theirs*, the methods that DCP "
            "was compared with), and against the best static method of *any* degree, data parallelism outside included. The second "
            "baseline is far stronger, and may be another method forward and backward. Below 1.00 `auto` is behind it. Means over batches.",
            lambda: dcp.ours(few),
        ),
        (
            "flexcp in DCP's setting, sparse masks",
            "The same with three sparse masks, one batch a cell; DCP published 2.15 to 3.77 over all of them. A placement serves both "
            "directions, while the static method beside it may be another in each, so a single direction can be behind where both together "
            "are not.",
            lambda: dcp.ours(1, SPARSE),
        ),
        (
            "flexcp end to end: DCP's 8B model on 64 A100",
            "The simulated static time is far above the published time of Megatron, whose degrees and overlap are not published; a ring "
            "over 16 such ranks is bound by its network here. The speed-up is over the simulated static time and does not carry over to "
            "the published one.",
            lambda: dcp.end_to_end(few),
        ),
        (
            "flexcp at the sizes of block-level FCP",
            "Milliseconds of attention forward and backward. Rivals are the dealing of MagiAttention, ByteScale and WLB-LLM and a ring "
            "over all ranks. Published: FCP 1.13 to 2.21 times the best of them, efficiency 92.9 to 94.7 %. Where `auto` is behind "
            "`groups`, it stays with a static method because the predicted gain is within its margin.",
            lambda: block_fcp.scaling(counts, ("h20",) if quick else ("h20", "gb200")),
        ),
        (
            "flexcp at the sizes of flexible groups",
            "`python benchmarks/flexible_groups.py`. Whole steps with FSDP. Published (DHP, arXiv 2602.21788): 1.46 on average, 2.24 on "
            "extremely unbalanced batches.",
            lambda: flexible_groups.fixed_degrees(few),
        ),
        (
            "flexcp on Libra's lengths",
            "`python benchmarks/libra.py`. Whole steps of llama3-8b on 8x8 H100, 32K tokens a rank, FSDP.",
            lambda: libra.lengths_table(few),
        ),
    ]


def page(quick: bool) -> str:
    """The whole page."""
    lines = [
        "# Experiments against published systems",
        "",
        f"**Simulated**, by `make experiments{' QUICK=1' * quick}` on {date.today().isoformat()}: the event simulator, cost model "
        f"{CostModel().name} ([errors](errors.md)), unless a section says otherwise; compute and transfers slow each other as measured "
        "on one H200 with 16 multiprocessors left to transfers. No time here was measured on GPUs, except the raw times of the first "
        "table. Published figures are those of the systems' papers. Tokens are equal on all ranks where only attention is timed. "
        "*Optimality* is time over max(perfectly divided compute, unavoidable communication), which no placement reaches where "
        "documents must be cut.",
        "",
        "`auto` is scored by a closed form that does not know ports wanted by several stages or ranks at once, shared network cards, and "
        "contention; [predictions](predictions.md) has its error against the events. That is one reason why `auto` is behind the best "
        "strategy in some cells.",
        "",
    ]
    console = Console(stderr=True)
    for title, words, table in sections(quick):
        with console.status(title):
            lines += [f"## {title}", "", words, "", *table()]
    return "\n".join(lines)


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

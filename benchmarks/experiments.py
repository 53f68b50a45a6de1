"""All simulated experiments, one after the other; ``make experiments`` writes docs/results/experiments.md.

Each experiment has its own script in this folder that says what it repeats and how its setting differs. Seeds are
fixed, so the same code gives the same tables; ``--quick`` draws one batch per cell and fewer sizes.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from datetime import date
from pathlib import Path

from rich.console import Console

import block_fcp
import dcp
import kernel_fit
import libra
import magi
from flexcp.cost import CostModel


def sections(quick: bool) -> list[tuple[str, str, Callable[[], list[str]]]]:
    """Return (title, words, table) in the order of the page:
    errors of the model, published figures, Libra's lengths.
    """
    few = 1 if quick else 3
    counts = (16, 64, 256) if quick else block_fcp.COUNTS
    return [
        (
            "How well the cost models fit kernels measured on an H200",
            "`python benchmarks/kernel_fit.py`: raw times of one H200, of the `hopper` kernel (benchmarks/h200.json) "
            "and of those that run with `flexcp[fa4]` (benchmarks/h200_cute.json), fitted as `flexcp calibrate` fits "
            "them, errors on what was not fitted. Planners use pairs and row tiles; `flexcp simulate`, `compare` and "
            "`bench step` with such a calibration time a finished plan by prices of tiles. The tables below are of "
            "other GPUs and use the analytic model. Kernels of 100 ms and more run slower than the fit says, because "
            "the chip lowers its clock.",
            lambda: [*kernel_fit.read_table(), ""],
        ),
        (
            "DCP's static methods, published and simulated",
            "`python benchmarks/dcp.py`. Forward milliseconds of one layer's attention, 4x8 A100, 131,072 tokens, 8 / "
            "2 heads of 128, beside the best static method that DCP (arXiv 2510.10620) published. Two ranks share a "
            "100 Gb/s card here, a choice made with knowledge of the published figures: with 6.25 GB/s for each rank "
            "alone a ring would take about twice as long. Simulated times hardly depend on the lengths, because a ring "
            "over all ranks is bound by its network. The published ones fall with the scale, on LongDataCollections by "
            "half, for a reason that is not in the model.",
            lambda: dcp.absolutes(few),
        ),
        (
            "The ring of block-level FCP, published and simulated",
            "`python benchmarks/block_fcp.py`. A zig-zag ring over all ranks, H20-like, 64 / 8 heads, 32K tokens a "
            "GPU, equal lengths, efficiency against one GPU. The published setting (arXiv 2605.08524) does not name "
            "the length of its documents, so three are shown. No single length gives both published figures.",
            lambda: block_fcp.ring_absolutes(counts),
        ),
        (
            "The ablation of block-level FCP, published and simulated",
            "128 GPUs, forward MFU, with blocks dealt by `minheap:4096` in FCP's place; [the page of the three "
            "papers](papers.md) has the ladder of its own planner, `fcp:4096`, where rungs are lower. The kernel's "
            "efficiency, 0.80, is derived from the published figures (0.75 / 0.93), so agreement in "
            "the last row is no independent evidence. The first row does not agree: without overlap and rounds the "
            "simulated executor still sends exactly what is needed, in at most nine stages.",
            block_fcp.ablation,
        ),
        (
            "MagiAttention's weak scaling, published and simulated",
            "`python benchmarks/magi.py`. TFLOP/s a GPU on web documents, 64 / 8 heads, 8,192 tokens a GPU, H100. "
            "`minheap` is the way MagiAttention deals chunks to ranks, every key straight from its owner; with its "
            "native collectives and measured links [it is nearer](published.md) up to 32 GPUs, and farther off at 64. "
            "Until it is within 10 % everywhere, no speed-up over MagiAttention is stated. [Published "
            "figures](published.md) simulates cells of this page with other links, kernels and batches; its numbers "
            "differ.",
            lambda: magi.weak_scaling(1 if quick else 5),
        ),
        (
            "flexcp on Libra's lengths",
            "`python benchmarks/libra.py`. Whole steps of llama3-8b on 8x8 H100, 32K tokens a rank, FSDP; Libra's "
            "model, cluster and batch are not published. The bound is Ulysses over a step with attention at its floor "
            "and the rest of each layer divided evenly, nothing exchanged and no gradients synchronised: where it is "
            "below the published ratio, no placement reaches that ratio here.",
            lambda: libra.lengths_table(few),
        ),
    ]


def page(quick: bool) -> str:
    """Return the page."""
    lines = [
        "# Experiments against published systems",
        "",
        f"**Simulated**, by `make experiments{' QUICK=1' * quick}` on {date.today().isoformat()}: the event simulator, "
        f"cost model {CostModel().name} ([errors](errors.md)), unless a section says otherwise; compute and transfers "
        "slow each other as measured on one H200 with 16 multiprocessors left to transfers. No time here was measured "
        "on GPUs, except the raw times of the first table. Published figures are those of the systems' papers. Tokens "
        "are equal on all ranks where only attention is timed. *Optimality* is time over max(perfectly divided "
        "compute, unavoidable communication), which no placement reaches where documents must be cut.",
        "",
        "flexcp's strategies in the settings of DCP, FCP and DHP are on [the page of the three papers](papers.md), "
        "beside their planners and over both baselines.",
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

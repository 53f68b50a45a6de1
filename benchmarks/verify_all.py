"""Verify the full matrix on real processes and write a dated table: ``make verify-all``.

Every strategy x named mask x number of ranks (1, 2, 3, 4, 5, 7, 8, 2x2, 2x3) x head arrangement in float64, and a third of that
again in lower precisions, with lengths, layouts, softcap, sinks and LSE gradients cycled through. ``--sample N`` takes every
N-th case.
"""

from __future__ import annotations

import argparse
import platform
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from datetime import date
from pathlib import Path

import torch
from rich.progress import Progress

from flexcp.measure.ranks import RankPool
from flexcp.measure.verify import Verdict
from lib.matrix import CLUSTERS, LOW_PRECISION, MASKS, STRATEGIES, Case, full_matrix, verify_cases

CHUNK = 12


def main() -> int:
    """Run, report, write; 1 when a case failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sample", type=int, default=1, help="take every N-th case")
    parser.add_argument("--write", type=Path, help="file for the table")
    asked = parser.parse_args()
    results: list[tuple[str, Case, Verdict]] = []
    begin = time.monotonic()
    with RankPool(8) as pool, Progress() as progress:
        for label, cases in (("float64", full_matrix(("float64",))), ("lower", full_matrix(LOW_PRECISION))):
            chosen = [c for i, c in enumerate(cases) if i % asked.sample == 0 and not (label == "lower" and i % 3)]
            task = progress.add_task(label, total=len(chosen))
            for chunk in _chunks(chosen):
                verdicts = pool.run(verify_cases, chunk, ranks=chunk[0].plan.ranks)[0]
                for case, verdict in zip(chunk, verdicts, strict=True):
                    case.plan.check()
                    results.append((label, case, verdict))
                    if not verdict.passed:
                        progress.console.print(f"FAILED {case.name}: {verdict}")
                progress.update(task, advance=len(chunk))
    text = _table(results, time.monotonic() - begin)
    print(text)
    if asked.write:
        asked.write.write_text(text)
    return int(any(not v.passed for _, _, v in results))


def _chunks(cases: list[Case]) -> Iterator[list[Case]]:
    """Cases for the same number of ranks, a few at a time."""
    for ranks in sorted({c.plan.ranks for c in cases}):
        same = [c for c in cases if c.plan.ranks == ranks]
        for i in range(0, len(same), CHUNK):
            yield same[i : i + CHUNK]


def _table(results: list[tuple[str, Case, Verdict]], seconds: float) -> str:
    passed = sum(v.passed for _, _, v in results)
    lines = [
        "# Exactness",
        "",
        f"**Measured**, by `make verify-all` on {date.today().isoformat()} ({platform.machine()}, torch {torch.__version__}) in "
        f"{seconds / 60:.0f} minutes: {passed} of {len(results)} cases passed. "
        "Real gloo processes, forward and backward, against dense float64 attention on one process; bytes counted where they leave "
        "equal the plan's in every passed case. A cell is the largest error of out, lse, dq, dk, dv over masks, head arrangements "
        "(MHA, GQA, MQA), lengths and layouts; float64 may be off by 1e-10.",
        "",
    ]
    for label, title in (
        ("float64", "float64: largest error"),
        ("lower", "bfloat16, float16, float32: largest error / allowed error"),
    ):
        for column, names in (("cluster", [f"{a}x{b}" for a, b in CLUSTERS]), ("mask", list(MASKS))):
            cells: dict[tuple[str, str], float] = defaultdict(float)
            for kind, case, verdict in results:
                if kind != label:
                    continue
                worst = max(
                    e if label == "float64" else e / verdict.allowed[n] for n, e in verdict.errors.items()
                ) if verdict.bytes_match else float("inf")  # fmt: skip
                key = (case.strategy, case.cluster if column == "cluster" else case.mask)
                cells[key] = max(cells[key], worst)
            lines += [f"## {title}, by strategy and {column}", "", "| strategy | " + " | ".join(names) + " |"]
            lines += ["| --- " * (len(names) + 1) + "|"]
            for strategy in STRATEGIES:
                row = [
                    f"{cells[strategy, n]:.1e}" if label == "float64" else f"{cells[strategy, n]:.2f}" for n in names
                ]
                lines.append(f"| {strategy} | " + " | ".join(row) + " |")
            lines.append("")
    lines.append(
        "`grouped` is ring, zigzag, allgather or ulysses with a degree below the number of ranks; `tolerant` is blocks with a compute "
        "tolerance of 0.05."
    )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())

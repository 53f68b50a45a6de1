"""Verification of the full matrix on real processes, which writes a dated table: ``make verify-all``.

The matrix is every strategy x named mask x number of ranks (1 to 8, two nodes of 2 and of 3) x head arrangement in
float64, and every strategy x mask x number of ranks again in lower precisions, with varying lengths, layouts, softcap,
sinks and LSE gradients; one case in 37 has a document of 3,001 tokens. ``--sample N`` draws one case in N. ``--pools
N`` runs N parts of the matrix at the same time, for machines with more cores than the ranks of one case. ``--part K``
runs one of the N parts alone and leaves it in a file, and ``--join`` makes the page from such files, which may come
from several machines.
"""

from __future__ import annotations

import argparse
import pickle
import platform
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import NamedTuple

import torch

from flexcp.measure.ranks import RankPool
from flexcp.measure.verify import Verdict
from lib.matrix import (
    CLUSTERS,
    HEADS,
    LONG,
    LOW_PRECISION,
    MASKS,
    STRATEGIES,
    Cell,
    case_of,
    full_matrix,
    low_precision_matrix,
    sampled,
    verify_cases,
)
from lib.progress import tracked

CHUNK = 12
Result = tuple[str, Cell, Verdict]
MACHINE = f"{platform.machine()}, torch {torch.__version__}"


class Part(NamedTuple):
    """Cases that ran one after another on one machine, and how long they took."""

    machine: str
    seconds: float
    results: list[Result]


def main() -> int:
    """Run, print and write; returns 1 if a case failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sample", type=int, default=1, help="draw one case in N")
    parser.add_argument("--pools", type=int, default=1, help="parts of the matrix that run at the same time")
    parser.add_argument("--part", type=int, help="run only this part, and leave its results in the file of --write")
    parser.add_argument("--join", type=Path, nargs="+", help="files of all parts, instead of running any")
    parser.add_argument("--write", type=Path, help="file for the table")
    asked = parser.parse_args()
    begin = time.monotonic()
    if asked.part is not None:
        results = _results(asked.sample, asked.part, asked.pools)
        asked.write.write_bytes(pickle.dumps(Part(MACHINE, time.monotonic() - begin, results)))
        return 0
    if asked.join:
        # The files were written by --part, by the same user, so unpickling them is safe.
        parts = [pickle.loads(file.read_bytes()) for file in asked.join]
    elif asked.pools == 1:
        results = _results(asked.sample, 0, 1)
        parts = [Part(MACHINE, time.monotonic() - begin, results)]
    else:
        parts = _run_parts(asked.sample, asked.pools)
    results = [result for part in parts for result in part.results]
    text = table(results, parts)
    if asked.write:
        asked.write.write_text(text)
    print(text)
    return int(any(not v.passed for _, _, v in results))


def _run_parts(sample: int, pools: int) -> list[Part]:
    """Run all parts, each in its own process."""
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / str(part) for part in range(pools)]
        common = [sys.executable, __file__, "--sample", str(sample), "--pools", str(pools)]
        running = [
            subprocess.Popen([*common, "--part", str(part), "--write", str(file)]) for part, file in enumerate(files)
        ]
        ends = [process.wait() for process in running]
        if any(ends):
            raise SystemExit(f"parts of the matrix ended with {ends}")
        # Written by the processes above, into a folder that no other user can write.
        return [pickle.loads(file.read_bytes()) for file in files]


def _results(sample: int, part: int, pools: int) -> list[Result]:
    results: list[Result] = []
    with RankPool(8) as pool:
        for label, cells in (("float64", full_matrix()), ("lower", low_precision_matrix())):
            chunks = list(_chunks(sampled(cells, sample)))[part::pools]
            for chunk in tracked(chunks, f"{label}, {CHUNK} cases at a time"):
                cases = [case_of(cell) for cell in chunk]
                verdicts = pool.run(verify_cases, cases, ranks=cases[0].plan.ranks)[0]
                for case, verdict in zip(cases, verdicts, strict=True):
                    case.plan.check()
                    results.append((label, case.cell, verdict))
                    if not verdict.passed:
                        print(f"FAILED {case.name}: {verdict}", file=sys.stderr, flush=True)
    return results


def _chunks(cells: list[Cell]) -> Iterator[list[Cell]]:
    """Yield cells for the same number of ranks, a few at a time."""
    for ranks in sorted({c.shape[0] * c.shape[1] for c in cells}):
        same = [c for c in cells if c.shape[0] * c.shape[1] == ranks]
        for i in range(0, len(same), CHUNK):
            yield same[i : i + CHUNK]


def table(results: list[Result], parts: list[Part]) -> str:
    """Return the page: what ran and the largest errors. A cell that did not run is a dash."""
    passed, cells = sum(v.passed for _, _, v in results), [cell for _, cell, _ in results]
    long = sum(max(cell.lengths) > 1000 for cell in cells)
    lines = [
        "# Exactness",
        "",
        f"**Measured**, by `make verify-all` on {date.today().isoformat()} ({_machines(parts)}): {passed} of "
        f"{len(results)} cases passed. Real gloo processes, forward and backward, against dense float64 attention on "
        "one process; bytes counted where they leave equal the plan's in every passed case. A cell is the largest "
        "error of out, lse, dq, dk, dv over all cases that fall into it, `-` where none ran; float64 may be off by "
        f"1e-10. Head arrangements: {_counted(cells, 'heads')}; layouts: {_counted(cells, 'layout')}; dtypes: "
        f"{_counted(cells, 'dtype')}; {long} cases have a document of {max(LONG):,} tokens.",
        "",
    ]
    for label, title in (
        ("float64", "float64: largest error"),
        ("lower", "bfloat16, float16, float32: largest error / allowed error"),
    ):
        columns = {
            "cluster": [f"{a}x{b}" for a, b in CLUSTERS],
            "mask": list(MASKS),
            "heads": list(HEADS),
            "dtype": ["float64"] if label == "float64" else list(LOW_PRECISION),
        }
        for column, names in columns.items():
            worst: dict[tuple[str, str], float] = {}
            for kind, cell, verdict in results:
                if kind == label:
                    key = (cell.strategy, getattr(cell, column))
                    worst[key] = max(worst.get(key, 0.0), _worst(verdict, label == "float64"))
            shown = "{:.1e}" if label == "float64" else "{:.2f}"
            lines += [f"## {title}, by strategy and {column}", "", "| strategy | " + " | ".join(names) + " |"]
            lines += ["| --- " * (len(names) + 1) + "|"]
            for strategy in STRATEGIES:
                row = [shown.format(worst[strategy, n]) if (strategy, n) in worst else "-" for n in names]
                lines.append(f"| {strategy} | " + " | ".join(row) + " |")
            lines.append("")
    lines.append(
        "`grouped` is ring, zigzag, allgather or ulysses with a degree below the number of ranks; `tolerant` is blocks "
        "with a compute tolerance of 0.05."
    )
    return "\n".join(lines) + "\n"


def _machines(parts: list[Part]) -> str:
    """Return ``x86_64, torch 2.11: 8 minutes; aarch64, torch 2.13:
    9 minutes``, with the longest part of each machine.
    """
    longest: dict[str, float] = {}
    for part in parts:
        longest[part.machine] = max(longest.get(part.machine, 0.0), part.seconds)
    return "; ".join(f"{machine}: {seconds / 60:.0f} minutes" for machine, seconds in longest.items())


def _worst(verdict: Verdict, absolute: bool) -> float:
    """Return the largest error, or its largest share of what is allowed; infinity if bytes were not the plan's."""
    if not verdict.bytes_match:
        return float("inf")
    return max(error / (1 if absolute else verdict.allowed[name]) for name, error in verdict.errors.items())


def _counted(cells: list[Cell], factor: str) -> str:
    """Return counts as text: ``MHA 1,234, GQA 1,200, ...``."""
    return ", ".join(f"{name} {count:,}" for name, count in Counter(getattr(c, factor) for c in cells).most_common())


if __name__ == "__main__":
    sys.exit(main())

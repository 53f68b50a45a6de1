"""Soak test: thousands of steps with changing batches in one process group; does anything grow?

    python benchmarks/soak.py --write benchmarks/soak_cpu.json                                    # two gloo ranks
    python benchmarks/soak.py --device cuda --ranks 1 --seconds 300 --write benchmarks/soak_h200.json   # one GPU
    python benchmarks/soak.py --page benchmarks/soak_cpu.json benchmarks/soak_h200.json   # docs/results/soak.md

Every step draws another batch, mask and strategy, plans it, binds it and runs attention forward and backward, as a
training loop does, and keeps no reference. Every :data:`~lib.soaking.CHECK_EVERY` steps the results of the drawn batch
are compared with dense attention in float64. After step :data:`~lib.soaking.SETTLED` and at the end each rank counts
what it holds: resident memory and CUDA memory (after collecting garbage and returning free memory), threads, open
files, sockets, and the shared memory files of this machine. Memory may grow by 2 %, the others not at all. Results of
one fixed batch are compared bit by bit at the beginning and at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

import torch

from lib.soaking import CHECK_EVERY, SETTLED, Held, Soaked, soaked
from lib.trust_ranks import Setting, on_ranks

PAGE = Path(__file__).parents[1] / "docs/results/soak.md"
GROWTH = 0.02
"""The share by which memory may grow."""
MEMORIES = {"resident": "resident memory", "allocated": "CUDA memory allocated", "reserved": "CUDA memory reserved"}
"""The kinds of memory that may grow by that share, by their names in :class:`lib.soaking.Held`."""
COUNTS = {"threads": "threads", "files": "open files", "sockets": "sockets", "shared": "shared memory files"}
"""What may not grow at all, likewise."""
PATIENCE = 3600.0
"""Seconds after which ranks that do not answer are given up, if ``--seconds`` does not say."""


def verdicts(before: list[Held], after: list[Held], same: bool) -> list[str]:
    """Return a line for everything that grew or changed."""
    found = [] if same else ["the results of the first batch have changed"]
    for rank, (a, b) in enumerate(zip(before, after, strict=True)):
        for what, name in MEMORIES.items():
            old, new = getattr(a, what), getattr(b, what)
            if new > old * (1 + GROWTH):
                found.append(f"rank {rank}: {name} grew by {100 * (new / old - 1) if old else 100:.1f} %")
        for what in COUNTS:
            if getattr(b, what) > getattr(a, what):
                found.append(f"rank {rank}: {what} grew from {getattr(a, what)} to {getattr(b, what)}")
    return found


def main(words: list[str] | None = None) -> int:
    """Run the soak test and print the result, or make the page; 1 if something grew or was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, help="end after this time, with as many steps as there were")
    parser.add_argument("--write", type=Path, help="a JSON file for the result")
    parser.add_argument("--page", type=Path, nargs="+", help="such files: write docs/results/soak.md from them")
    asked = parser.parse_args(words)
    if asked.page:
        PAGE.write_text(page([json.loads(path.read_text()) for path in asked.page]))
        return 0
    settled, begin = min(SETTLED, asked.steps // 2), time.monotonic()
    patience = PATIENCE if asked.seconds is None else asked.seconds + 120
    setting = Setting(asked.device, begin + patience, small=False, seed=asked.seed)
    work = (asked.steps, settled, asked.seed, asked.device, asked.seconds)
    found = record(on_ranks(setting, asked.ranks, soaked, *work), asked, time.monotonic() - begin)
    if asked.write is not None:
        asked.write.write_text(json.dumps(found, indent=1) + "\n")
    print(section(found))
    for line in found["grown"] + found["wrong"]:
        print(f"FAILED: {line}", file=sys.stderr)
    return int(bool(found["grown"] or found["wrong"]))


def record(answers: list[Soaked], asked: argparse.Namespace, seconds: float) -> dict[str, Any]:
    """Return the result of a run as the JSON file has it."""
    first = answers[0]
    return {
        "date": date.today().isoformat(),
        "machine": _machine(asked.device),
        "device": asked.device,
        "kernel": first.kernel,
        "seed": asked.seed,
        "asked": asked.steps,
        "steps": first.steps,
        "settled": first.settled,
        "seconds": round(seconds, 1),
        "checked": first.checked,
        "wrong": list(first.wrong),
        "grown": verdicts([a.before for a in answers], [a.after for a in answers], all(a.same for a in answers)),
        "ranks": [{str(step): asdict(held) for step, held in sorted(a.looks.items())} for a in answers],
    }


def page(found: list[dict[str, Any]]) -> str:
    """Return the page of results: a section for each run."""
    head = (
        "# Soak\n\n**Measured** on the dates of the sections, by `make soak` and `python benchmarks/soak.py --device "
        "cuda`: steps of changing batches in one process. A rank may hold 2 % more memory at the end than after step "
        f"{SETTLED}, and no more threads, files or sockets.\n\n"
    )
    return head + "\n".join(section(one) for one in found)


def section(found: dict[str, Any]) -> str:
    """Return the words and the table of one run."""
    cuda, ranks = found["device"] == "cuda", len(found["ranks"])
    command = f"python benchmarks/soak.py --device {found['device']} --ranks {ranks} --seed {found['seed']}"
    kinds = MEMORIES if cuda else {"resident": MEMORIES["resident"]}
    names = ["rank", "after step", *(f"{name}, MB" for name in kinds.values()), *COUNTS.values()]
    rows = [f"| {' | '.join(names)} |", f"|{' --- |' * len(names)}"]
    for rank, looks in enumerate(found["ranks"]):
        for step in (str(found["settled"]), str(found["steps"])):
            sizes = [f"{looks[step][kind] / 1e6:,.1f}" for kind in kinds]
            counts = [str(looks[step][kind]) for kind in COUNTS]
            rows.append(f"| {' | '.join([str(rank), f'{int(step):,}', *sizes, *counts])} |")
    grown = [
        100 * (looks[str(found["steps"])]["resident"] / looks[str(found["settled"])]["resident"] - 1)
        for looks in found["ranks"]
    ]
    short = "" if found["steps"] == found["asked"] else f" of {found['asked']:,} asked for"
    verdict = "; ".join(found["grown"]) or "nothing grew beyond what is allowed, and a fixed batch gave the same bits"
    return (
        f"## {'One GPU' if cuda else 'CPU ranks'}\n\n"
        f"**Measured** {found['date']} on {found['machine']} by `{command}`: {found['steps']:,} steps{short} in "
        f"{found['seconds']:.0f} s, kernel `{found['kernel']}`. What each rank holds after step {found['settled']:,} "
        f"and after step {found['steps']:,}; resident memory changed by "
        f"{', '.join(f'{share:+.2f} %' for share in grown)}.\n\n" + "\n".join(rows) + "\n\n"
        f"Of {found['checked']} batches, one every {CHECK_EVERY} steps, {len(found['wrong'])} differed from dense "
        f"attention in float64. Verdict: {verdict}.\n"
    )


def _machine(device: str) -> str:
    software = f"Python {platform.python_version()}, torch {torch.__version__}"
    if device == "cuda":
        return f"one {torch.cuda.get_device_name(0)}, {software}"
    return f"{os.cpu_count()} cores ({platform.machine()}), gloo ranks, {software}"


if __name__ == "__main__":
    sys.exit(main())

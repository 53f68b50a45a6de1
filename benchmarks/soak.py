"""Soak test: thousands of steps with changing batches in one process group; does anything grow?

    python benchmarks/soak.py --steps 5000 --write docs/results/soak.md

Every step draws another batch, mask and strategy, plans it, binds it and runs attention forward and backward on gloo
ranks, as a training loop does, and keeps no reference. After step :data:`SETTLED` and at the end each rank reports its
resources: resident memory (after collecting garbage and returning free memory), threads, open files, sockets, and
shared memory of this machine. Resident memory may grow by 2 %, the others not at all. Results of one fixed batch are
compared bit by bit at the beginning and at the end.
"""

from __future__ import annotations

import argparse
import sys
import time
from datetime import date
from pathlib import Path

from flexcp.measure.ranks import RankPool
from lib.soaking import SETTLED, Held, soak

GROWTH = 0.02
"""The share by which memory may grow."""
MEMORIES = {"resident": "resident memory", "allocated": "CUDA memory allocated", "reserved": "CUDA memory reserved"}
"""The kinds of memory that may grow by that share, by their names in :class:`lib.soaking.Held`."""


def verdicts(before: list[Held], after: list[Held], same: bool) -> list[str]:
    """Return a line for everything that grew or changed."""
    found = [] if same else ["the results of the first batch have changed"]
    for rank, (a, b) in enumerate(zip(before, after, strict=True)):
        for what, name in MEMORIES.items():
            old, new = getattr(a, what), getattr(b, what)
            if new > old * (1 + GROWTH):
                found.append(f"rank {rank}: {name} grew by {100 * (new / old - 1) if old else 100:.1f} %")
        for what in ("threads", "files", "sockets", "shared"):
            if getattr(b, what) > getattr(a, what):
                found.append(f"rank {rank}: {what} grew from {getattr(a, what)} to {getattr(b, what)}")
    return found


def main() -> int:
    """Run the soak test, compare and print the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", type=Path)
    asked = parser.parse_args()
    settled, begin = min(SETTLED, asked.steps // 2), time.monotonic()
    with RankPool(asked.ranks, timeout=3600) as pool:
        answers = pool.run(
            soak,
            asked.steps,
            settled,
            asked.seed,
            on_item=lambda text: print(f"\r{text}", end="", file=sys.stderr, flush=True),
        )
    print(file=sys.stderr)
    before, after = [a.before for a in answers], [a.after for a in answers]
    grown = verdicts(before, after, all(a.same for a in answers))
    rows = [
        f"| {rank} | {a.resident / 1e6:.1f} | {b.resident / 1e6:.1f} | {100 * (b.resident / a.resident - 1):+.2f} % | "
        f"{a.threads} / {b.threads} | {a.files} / {b.files} | {a.sockets} / {b.sockets} | {a.shared} / {b.shared} |"
        for rank, (a, b) in enumerate(zip(before, after, strict=True))
    ]
    head = (
        f"# Soak\n\n**Measured** {date.today()} by `python benchmarks/soak.py --steps {asked.steps} --ranks "
        f"{asked.ranks} --seed {asked.seed}` in {time.monotonic() - begin:.0f} s, on CPU ranks (gloo): what each rank "
        f"holds after step {settled} and after step {asked.steps}.\n\n| rank | MB before | MB after | grown | threads "
        "| open files | sockets | shared memory files |\n| --- | --- | --- | --- | --- | --- | --- | --- |\n"
    )
    print(head + "\n".join(rows))
    if asked.write is not None:
        asked.write.write_text(head + "\n".join(rows) + "\n")
    for line in grown:
        print(f"GREW: {line}", file=sys.stderr)
    return int(bool(grown))


if __name__ == "__main__":
    sys.exit(main())

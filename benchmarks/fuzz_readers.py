"""Reading of changed files of every kind that a user can pass; ``make fuzz-readers`` reads 50,000 of them.

Each must be read, or refused in one line that names the file (:mod:`flexcp.fuzz.readers`).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from flexcp.fuzz.readers import fuzz_readers


def main() -> int:
    """Read the files and count; returns 1 if one was neither read nor refused correctly."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=50_000)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    read, refused, bad, begin = Counter[str](), Counter[str](), Counter[str](), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        for kind, was_read, problem in fuzz_readers(asked.count, asked.seed, Path(folder)):
            (read if was_read else refused)[kind] += 1
            if problem is not None:
                bad[f"{problem.kind}: {problem.message}"] += 1
                if bad.total() <= 20:
                    print(f"FAILED {problem.kind}: {problem.message}\n  {problem.content[:300]!r}", file=sys.stderr)
    for kind in sorted(read | refused):
        print(f"{kind:>16}: {read[kind]:>6} read, {refused[kind]:>6} refused")
    print(f"seed {asked.seed}: {asked.count} files in {time.monotonic() - begin:.0f} s, {bad.total()} failed")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())

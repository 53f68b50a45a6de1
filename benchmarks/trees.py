"""Trees and independent sequences: random trees under all strategies on 1, 2, 3, 5 and 8 gloo ranks, in float64.

    make trees-exact                                            # 200 batches; writes docs/results/trees-exact.md
    python benchmarks/trees.py --sample 20                      # some of the 200, with segments of a few tokens
    python benchmarks/trees.py --first 20 --batches 20 --save two.json    # a share of the 200, to run beside others
    python benchmarks/trees.py --join one.json two.json --write PAGE      # the page of several shares

Each batch runs several trees and plain documents through a tiny Llama. Losses of both normalisations, the
log-probability of every position of every sequence and the gradient of every parameter are compared with one forward
for each sequence in one process, and sent bytes with the plan's. Prints the worst error so far after every run, and
fails above 1e-9.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

from flexcp.measure.ranks import RankPool
from flexcp.planners.request import Refused
from flexcp.planners.strategies import STRATEGIES
from lib.tree_runs import TreeSizes, independent_sequences, random_batch, tree_on_ranks, tree_plan, worst_error
from simulated import table

RANKS = (1, 2, 3, 5, 8)
LIMIT = 1e-9
LARGE = TreeSizes(depth=16, fan_out=20, segment=300, segments=14, documents=3)
INTRODUCTION = """
**Measured**, by `make trees-exact` on {date} ({machine}{shares}): {batches} batches of random trees (depth to 16,
fan-out to 20, segments of 1 to 300 tokens) with plain documents between them, {tokens:,} tokens and {sequences:,}
sequences in all, through a tiny Llama in float64 on real gloo ranks. Loss, log-probability of every position of every
sequence and gradient of every parameter are compared with one forward for each sequence in one process; the limit is
{limit:.0e}. Worst errors: {worst}. Ranks that sent other bytes than their plan says: {wrong_bytes}.
"""


@dataclass
class Found:
    """What some batches showed; ``runs`` and ``refused`` count pairs ``strategy/ranks``."""

    when: str = field(default_factory=lambda: date.today().isoformat())
    machine: str = field(default_factory=platform.machine)
    shares: int = 1
    batches: int = 0
    tokens: int = 0
    sequences: int = 0
    wrong_bytes: int = 0
    runs: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    worst: dict[str, float] = field(default_factory=dict)

    @property
    def failed(self) -> bool:
        return self.wrong_bytes > 0 or max(self.worst.values()) > LIMIT

    def worst_words(self) -> str:
        return ", ".join(f"{name.replace('_', '-')} {value:.1e}" for name, value in self.worst.items())


def joined(parts: Sequence[Found]) -> Found:
    """Return what several shares of the batches showed together."""
    machine = ", ".join(dict.fromkeys(x.machine for x in parts))
    found = Found(max(x.when for x in parts), machine, sum(x.shares for x in parts))
    for part in parts:
        for name in ("batches", "tokens", "sequences", "wrong_bytes"):
            setattr(found, name, getattr(found, name) + getattr(part, name))
        found.runs.update(part.runs)
        found.refused.update(part.refused)
        for name, value in part.worst.items():
            found.worst[name] = max(found.worst.get(name, 0.0), value)
    return found


def page(found: Found) -> str:
    """Return the page: a row for each strategy, a column for each number of ranks, in runs that were compared."""
    words = INTRODUCTION.format(
        date=found.when,
        machine=found.machine,
        shares=f", in {found.shares} shares that ran side by side (`--save`, `--join`)" if found.shares > 1 else "",
        batches=found.batches,
        tokens=found.tokens,
        sequences=found.sequences,
        limit=LIMIT,
        worst=found.worst_words(),
        wrong_bytes=found.wrong_bytes,
    )
    rows = []
    for name in STRATEGIES:
        cells = []
        for ranks in RANKS:
            key = f"{name}/{ranks}"
            refused = f" ({found.refused[key]} refused)" if found.refused[key] else ""
            cells.append(f"{found.runs[key]}{refused}")
        rows.append([name, *cells])
    heads = ["strategy", *(f"{n} rank{'s' if n > 1 else ''}" for n in RANKS)]
    compared = f"Runs that were compared, {sum(found.runs.values())} in all:"
    lines = ["# Trees and independent sequences", "", " ".join(words.split()), "", compared, "", *table(heads, rows)]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="the number of the first batch, to share them over runs")
    parser.add_argument("--small", action="store_true", help="segments of a few tokens")
    parser.add_argument("--sample", type=int, help="so many of the batches, small ones")
    parser.add_argument("--strategies", default=",".join(STRATEGIES))
    parser.add_argument("--ranks", default=",".join(map(str, RANKS)))
    parser.add_argument("--save", type=Path, help="write what was found, for --join")
    parser.add_argument("--join", type=Path, nargs="+", help="run nothing; join files of --save")
    parser.add_argument("--write", type=Path, help="write a page")
    options = parser.parse_args()
    if options.join:
        found = joined([read(file) for file in options.join])
    else:
        sizes = TreeSizes() if options.small or options.sample else LARGE
        seeds = range(options.first, options.first + options.batches)
        counts = [int(n) for n in options.ranks.split(",")]
        if options.sample:
            seeds = sampled(seeds, options.sample, len(counts))
        found = run(seeds, sizes, options.strategies.split(","), counts)
    runs, refused = sum(found.runs.values()), sum(found.refused.values())
    print(f"{found.batches} batches, {found.tokens:,} tokens of trees, {found.sequences} sequences; ", end="")
    print(f"{runs} runs, {refused} refused")
    print(f"worst errors: {found.worst_words()}")
    print(f"ranks that sent other bytes than planned: {found.wrong_bytes}")
    if options.save:
        save(found, options.save)
    if options.write:
        options.write.write_text(page(found))
    if found.failed:
        raise SystemExit(1)


def sampled(seeds: range, number: int, counts: int) -> range:
    """Return so many of the seeds, from all over them, that meet all numbers of ranks in turn.

    A batch of seed s runs on number ``s % counts`` of them, so the step between seeds has no divisor in common with it.
    """
    step = max(1, len(seeds) // number)
    while math.gcd(step, counts) > 1:
        step -= 1
    return seeds[::step][:number]


def save(found: Found, file: Path) -> None:
    """Write what some batches showed, for :func:`read`."""
    file.write_text(json.dumps(vars(found)))


def read(file: Path) -> Found:
    """Read what :func:`save` wrote."""
    saved = json.loads(file.read_text())
    return Found(**saved | {name: Counter(saved[name]) for name in ("runs", "refused")})


def run(seeds: Sequence[int], sizes: TreeSizes, names: Sequence[str], counts: Sequence[int]) -> Found:
    """Run the batches of these seeds; each meets one or two of the strategies, on one number of ranks."""
    found = Found(batches=len(seeds))
    with RankPool(max(counts)) as pool:
        for seed in seeds:
            batch = random_batch(seed, sizes)
            right = independent_sequences(batch)
            found.tokens += sum(batch.lengths)
            found.sequences += len(right.log_probs)
            # Over the batches, every strategy meets every number of ranks; each batch has one or two of the pairs.
            for strategy in (names[seed % len(names)], names[(seed // len(counts)) % len(names)]):
                ranks = counts[seed % len(counts)]
                try:
                    plan = tree_plan(batch, strategy, ranks)
                except Refused as error:
                    found.refused[f"{strategy}/{ranks}"] += 1
                    print(f"{strategy} on {ranks} ranks is refused: {error}", file=sys.stderr)
                    continue
                answers = pool.run(tree_on_ranks, batch, plan, ranks=ranks)
                found.runs[f"{strategy}/{ranks}"] += 1
                for answer in answers:
                    found.wrong_bytes += not answer.bytes_as_planned
                    for name, error_of in worst_error(answer, right).items():
                        found.worst[name] = max(found.worst.get(name, 0.0), error_of)
                so_far = f"worst so far {max(found.worst.values()):.1e}, {found.wrong_bytes} ranks with other bytes"
                print(f"batch {seed}: {strategy} on {ranks} ranks; {so_far}", file=sys.stderr)
    return found


if __name__ == "__main__":
    main()

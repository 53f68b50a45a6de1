"""Trees and independent sequences: random trees under all strategies on 1, 2, 3, 5 and 8 gloo ranks, in float64.

    python benchmarks/trees.py                # 200 batches, each under one strategy and number of ranks after another
    python benchmarks/trees.py --sample 20    # so many of the 200, from all over them, with segments of a few tokens

Each batch runs several trees and plain documents through a tiny Llama. Losses of both normalisations, the
log-probability of every position of every sequence and the gradient of every parameter are compared with one forward
for each sequence in one process, and sent bytes with the plan's. Prints the worst error so far after every run, and
fails above 1e-9.
"""

from __future__ import annotations

import argparse
import sys

from flexcp.measure.ranks import RankPool
from flexcp.planners.request import Refused
from flexcp.planners.strategies import STRATEGIES
from lib.tree_runs import TreeSizes, independent_sequences, random_batch, tree_on_ranks, tree_plan, worst_error

RANKS = (1, 2, 3, 5, 8)
LIMIT = 1e-9
LARGE = TreeSizes(depth=16, fan_out=20, segment=300, segments=14, documents=3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="the number of the first batch, to share them over runs")
    parser.add_argument("--small", action="store_true", help="segments of a few tokens")
    parser.add_argument("--sample", type=int, help="so many of the batches, small ones")
    parser.add_argument("--strategies", default=",".join(STRATEGIES))
    parser.add_argument("--ranks", default=",".join(map(str, RANKS)))
    options = parser.parse_args()
    sizes = TreeSizes() if options.small or options.sample else LARGE
    seeds = range(options.first, options.first + options.batches)
    if options.sample:
        seeds = seeds[:: max(1, options.batches // options.sample)]
    names = options.strategies.split(",")
    counts = [int(n) for n in options.ranks.split(",")]
    worst: dict[str, float] = {}
    runs, tokens, sequences, refused, wrong_bytes = 0, 0, 0, 0, 0
    with RankPool(max(counts)) as pool:
        for seed in seeds:
            batch = random_batch(seed, sizes)
            right = independent_sequences(batch)
            tokens += sum(batch.lengths)
            sequences += len(right.log_probs)
            # Over the batches, every strategy meets every number of ranks; each batch has one or two of the pairs.
            for strategy in (names[seed % len(names)], names[(seed // len(counts)) % len(names)]):
                ranks = counts[seed % len(counts)]
                try:
                    plan = tree_plan(batch, strategy, ranks)
                except Refused as error:
                    refused += 1
                    print(f"{strategy} on {ranks} ranks is refused: {error}", file=sys.stderr)
                    continue
                answers = pool.run(tree_on_ranks, batch, plan, ranks=ranks)
                runs += 1
                for found in answers:
                    wrong_bytes += not found.bytes_as_planned
                    for name, error_of in worst_error(found, right).items():
                        worst[name] = max(worst.get(name, 0.0), error_of)
                so_far = f"worst so far {max(worst.values()):.1e}, {wrong_bytes} ranks with other bytes"
                print(f"batch {seed}: {strategy} on {ranks} ranks; {so_far}", file=sys.stderr)
    print(f"{len(seeds)} batches, {tokens:,} tokens of trees, {sequences} sequences; {runs} runs, {refused} refused")
    print("worst errors: " + ", ".join(f"{name} {value:.1e}" for name, value in worst.items()))
    print(f"ranks that sent other bytes than planned: {wrong_bytes}")
    if wrong_bytes or max(worst.values()) > LIMIT:
        raise SystemExit(1)


if __name__ == "__main__":
    main()

"""Our kernels and FlexAttention on trees, forward and backward, on one GPU (meant for an H200).

    python benchmarks/tree_kernels.py                    # 32 / 8 heads of 128, bf16, 65,536 tokens
    python benchmarks/tree_kernels.py --tokens 16384 --kernels triton,hopper,cute

It needs a CUDA GPU and the kernels' packages. The batches are of many trees, as post-training makes them
(``TREE_BATCHES`` of ``flexcp/measure/kernels/work.py``): prompts of some 512 tokens with 16 or 64 rollouts or with
pairs of answers, and agents' runs that branch at their turns. ``--work single`` times the same kinds as one tree of all
tokens (``TREES``). FlexAttention gets each tree as a ``mask_mod`` with one lookup, in its own kernels and, if
installed, in those of FlashAttention-4; we compare with the faster of the two, pass by pass. Our results are checked
against float64 on randomly drawn rows and keys.
"""

from __future__ import annotations

import argparse

import torch

from flexcp.measure.kernels.bench import Heads, Result, bench, matrix_rate, table
from flexcp.measure.kernels.work import TREE_BATCHES, TREES

FLEX = ("flex", "flexfa4")
OURS = ("triton", "hopper", "cute")


def main() -> None:
    """Time everything and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=65_536)
    parser.add_argument("--kernels", default=",".join(OURS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--work", choices=("batches", "single"), default="batches")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks/tree_kernels.py times kernels on a CUDA GPU, and there is none here")
    kernels = options.kernels.split(",")
    names = TREE_BATCHES if options.work == "batches" else TREES
    results = bench(list(names), options.tokens, Heads(32, 8, 128), [*kernels, *FLEX], options.rounds)
    print(table(results, matrix_rate()))
    print("\n".join(beside_flex(results, kernels)))


def beside_flex(results: list[Result], kernels: list[str]) -> list[str]:
    """Return for each tree and pass how many times as fast our fastest kernel is as FlexAttention's fastest,
    in words.
    """
    lines = []
    for name in dict.fromkeys(r.workload for r in results):
        for way in ("forward_ms", "backward_ms"):
            best = {}
            for side, contenders in (("ours", kernels), ("flex", FLEX)):
                times = [
                    (getattr(r, way), r.contender)
                    for r in results
                    if r.workload == name and r.contender in contenders and getattr(r, way) is not None
                ]
                best[side] = min(times, default=None)
            if best["ours"] is None or best["flex"] is None:
                lines.append(f"{name} {way.removesuffix('_ms')}: one side has no time")
                continue
            (ours, kernel), (flex, backend) = best["ours"], best["flex"]
            lines.append(f"{name} {way.removesuffix('_ms')}: {kernel} is {flex / ours:.2f} times as fast as {backend}")
    return lines


if __name__ == "__main__":
    main()

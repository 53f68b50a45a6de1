"""The error rule of ``kernel_cases.py`` applied to the reference itself: its gradient of sinks in float32,
with documents reversed.

    python benchmarks/sinks_control.py --seeds 1000        # minutes on a CPU; no GPU needed

A sink's gradient is one number a head, a sum over all rows whose terms cancel. The rule allows twice the error of the
reference's own number, which is sometimes nearly exact by chance. So the reference is compared with itself by the same
rule: same documents, same arithmetic, another order of rows. How often that breaks the rule shows how much it means if
another kernel breaks it.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
from torch import Tensor

from flexcp.executor.slice_attention import packed_slices
from lib.kernel_cases import MODELS, KernelSetup, error_share, plain_results, random_batch, results


def share(model: KernelSetup, seed: int) -> float:
    """Return the error over the allowed error of the gradient of sinks with documents reversed."""
    rng = np.random.default_rng(seed)
    lengths, masks = random_batch(rng)
    while len(lengths) == 1:  # a single document would not change
        lengths, masks = random_batch(rng)
    tokens, dtype = sum(lengths), getattr(torch, model.dtype)
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64).to(dtype)

    inputs = [normal(tokens, model.heads, model.head_dim), normal(tokens, model.kv_heads, model.head_dim)]
    inputs += [normal(tokens, model.kv_heads, model.v_head_dim)]
    grads, sinks = [normal(tokens, model.heads, model.v_head_dim), normal(tokens, model.heads)], normal(model.heads)

    def backwards(x: Tensor) -> Tensor:
        return torch.cat(x.split(lengths)[::-1])

    slices, reversed_slices = packed_slices(lengths, masks), packed_slices(lengths[::-1], masks[::-1])
    dlse = bool(seed & 2)
    own = plain_results([*inputs, sinks], grads, slices, True, dlse, model.softcap)["dsinks"]
    other = [*map(backwards, inputs), sinks]
    mine = plain_results(other, [*map(backwards, grads)], reversed_slices, True, dlse, model.softcap)["dsinks"]
    wide = ([x.double() for x in [*inputs, sinks]], [g.double() for g in grads])
    exact = results("reference", *wide, slices, True, dlse, model.softcap)["dsinks"]
    return error_share(mine, own, exact, dtype)


def main() -> None:
    """Print how many of the cases with sinks break the rule, for each float32 model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=200)
    asked = parser.parse_args()
    for model in (m for m in MODELS if m.dtype == "float32"):
        shares = [share(model, seed) for seed in range(1, asked.seeds, 2)]  # the seeds of cases with sinks
        broken = sum(s > 1 for s in shares)
        what = f"heads of {model.head_dim}, softcap {model.softcap}"
        print(f"{what}: {broken} of {len(shares)} cases break the rule, the worst by {max(shares):.2f}", flush=True)


if __name__ == "__main__":
    main()

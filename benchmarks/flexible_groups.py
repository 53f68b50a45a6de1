"""Flexible groups' end-to-end comparison, simulated.

Repeats: a language model and a multimodal one, 8 to 64 devices, groups of any size against one fixed degree
(Megatron-LM, DeepSpeed); published 1.46 on average and 2.24 on extremely unbalanced batches.

Differs: devices are the ``ascend910b`` preset; the models are llama3-8b and qwen2.5-vl-7b, lengths ``libra256k`` and ``video``; whole
steps with FSDP. A fixed degree is the best zig-zag or Ulysses degree for all batches of a distribution together, as one would configure
it.
"""

from __future__ import annotations

from collections import defaultdict

from flexcp.clusters import cluster
from flexcp.data.lengths import draw_lengths
from flexcp.models.find import find_model
from simulated import step_of, table

CASES = (("llama3-8b", "libra256k"), ("qwen2.5-vl-7b", "video"))
RANKS = (8, 16, 32, 64)
A_RANK = 8192


def fixed_degrees(seeds: int = 3, ranks: tuple[int, ...] = RANKS) -> list[str]:
    """Step time of groups, auto and the best fixed degree, summed over batches."""
    rows = []
    for model, lengths in CASES:
        for count in ranks:
            where = step_of(find_model(model), cluster("ascend910b", count // 8, 8))
            degrees = [f"zigzag:{d}" for d in (2, 4, 8, 16, 32, 64) if d <= count] + ["ulysses:2", "ulysses:4", "dp"]
            totals: dict[str, int] = defaultdict(int)
            refused = set()
            for seed in range(seeds):
                for row in where.compare(
                    draw_lengths(lengths, A_RANK * count, seed), [*degrees, "groups", "auto"]
                ).rows:
                    if row.simulation is None:
                        refused.add(row.name)
                    else:
                        totals[row.name] += row.ns
            fixed = {n: t for n, t in totals.items() if n in degrees and n not in refused}
            best = min(fixed, key=lambda n: fixed[n])
            texts = [f"{totals[n] / 1e6 / seeds:.0f}" for n in (best, "groups", "auto")]
            texts[0] += f" ({best})"
            texts += [f"{fixed[best] / totals[n]:.2f}" for n in ("groups", "auto")]
            rows.append([model, lengths, str(count), *texts])
    heads = [
        "model",
        "lengths",
        "devices",
        "best fixed degree, ms",
        "groups ms",
        "auto ms",
        "fixed / groups",
        "fixed / auto",
    ]
    return table(heads, rows)


if __name__ == "__main__":
    print("\n".join(fixed_degrees()))

"""Model families under flexcp against one process, in all combinations; writes docs/results/models.md.
Run it on an idle machine.

python benchmarks/models.py --write docs/results/models.md    # 210 runs of 50 (float64) and 10 (float32) steps
python benchmarks/models.py --steps 5 --families llama,gemma2 # a part of it
"""

from __future__ import annotations

import argparse
import datetime
import platform
import time
from collections import defaultdict
from dataclasses import replace
from itertools import product
from pathlib import Path

import torch

from flexcp.measure.ranks import RankPool
from lib.model_runs import (
    FAMILIES,
    LAYOUTS,
    LIMITS,
    RANKS,
    STRATEGIES,
    Difference,
    Run,
    Trained,
    difference,
    train_alone,
    train_on_ranks,
)

FLOAT32_STEPS = 10


def runs(families: list[str], steps: int) -> list[Run]:
    """Return all combinations that are possible."""
    found = []
    for family, dtype, strategy, layout, ranks in product(families, LIMITS, STRATEGIES, LAYOUTS, RANKS):
        if strategy == "groups" and layout != "free":
            continue
        length = steps if dtype == "float64" else min(steps, FLOAT32_STEPS)
        found.append(Run(family, strategy, layout, ranks, dtype, steps=length))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--families", default=",".join(FAMILIES))
    options = parser.parse_args()
    torch.set_num_threads(1)
    families = options.families.split(",")
    results: list[tuple[Run, Difference]] = []
    alone: dict[tuple[str, str], Trained] = {}
    begin = time.perf_counter()
    with RankPool(max(RANKS)) as pool:
        for run in runs(families, options.steps):
            key = (run.family, run.dtype)
            if key not in alone:
                alone[key] = train_alone(replace(run, ranks=1))
            found = difference(pool.run(train_on_ranks, run, ranks=run.ranks)[0], alone[key])
            results.append((run, found))
            ok = "ok" if passed(run, found) else "FAILED"
            print(
                f"{run.family} {run.dtype} {run.strategy} {run.layout} {run.ranks}: {found.loss:.1e} "
                f"{found.gradient:.1e} {ok}",
                flush=True,
            )
    text = page(results, options.steps, time.perf_counter() - begin)
    if options.write:
        options.write.write_text(text)
    print(text)
    if not all(passed(*result) for result in results):
        raise SystemExit(1)


def passed(run: Run, found: Difference) -> bool:
    loss, gradient = LIMITS[run.dtype]
    return found.loss <= loss and found.gradient <= gradient


def page(results: list[tuple[Run, Difference]], steps: int, seconds: float) -> str:
    """Return the page: the worst differences of every family, dtype and strategy over layouts and ranks."""
    import transformers

    worst: dict[tuple[str, str, str], list[Difference]] = defaultdict(list)
    for run, found in results:
        worst[run.family, run.dtype, run.strategy].append(found)
    failed = sum(not passed(*result) for result in results)
    command = "make models" if steps == 50 else f"python benchmarks/models.py --steps {steps}"
    lines = [
        "# Model families against one process",
        "",
        f"**Measured**, by `{command}` on {datetime.date.today()} ({platform.machine()}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}): {len(results)} runs in {seconds / 60:.0f} minutes, {failed} "
        "outside the limits.",
        "",
        f"Each run trains a tiny model of the family for {steps} steps in float64 (limit 1e-9 for loss and gradients) "
        f"or {min(steps, FLOAT32_STEPS)} steps in float32 (loss 1e-5, gradients 1e-4), AdamW, packed documents of 1 to "
        "23 tokens, on real gloo ranks. The single process runs one document at a time through plain dense attention "
        "and knows nothing of flexcp. The numbers are the worst relative differences over layouts (free, contiguous) "
        "and 2, 3 and 4 ranks; gradients are of the first and last step, by parameter.",
        "",
        "| family | dtype | strategy | runs | loss | gradient |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for (family, dtype, strategy), found in worst.items():
        loss, gradient = (max(getattr(f, name) for f in found) for name in ("loss", "gradient"))
        lines.append(f"| {family} | {dtype} | `{strategy}` | {len(found)} | {loss:.1e} | {gradient:.1e} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()

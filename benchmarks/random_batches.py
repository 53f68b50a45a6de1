"""``auto``'s regret in random batches: ``python benchmarks/random_batches.py --cells 200``.

Tables of other pages are about common clusters, models and sizes. Here a cell is drawn at random from what others leave
out: nodes of 2 to 8 ranks and odd numbers of them, 1,024 to 32,768 tokens a rank, one long document or documents of
equal length, all masks, many numbers of heads, head sizes of 64 to 256, equal tokens and ranks of unequal speed. What
is timed is attention alone, a layer of the stated dense model, or a whole step of llama3-8b under FSDP. *Regret* is the
time of ``auto`` over that of the fastest plan; the others are every static method in every degree, dealt by tokens and
by load, ``blocks``, ``groups`` and the published planners. Everything is simulated, with the simulator by which
``auto`` chooses, so this finds what it does not try or passes over, and not what it predicts wrongly.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import statistics
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace

from flexcp.batch import make_batch
from flexcp.clusters import Cluster, cluster
from flexcp.compare.compare import attention_only, planned
from flexcp.cost import CostModel
from flexcp.data.lengths import draw_lengths
from flexcp.masks import Mask, causal, causal_blockwise, full, lambda_, shared_question, window
from flexcp.models.find import find_model
from flexcp.planners.auto.auto import auto_plan, step_ns
from flexcp.planners.request import Refused, Request
from flexcp.planners.static.bounds import dealt_by_load, static_methods
from flexcp.shape import Shape
from flexcp.simulator.step_parts import Training
from lib.progress import tracked
from simulated import table

PRESETS = ("h100", "a100", "h20", "h200")
NODES = (
    (1, 2),
    (1, 3),
    (1, 5),
    (1, 8),
    (2, 2),
    (2, 4),
    (2, 8),
    (3, 4),
    (3, 8),
    (4, 2),
    (5, 1),
    (7, 1),
    (8, 2),
    (16, 1),
)
HEADS = ((32, 8), (8, 1), (8, 2), (4, 1), (16, 16), (40, 8), (64, 8), (12, 4), (24, 3), (28, 4), (9, 3))
HEAD_SIZES = (64, 128, 128, 128, 256)
TOKENS = (1024, 2048, 4096, 8192, 16_384, 32_768)
LENGTHS = ("web", "libra256k", "longalign", "longtail", "bimodal", "video", "half", "equal", "one")
MASKS = (*[causal()] * 6, full(), window(1023, 0), lambda_(), shared_question(), causal_blockwise())
KINDS = ("attention", "layer", "step")
OTHERS = ("blocks", "groups", "minheap", "hdp", "fcp", "dhp", "pow2", "wlb")
SMALL = 4096
"""Up to so many tokens a rank a batch counts as small."""
NOTICED = 1.005


@dataclass(frozen=True)
class Regret:
    """A cell in words, the tokens of a rank, what ``auto`` took, the fastest strategy, and the times' ratio."""

    words: str
    tokens: int
    auto: str
    best: str
    ratio: float


def drawn(number: int) -> tuple[Request, str, int]:
    """Return the request of a cell, the cell in words, and the tokens of a rank; a number means the same always."""
    draw = random.Random(number)
    where = cluster(draw.choice(PRESETS), *draw.choice(NODES))
    shape = Shape(*draw.choice(HEADS), *[draw.choice(HEAD_SIZES)] * 2)
    kind, mask = draw.choice(KINDS), draw.choice(MASKS)
    tokens, name, equal = draw.choice(TOKENS), draw.choice(LENGTHS), draw.random() < 0.2
    if draw.random() < 0.1:
        where = replace(where, speeds=tuple(draw.choice((1000, 930, 700)) for _ in range(where.ranks)))
    lengths = _lengths(name, tokens * where.ranks, number, draw)
    heads = f"{shape.heads} / {shape.kv_heads} of {shape.head_dim}" if kind != "step" else "llama3-8b"
    speeds = ", unequal speeds" if where.speeds else ""
    words = (
        f"{kind}, {where.name} {where.nodes} x {where.ranks_per_node}{speeds}, {heads}, {tokens:,} a rank"
        f"{', equal tokens' if equal else ''}, {name}, {mask}"
    )
    return _request(kind, lengths, mask, shape, where, equal), words, tokens


def _lengths(name: str, tokens: int, seed: int, draw: random.Random) -> list[int]:
    if name == "half":
        return [tokens // 2, *draw_lengths("web", tokens - tokens // 2, seed)]
    if name == "equal":
        documents = draw.choice((2, 3, 5, 8, 13, 40))
        return [tokens // documents] * documents
    return [tokens] if name == "one" else draw_lengths(name, tokens, seed)


def _request(kind: str, lengths: list[int], mask: Mask, shape: Shape, where: Cluster, equal: bool) -> Request:
    if kind == "step":
        preset = find_model("llama3-8b")
        batch = make_batch(lengths, masks={"mask": (mask, preset.model.layers)})
        known = (batch, preset.shape, where, CostModel(model=preset.model))
        return Request(*known, training=Training(preset, "fsdp"), equal_tokens=equal)
    asked = Request(make_batch(lengths, mask), shape, where, CostModel(), equal_tokens=equal)
    return attention_only(asked) if kind == "attention" else asked


def regret(number: int) -> Regret:
    """Plan and simulate a cell in every way."""
    request, words, tokens = drawn(number)
    plan = auto_plan(request)
    own = step_ns(plan, request.training)
    best = (own, "auto")
    methods = static_methods(request)
    for name in (*(m.name for m in (*methods, *dealt_by_load(methods, request))), *OTHERS):
        try:
            _, other = planned(request, name, search=False)
        except Refused:
            continue
        best = min(best, (step_ns(other, request.training), name), key=lambda each: each[0])
    return Regret(words, tokens, plan.strategy, best[1], own / best[0])


def main() -> None:
    """Print regret over small and larger batches, and the worst cells."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", type=int, default=200)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    asked = parser.parse_args()
    with ProcessPoolExecutor(asked.processes, multiprocessing.get_context("spawn")) as pool:
        found = list(tracked(pool.map(regret, range(asked.cells)), "cells", asked.cells))
    rows = []
    for words, some in (
        (f"up to {SMALL:,}", [r for r in found if r.tokens <= SMALL]),
        (f"over {SMALL:,}", [r for r in found if r.tokens > SMALL]),
        ("all", found),
    ):
        ratios = [r.ratio for r in some]
        behind = sum(ratio > NOTICED for ratio in ratios)
        rows.append([words, str(len(some)), f"{statistics.mean(ratios):.4f}", f"{max(ratios):.3f}", str(behind)])
    heads = ["tokens a rank", "batches", "mean regret", "worst", f"over {NOTICED}"]
    print("\n".join(table(heads, rows)))
    worst = sorted(found, key=lambda r: -r.ratio)[:10]
    lines = [[r.words, r.auto, r.best, f"{r.ratio:.3f}"] for r in worst]
    print("\n".join(table(["batch", "auto took", "fastest", "regret"], lines)))


if __name__ == "__main__":
    main()

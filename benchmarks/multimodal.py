"""Vision-language batches under static layouts, ``groups`` and ``blocks``: balance, bytes, predicted and measured time.

``make multimodal`` writes docs/results/multimodal.md. There are two kinds of batches, with the sizes of the ``video``
and ``images`` distributions: documents that are one long video, and documents of text with a few images. Encoder and
language model are Qwen2-VL 7B's, except in the table by model. A step runs both, one after the other; a static layout
uses the same method for both, as users do.

The measured part runs the attention of one layer of each on CPU ranks of this machine, forward and backward, with
lengths divided by ``SHRINK``. Only its ratios are meaningful, and since ranks share cores, these reflect total work
more than balance.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console

import flexcp
from flexcp.arrays.totals import imbalance
from flexcp.clusters import Cluster
from flexcp.data.images import ImageBatch, Span
from flexcp.data.lengths import draw_lengths
from flexcp.executor.local_rows import local_stream
from flexcp.plan.plan import Plan
from flexcp.planners.request import Refused
from flexcp.schedule.predict import predict
from papers_dhp import fixed_methods
from vision_models import MODELS, VisionModel, part_ns, video_batch

if TYPE_CHECKING:
    import torch.distributed as dist

FRAME = 256
"""Tokens of a video's frame; it has four times as many patches."""
LAYERS = {"encoder": 32, "language": 28}
SEEDS = 3
MODEL_SEEDS = 2
TOKENS_A_RANK = 8192
CLUSTERS = {"h100 1x8": flexcp.cluster("h100", 1, 8), "h100 8x8": flexcp.cluster("h100", 8, 8)}
STATIC = ("dp", "zigzag", "zigzag:8", "allgather", "allgather:8", "ulysses:4", "usp:4,2", "usp:4,4")
DYNAMIC = ("groups", "blocks")
EACH = "best static for each part"
SHRINK, MEASURED_RANKS, REPEATS = 16, 4, 5


def batch_of(kind: str, tokens: int, seed: int) -> ImageBatch:
    """Return a batch of about this many tokens: videos with a little text, or text with images."""
    rng = np.random.default_rng(seed)
    lengths, spans = [], []
    if kind == "video":
        for n in draw_lengths("video", tokens, seed):
            frames = int(n * 0.9) // FRAME
            lengths.append(n)
            spans.append((Span(16, 16 + frames * FRAME, frames),) if frames else ())
        return ImageBatch(tuple(lengths), tuple(spans))
    sizes = [max(1, n // 4) for n in draw_lengths("images", 3 * tokens, seed)]
    while sum(lengths) < tokens and sizes:
        at, here = int(rng.integers(8, 512)), []
        for _ in range(int(rng.integers(1, 9))):
            if sizes:
                size = sizes.pop()
                here.append(Span(at, at + size))
                at += size + int(rng.integers(8, 512))
        lengths.append(at)
        spans.append(tuple(here))
    return ImageBatch(tuple(lengths), tuple(spans))


def planners(where: Cluster, strategy: str, dtype: str = "bfloat16") -> dict[str, flexcp.Planner]:
    encoder = flexcp.Model("vision", 1280, LAYERS["encoder"], 3413)  # as much as two matrices of 5,120
    language = flexcp.Model("language", 3584, LAYERS["language"], 18944)
    return {
        "encoder": flexcp.Planner(16, 16, 80, dtype=dtype, cluster=where, strategy=strategy, model=encoder),
        "language": flexcp.Planner(28, 4, 128, dtype=dtype, cluster=where, strategy=strategy, model=language),
    }


def plans_of(batch: ImageBatch, where: Cluster, strategy: str, dtype: str = "bfloat16") -> dict[str, Plan]:
    made = planners(where, strategy, dtype)
    return {
        "encoder": made["encoder"](batch.encoder_lengths, masks={"full": (flexcp.full(), LAYERS["encoder"])}),
        "language": made["language"](batch.lengths, masks={"spans": (batch.masks(), LAYERS["language"])}),
    }


@dataclass(frozen=True)
class Row:
    """Numbers of one part of a batch under a plan:
    largest over mean, megabytes a layer forward and backward, milliseconds a step.
    """

    compute: float
    tokens: float
    megabytes: float
    milliseconds: float


def row_of(plan: Plan) -> Row:
    moved = int(plan.bytes().sum() + plan.bytes(backward=True).sum())
    found = predict(plan.placement, plan.shape, plan.cluster, plan.cost)
    return Row(imbalance(plan.work()), imbalance(plan.placement.tokens), moved / 1e6, found.total_ns / 1e6)


def beside(batch: ImageBatch, where: Cluster, language: Plan) -> float:
    """Return the milliseconds of the encoder if every image is encoded where its tokens are kept,
    with work placed as well as that allows.
    """
    sources = batch.sources()
    padded = np.concatenate([sources, np.full((language.placement.pads, batch.merge), -1)])
    held = [padded[local_stream(language.placement, rank)] for rank in range(where.ranks)]
    maps = [part[part[:, 0] >= 0].reshape(-1) for part in held]
    planner = planners(where, "blocks")["encoder"]
    full = {"full": (flexcp.full(), LAYERS["encoder"])}
    return row_of(planner(batch.encoder_lengths, masks=full, layout=maps)).milliseconds


def mean(rows: list[Row]) -> Row:
    columns = ("compute", "tokens", "megabytes", "milliseconds")
    return Row(*(statistics.fmean(getattr(r, c) for r in rows) for c in columns))


def compared(kind: str, where: Cluster, console: Console) -> dict[str, dict[str, Row]]:
    """Return the mean rows of encoder and language model for every strategy that can run,
    and for the best static ones in each batch.
    """
    found: dict[str, list[dict[str, Row]]] = {name: [] for name in (*STATIC, *DYNAMIC)}
    for seed in range(SEEDS):
        batch = batch_of(kind, TOKENS_A_RANK * where.ranks, seed)
        for name in list(found):
            try:
                found[name].append({part: row_of(plan) for part, plan in plans_of(batch, where, name).items()})
            except Refused:
                del found[name]
        console.print(
            f"{kind}, {where.ranks} ranks, batch {seed}: {len(batch.lengths)} documents, {len(batch.encoder_lengths)} "
            "frames"
        )
    static = [name for name in STATIC if name in found]
    best = [min((found[name][s] for name in static), key=total) for s in range(SEEDS)]
    parts = [
        {part: min((found[n][s][part] for n in static), key=lambda r: r.milliseconds) for part in LAYERS}
        for s in range(SEEDS)
    ]
    every = {name: {part: mean([r[part] for r in rows]) for part in LAYERS} for name, rows in found.items()}
    summed = {
        name: {part: mean([r[part] for r in rows]) for part in LAYERS}
        for name, rows in (("best static", best), (EACH, parts))
    }
    return summed | every


def total(rows: dict[str, Row]) -> float:
    return sum(row.milliseconds for row in rows.values())


def by_model(seeds: int, clusters: dict[str, Cluster]) -> list[str]:
    """Return table lines of whole models: both parts under one static method, under `dhp`, and under ``auto``."""
    lines = []
    for name, where in clusters.items():
        for model in MODELS.values():
            batches = [video_batch(TOKENS_A_RANK * where.ranks, seed, model.window) for seed in range(seeds)]
            lines.append(f"| {model.name} | {name} | " + " | ".join(_model_cells(model, batches, where)) + " |")
    return lines


def _model_cells(model: VisionModel, batches: list[ImageBatch], where: Cluster) -> list[str]:
    methods = fixed_methods(where.ranks)["any fixed"]
    found = {each: [part_ns(model, batch, where, each) for batch in batches] for each in (*methods, "dhp", "auto")}
    steps = {each: [sum(parts) for parts in all_parts if parts] for each, all_parts in found.items()}
    ran = {each: times for each, times in steps.items() if len(times) == len(batches)}
    static = [each for each in methods if each in ran]
    fixed = min(static, key=lambda each: sum(ran[each]))
    best = [min(ran[each][batch] for each in static) for batch in range(len(batches))]
    encoder, language = (statistics.fmean(parts[i] for parts in found["auto"] if parts) / 1e6 for i in range(2))
    means = [statistics.fmean(times) / 1e6 for times in (best, ran[fixed], ran["dhp"], ran["auto"])]
    texts = [
        f"{encoder:,.1f}",
        f"{language:,.1f}",
        f"{means[0]:,.1f}",
        f"{means[1]:,.1f} ({fixed})",
        *(f"{x:,.1f}" for x in means[2:]),
    ]
    return [*texts, f"{means[0] / means[3]:.2f}", f"{means[1] / means[3]:.2f}"]


# --- measured ---------------------------------------------------------------------------------------------------------


def timed(group: dist.ProcessGroup, plans: dict[str, Plan]) -> float:
    """Return the seconds of the slowest rank for the attention of one layer of both parts, forward and backward."""
    import torch
    import torch.distributed as dist

    seconds = []
    steps = {part: flexcp.bind(plan, group) for part, plan in plans.items()}
    for _ in range(REPEATS + 1):
        spent = 0.0
        for step in steps.values():
            shape, n = step.plan.shape, step.local_tokens
            q, k, v = (
                torch.randn(n, heads, shape.head_dim, requires_grad=True)
                for heads in (shape.heads, shape.kv_heads, shape.kv_heads)
            )
            dist.barrier(group)
            begin = time.perf_counter()
            out: Any = flexcp.attention(q, k, v, step)
            out.sum().backward()
            spent += time.perf_counter() - begin
        slowest = torch.tensor(spent)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=group)
        seconds.append(float(slowest))
    return statistics.median(seconds[1:])


def measured(kind: str) -> dict[str, float]:
    """Return the seconds of a shrunk batch under static layouts and under ours, on CPU ranks."""
    from flexcp.measure.ranks import RankPool

    whole = batch_of(kind, TOKENS_A_RANK * MEASURED_RANKS, 0)
    spans = [
        [Span(s.start // SHRINK, max(s.start // SHRINK + 1, s.stop // SHRINK)) for s in spans] for spans in whole.spans
    ]
    ends = [max([n // SHRINK, 1, *(s.stop for s in here)]) for n, here in zip(whole.lengths, spans, strict=True)]
    batch = ImageBatch(tuple(ends), tuple(tuple(here) for here in spans))
    where = flexcp.cluster("cpu", 1, MEASURED_RANKS)
    with RankPool(MEASURED_RANKS) as pool:
        return {
            name: pool.run(timed, plans_of(batch, where, name, "float32"))[0]
            for name in ("zigzag", "allgather", *DYNAMIC)
        }


# --- the page ---------------------------------------------------------------------------------------------------------


def page(console: Console, measure: bool) -> str:
    """Return the page."""
    made = f"{date.today()}, {platform.machine()}"
    encoder, language = (f"{LAYERS[part]} layers" for part in LAYERS)
    columns = "compute | tokens | MB | ms"
    lines = [
        "# Vision-language batches",
        "",
        f"**Simulated**, by `make multimodal` on {made}, but for the last table, which is measured on CPU ranks.",
        "",
        "## Balance, bytes and time",
        "",
        f"Predicted by the closed form with cost model `analytic` ([errors](errors.md)), mean of {SEEDS} batches with "
        f"about {TOKENS_A_RANK:,} tokens a rank, Qwen2-VL 7B's encoder (16 heads of 80, {encoder}) and language model "
        f"(28 / 4 heads of 128, {language}). *Best static* is the best of {', '.join(STATIC)} in each batch, the same "
        "for both parts, as users run it; *for each part* may be a different one for encoder and language model, "
        "which needs two layouts and an exchange between them. Compute and tokens are the largest over the mean; MB "
        "are those of one layer, forward and backward, over all ranks.",
        "",
        f"| cluster | lengths | strategy | encoder {columns} | language {columns} | step ms | gain over best static |",
        "| --- " * 13 + "|",
    ]
    for cluster_name, where in CLUSTERS.items():
        for kind in ("video", "images"):
            found = compared(kind, where, console)
            base = total(found["best static"])
            shown = ["best static", EACH, *(n for n in ("zigzag", "allgather") if n in found), *DYNAMIC]
            for name in shown:
                cells = [
                    f"{r.compute:.2f} | {r.tokens:.2f} | {r.megabytes:,.0f} | {r.milliseconds:,.1f}"
                    for r in (found[name][part] for part in LAYERS)
                ]
                gain = base / total(found[name])
                lines.append(
                    f"| {cluster_name} | {kind} | {name} | {' | '.join(cells)} | {total(found[name]):,.1f} | "
                    f"{gain:.2f} |"
                )
    lines += [
        "",
        "## One plan or two",
        "",
        "Simulated: the encoder under a plan of its own, and on the ranks that keep its tokens.",
        "",
    ]
    lines += ["| lengths | encoder under its own plan, ms | where its tokens are kept, ms |", "| --- | --- | --- |"]
    where = CLUSTERS["h100 1x8"]
    for kind in ("video", "images"):
        batch = batch_of(kind, TOKENS_A_RANK * where.ranks, 0)
        plans = plans_of(batch, where, "blocks")
        own = row_of(plans["encoder"]).milliseconds
        lines.append(f"| {kind} | {own:,.1f} | {beside(batch, where, plans['language']):,.1f} |")
    lines += [
        "",
        "## By model",
        "",
        f"Simulated by events, whole steps with FSDP, mean of {MODEL_SEEDS} batches of videos: encoder and language "
        "model of each family, one after the other, with spans that see both ways. Qwen2.5-VL's encoder attends in "
        "windows in 28 of 32 layers, the other encoders over frames. Static methods are rings, Ulysses and both "
        "combined in all powers of two, and data parallelism; the same for both parts.",
        "",
        "| model | cluster | encoder, auto ms | language, auto ms | step: best static of each batch | one fixed | dhp "
        "| auto | auto over static of each batch | over one fixed |",
        "| --- " * 10 + "|",
        *by_model(MODEL_SEEDS, CLUSTERS),
    ]
    lines += ["", "## Measured on CPU ranks", ""]
    if not measure:
        return (
            "\n".join([*lines, "Not measured when this page was made; `make multimodal` measures on an idle machine."])
            + "\n"
        )
    lines += [
        f"Measured on {date.today()}: attention of one layer of each part, forward and backward, {MEASURED_RANKS} gloo "
        f"ranks of this machine, lengths divided by {SHRINK}, median of {REPEATS}.",
        "",
        "| lengths | strategy | seconds | gain over zigzag |",
        "| --- | --- | --- | --- |",
    ]
    for kind in ("video", "images"):
        seconds = measured(kind)
        lines += [f"| {kind} | {name} | {s:.3f} | {seconds['zigzag'] / s:.2f} |" for name, s in seconds.items()]
    return "\n".join(lines) + "\n"


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--write", type=Path, help="file for the page")
    arguments.add_argument("--no-measure", action="store_true", help="leave the measured part out")
    given = arguments.parse_args()
    console = Console(stderr=True)
    text = page(console, not given.no_measure)
    print(text)
    if given.write:
        given.write.write_text(text)


if __name__ == "__main__":
    main()

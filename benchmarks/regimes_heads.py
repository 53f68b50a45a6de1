"""The part of the page of regimes about tensor parallelism that leaves a rank one KV head, and multi-head latents.

Each row has the mean gain of ``auto`` over the best static method of each batch, documents dealt by tokens, attention
alone; and the most that it could be, the time of that method over the floor: perfectly divided compute or unavoidable
communication, whichever takes longer. ``regimes.py`` puts the table on its page.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from flexcp.clusters import Cluster, cluster
from flexcp.compare.compare import STATIC, attention_only
from flexcp.data.lengths import draw_lengths
from flexcp.models.find import find_model
from flexcp.models.topology import topology
from flexcp.shape import Shape
from flexcp.simulator.bounds import pass_bounds
from lib.progress import tracked
from simulated import Experiment, row_of, table

LENGTHS = ("web", "libra256k", "longalign", "longtail", "bimodal", "video")
TOKENS = (8192, 32_768)
LARGE, FOUR = find_model("llama3-70b").shape, Shape(32, 4, 128, 128)
LATENT = Shape(16, 1, 192, 128, latent=576)
"""A rank of DeepSeek-V3, which has 128 heads, under tensor parallelism of 8."""


def _divided(nodes: int, shape: Shape, tp: int) -> Cluster:
    """Return the ranks of context parallelism on nodes of 8 GPUs under tensor parallelism."""
    return topology(cluster("h100", nodes, 8), shape, tp=tp).cluster


@dataclass(frozen=True)
class Heads:
    """Query and KV heads on a rank, the clusters they are on, and the lengths."""

    words: str
    shape: Shape
    clusters: tuple[Cluster, ...]
    lengths: tuple[str, ...] = LENGTHS


SINGLE = tuple(_divided(nodes, LARGE, 8) for nodes in (32, 64))
SETTINGS = (
    Heads("8 / 1 heads, 32 and 64 nodes of one rank (tp 8)", Shape(8, 1, 128, 128), SINGLE),
    Heads("4 / 1 heads, 32 and 64 nodes of one rank (tp 8)", Shape(4, 1, 128, 128), SINGLE),
    Heads(
        "8 / 1 heads, 4, 8 and 16 nodes of two ranks (tp 4 of 4 KV heads)",
        Shape(8, 1, 128, 128),
        tuple(_divided(nodes, FOUR, 4) for nodes in (4, 8, 16)),
        ("web", "libra256k"),
    ),
    Heads(
        "8 / 1 heads, 1, 4 and 8 nodes of 8 ranks (multi-query)",
        Shape(8, 1, 128, 128),
        tuple(cluster("h100", nodes, 8) for nodes in (1, 4, 8)),
    ),
    Heads(
        "latents, 16 heads of 192 / 128, 4 and 8 nodes of 8 ranks", LATENT, tuple(cluster("h100", n, 8) for n in (4, 8))
    ),
)


def gains(shape: Shape, where: Cluster, lengths: str, tokens: int) -> tuple[float, float]:
    """Return (gain of ``auto`` over the best static method of the batch, the most that it could be)."""
    experiment, batch = Experiment(where, shape), draw_lengths(lengths, tokens * where.ranks, 0)
    found = experiment.compare(batch, ["auto", *STATIC])
    asked = attention_only(experiment.request(batch))
    known = (asked.shape, asked.cluster, asked.cost)
    floor = sum(pass_bounds(asked.batch, 0, *known, way).floor for way in (False, True))
    assert found.best_static is not None
    return found.best_static.ns / row_of(found, "auto").ns, found.best_static.ns / floor


def section() -> list[str]:
    """Return the lines of the section: what its columns are, and a row for each setting and number of tokens."""
    cases = [(heads, tokens) for heads in SETTINGS for tokens in TOKENS]
    rows = []
    for heads, tokens in tracked(cases, "heads"):
        found = [gains(heads.shape, where, name, tokens) for where in heads.clusters for name in heads.lengths]
        gain, most = zip(*found, strict=True)
        numbers = (statistics.geometric_mean(gain), statistics.mean(gain), min(gain), max(gain))
        rows.append(
            [
                heads.words,
                f"{tokens:,}",
                str(len(found)),
                *(f"{x:.2f}" for x in numbers),
                f"{statistics.geometric_mean(most):.2f}",
            ]
        )
    columns = ["heads and nodes", "tokens a rank", "batches", "gain", "arithmetic mean", "worst", "best", "at most"]
    return [
        "## Few KV heads a rank",
        "",
        "Attention alone, gains over the best static method of the batch, documents dealt by tokens. *At most* is what "
        "the gain would be at the floor: perfectly divided compute or unavoidable communication, whichever takes "
        "longer. Rows with two ranks a node are of web and libra256k, the others of all six distributions. Latents are "
        "compared with methods that leave queries at home, because latent attention runs no others.",
        "",
        *table(columns, rows),
    ]

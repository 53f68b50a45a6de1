"""The part of the page of ``groups`` about teams that divide keys: attention alone, over what else would be taken.

A row has the gain over the fastest of all other strategies that plan for time: ``blocks``, ``groups`` that split by
rows or heads, and every static method in its best degree, each simulated. ``groups.py`` puts the table on its page.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from flexcp.clusters import Cluster, cluster
from flexcp.compare.compare import STATIC
from flexcp.data.lengths import draw_lengths
from flexcp.models.topology import topology
from flexcp.planners.groups.groups import searched_by_keys, searched_settings
from flexcp.shape import Shape
from lib.progress import tracked
from regimes_heads import FOUR, LENGTHS, TOKENS
from simulated import Experiment, table


@dataclass(frozen=True)
class Setting:
    """Ranks with few KV heads for their nodes."""

    words: str
    where: Cluster
    shape: Shape


SETTINGS = (
    Setting("8 / 2 heads, 8 nodes of 4 A100", cluster("a100", 8, 4), Shape(8, 2, 128, 128)),
    Setting("8 / 2 heads, 4 nodes of 8 A100", cluster("a100", 4, 8), Shape(8, 2, 128, 128)),
    Setting("8 / 1 heads, 8 nodes of 2 A100", cluster("a100", 8, 2), Shape(8, 1, 128, 128)),
    Setting("16 / 2 heads, 4 nodes of 4 A100", cluster("a100", 4, 4), Shape(16, 2, 128, 128)),
    Setting(
        "8 / 1 heads, 16 nodes of 2 H100 (4 KV heads under tp 4)",
        topology(cluster("h100", 16, 8), FOUR, tp=4).cluster,
        Shape(8, 1, 128, 128),
    ),
    Setting("8 / 1 heads, 4 nodes of 8 H100", cluster("h100", 4, 8), Shape(8, 1, 128, 128)),
)


def gain(setting: Setting, tokens: int, lengths: str, seed: int = 0) -> float:
    """Return how many times as fast the best teams that divide keys are as the fastest other strategy."""
    experiment = Experiment(setting.where, setting.shape)
    batch = draw_lengths(lengths, tokens * setting.where.ranks, seed)
    asked = experiment.request(batch)
    by_keys, rest = ([f"groups:{one}" for one in found(asked)] for found in (searched_by_keys, searched_settings))
    rows = experiment.compare(batch, [*by_keys, *rest, "blocks", *STATIC]).rows
    times = {row.name: row.ns for row in rows if row.simulation}
    best = min(times.pop(name) for name in by_keys)
    return min(times.values()) / best


def section() -> list[str]:
    """Return the lines of the section: what its columns are, and a row for each setting and number of tokens."""
    cases = [(setting, tokens) for setting in SETTINGS for tokens in TOKENS]
    rows = []
    for setting, tokens in tracked(cases, "keys"):
        gains = [gain(setting, tokens, name) for name in LENGTHS]
        faster = sum(one > 1 for one in gains)
        numbers = f"{statistics.geometric_mean(gains):.2f}", f"{min(gains):.2f}", f"{max(gains):.2f}"
        rows.append([setting.words, f"{tokens:,}", *numbers, f"{faster} of {len(gains)}"])
    return [
        "## Teams that divide keys",
        "",
        "**Simulated** by events, attention alone, heads of 128, causal, seed 0: the fastest of `groups:team=..+"
        "split=keys` (sizes of teams that `auto` tries, other settings searched) against the fastest of `blocks`, "
        "`groups` that split by rows or heads, and all static methods in their best degrees. Means are geometric, over "
        f"{', '.join(LENGTHS)}. `auto` tries these teams where nodes have more ranks than KV heads, and takes what is "
        "simulated to be fastest.",
        "",
        *table(["heads and nodes", "tokens a rank", "gain", "worst", "best", "faster"], rows),
    ]

"""Trust, telemetry: what it costs to follow a step on a GPU.

It has the two figures of :mod:`telemetry`: layers with and without telemetry in turns, and its time stamps alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import flexcp
from flexcp.data.lengths import parse_lengths
from lib.trust_ranks import Row, Setting, attempted, on_ranks
from telemetry import figures, measure

MOST = 0.01
"""The share of a layer's time that telemetry may cost."""


def rows(setting: Setting) -> Iterator[Row]:
    """Yield rows for one rank with long and short layers, then for two ranks."""
    for ranks, lengths, rounds in _cases(setting.small):
        yield attempted(setting, f"{lengths}, causal", ranks, partial(_timed, setting, ranks, lengths, rounds))


def _timed(setting: Setting, ranks: int, lengths: str, rounds: int) -> Row:
    """Return the row of one case; ``rounds`` is how many layers are timed."""
    heads = (4, 1, 128) if setting.small else (32, 8, 128)
    strategy = "blocks" if ranks > 1 else "dp"
    planner = flexcp.Planner(*heads, dtype=setting.dtype, cluster=setting.cluster(ranks), strategy=strategy)
    asked = (planner(parse_lengths(lengths), flexcp.causal()), rounds, False, setting.device)
    times = [measure(None, *asked)] if ranks == 1 else on_ranks(setting, ranks, measure, *asked, patience=150)
    off, on, alone = figures(times)
    return {
        "layers": rounds,
        "ms without": 1e3 * off,
        "ms with": 1e3 * on,
        "ratio": on / off,
        "us of stamps": 1e6 * alone,
        "share of stamps": alone / off,
        "ok": on / off <= 1 + MOST if setting.device == "cuda" else None,
    }


def _cases(small: bool) -> list[tuple[int, str, int]]:
    """Return (ranks, lengths, layers) of each case."""
    if small:
        return [(1, "100,28", 2), (2, "100,28", 2)]
    return [(1, "16384", 300), (1, "web:65536:0", 200), (1, "4096", 300), (2, "web:16384:0", 60)]

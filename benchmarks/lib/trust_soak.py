"""Trust, soak: run :mod:`lib.soaking` on ranks of one GPU, for as long as the part has time."""

from __future__ import annotations

from collections.abc import Iterator

from lib.soaking import SETTLED, soaked
from lib.trust_ranks import Row, Setting, on_ranks
from soak import verdicts

STEPS = 5000
"""The most steps of a soak."""
SPARE = 20.0
"""Seconds of the part's time that are kept for starting ranks and for the last reading."""


def rows(setting: Setting) -> Iterator[Row]:
    """Yield a row for each rank."""
    steps, settled = (40, 10) if setting.small else (STEPS, SETTLED)
    seconds = max(5.0, setting.left - SPARE)
    answers = on_ranks(setting, 2, soaked, steps, settled, setting.seed, setting.device, seconds)
    for rank, found in enumerate(answers):
        grown = verdicts([found.before], [found.after], found.same) + list(found.wrong)
        if setting.small:  # memory has not settled after so few steps
            grown = [line for line in grown if "memory" not in line]
        yield {
            "what": f"rank {rank}",
            "ranks": len(answers),
            "settled": found.settled,
            "steps": found.steps,
            "before": vars(found.before),
            "after": vars(found.after),
            "same bits": found.same,
            "ok": not grown,
            "why": "; ".join(line.removeprefix("rank 0: ") for line in grown) or None,
        }

"""Campaign: many cases one after the other, failing ones shrunk and written to files, and what was covered.

Case ``n`` of seed ``s`` is the same in every campaign. Which cases run on real ranks follows from the number too.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from flexcp.fuzz.cases import Case, save_case
from flexcp.fuzz.draw import ON_RANKS, draw
from flexcp.fuzz.judge import Extras, Outcome, judge
from flexcp.fuzz.shrink import shrunk
from flexcp.measure.ranks import RankPool

SHRINKING_SECONDS = 60.0
MOST_FAILURES = 10
"""A campaign ends when so many cases have failed: one mistake fails many."""
PATIENCE = 300.0
"""Seconds for ranks to answer, on a busy machine too; what they wait for among each other has a limit below that."""


@dataclass(frozen=True)
class Failure:
    """A failing case: its number, the file it was shrunk to, which check failed and what it said."""

    number: int
    file: Path
    check: str
    message: str


@dataclass
class Found:
    """What a campaign did, and what was in it."""

    seed: int
    cases: int = 0
    plans: int = 0
    refused: int = 0
    on_ranks: int = 0
    seconds: float = 0.0
    slowest: tuple[float, int] = (0.0, -1)
    """Seconds of the slowest case, and its number."""
    failures: list[Failure] = field(default_factory=list)
    covered: dict[str, Counter[str]] = field(default_factory=dict)

    def note(self, case: Case, outcome: Outcome) -> None:
        """Count a case among what it covers; refused ones cover nothing."""
        self.cases += 1
        self.plans += outcome.plans
        if outcome.verdict == "refused":
            self.refused += 1
            return
        words = [layer.words if layer.each else [layer.words] for layer in case.layers]
        layout = case.call.get("layout", case.call.get("tokens", "free"))
        told = {
            name for name, value in case.planner.items() if name not in ("strategy", "effort") and value is not None
        }
        facts = {
            "strategy": {case.strategy.partition(":")[0].partition("@")[0]},
            "mask": {word[0] for some in words for word in some},
            "ranks": {str(case.cluster)[len(case.machine["name"]) + 1 :]},
            "dtype": {str(case.attention["dtype"])},
            "layout": {"index map" if isinstance(layout, list) else layout},
            "masks a model": {str(len(case.layers))},
            "option": told | ({"micro_batches"} if case.micro_batches else set()),
        }
        for what, values in facts.items():
            self.covered.setdefault(what, Counter()).update(values)


def campaign(
    seed: int,
    share: float,
    folder: Path,
    more: Callable[[int, float], bool],
    tell: Callable[[Found], None] = lambda _: None,
    most_ranks: int = ON_RANKS,
    started: Callable[[RankPool], None] = lambda _: None,
) -> Found:
    """Judge cases until ``more(cases, seconds)`` says no; the ``share`` of them that runs on real ranks is between 0 and 1.

    At most ``most_ranks`` processes are started for those, and ``started`` is told of every pool of them.
    """
    found, begin = Found(seed), time.monotonic()
    with _Ranks(most_ranks, started) as ranks:
        while more(found.cases, time.monotonic() - begin) and len(found.failures) < MOST_FAILURES:
            number, since = found.cases, time.monotonic()
            on_ranks = int((number + 1) * share) > int(number * share)
            case = draw(seed, number, most_ranks if on_ranks else None)
            extras = Extras(number % 4 == 0, number % 7 == 0, number % 9 == 0, ranks.pool() if on_ranks else None)
            outcome = judge(case, extras)
            found.note(case, outcome)
            found.on_ranks += on_ranks and outcome.verdict == "passed"
            if outcome.verdict == "failed":
                found.failures.append(_failure(number, case, outcome, extras, ranks, folder, seed))
            found.slowest = max(found.slowest, (time.monotonic() - since, number))
            found.seconds = time.monotonic() - begin
            tell(found)
    return found


def _failure(
    number: int, case: Case, outcome: Outcome, extras: Extras, ranks: _Ranks, folder: Path, seed: int
) -> Failure:
    """Shrink and write."""
    end = time.monotonic() + SHRINKING_SECONDS
    # Only what failed is looked for again.
    only = {name: getattr(extras, name) and outcome.check == name for name in ("again", "report", "loader")}

    def again(simpler: Case) -> Outcome:
        pool = ranks.fresh() if outcome.check == "ranks" else None
        return judge(simpler, replace(extras, pool=pool, **only))

    small, said = shrunk(case, outcome, again, lambda: time.monotonic() < end)
    file = folder / f"fuzz-{seed}-{number}.json"
    save_case(file, small, said.check, said.message)
    return Failure(number, file, said.check, said.message)


class _Ranks:
    """A pool of ranks, started when first needed and anew when it has stopped."""

    def __init__(self, size: int, started: Callable[[RankPool], None]) -> None:
        self._pool: RankPool | None = None
        self._size, self._started = size, started

    def pool(self) -> RankPool:
        if self._pool is None or not all(process.is_alive() for process in self._pool.processes):
            self._pool = RankPool(self._size, PATIENCE)
            self._started(self._pool)
        return self._pool

    def fresh(self) -> RankPool:
        """Ranks that nothing failed on: those of a failed case may be anywhere in their program."""
        self.__exit__()
        return self.pool()

    def __enter__(self) -> _Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None

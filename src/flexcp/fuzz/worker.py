"""A worker: a process of a campaign that is sent case numbers, draws and checks these cases, and shrinks failing ones.

A worker leads its own process group, which includes the ranks it starts, so that a campaign can stop all of them
whatever they are doing. On SIGTERM it closes its ranks and exits.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType

from flexcp.fuzz.cases import Case, save_case
from flexcp.fuzz.draw import ON_RANKS, draw
from flexcp.fuzz.findings import Failure
from flexcp.fuzz.judge import Extras, Outcome, judge
from flexcp.fuzz.shrink import shrunk
from flexcp.measure.ranks import RankError, RankPool
from flexcp.measure.warmup import warm

SHRINKING_SECONDS = 60.0
"""The most seconds in which a failing case is made smaller."""
NO_RANKS = (RankError, OSError)
"""Exceptions of a pool of ranks that does not start; anything else that a case raises is its outcome."""
PATIENCE = 300.0
"""Seconds for ranks to answer, even on a busy machine; the limit for ranks that wait for each other is lower."""


def _nothing(*_: object) -> None:
    """Do nothing: the default preparation."""


@dataclass(frozen=True)
class Task:
    """The cases of a campaign; a case, and whether it runs on real ranks, depends on the seed and its number alone.

    ``share`` is the share of cases on real ranks, from 0 to 1, ``folder`` the place for files of failing cases.
    ``prepare`` is called in every worker, and ``prepare_ranks`` with every pool of ranks; both must be importable by
    name.
    """

    seed: int
    share: float
    folder: Path
    most_ranks: int = ON_RANKS
    prepare: Callable[[], object] = _nothing
    prepare_ranks: Callable[[RankPool], object] = _nothing

    def on_ranks(self, number: int) -> bool:
        """Return whether the case with this number runs on real ranks."""
        return int((number + 1) * self.share) > int(number * self.share)

    def case(self, number: int) -> Case:
        """Draw the case with this number, the same every time."""
        return draw(self.seed, number, self.most_ranks if self.on_ranks(number) else None)

    def failed(self, number: int, case: Case, outcome: Outcome) -> Failure:
        """Write a failing case to its file and return the failure."""
        file = self.folder / f"fuzz-{self.seed}-{number}.json"
        save_case(file, case, outcome.check, outcome.message)
        return Failure(number, file, outcome.check, outcome.message)


@dataclass(frozen=True)
class Judged:
    """The outcome of a case, as a worker reports it.

    A failed case is reported twice: as it was drawn (not ``final``), and after shrinking. ``seconds`` is the time since
    the case was drawn.
    """

    number: int
    outcome: Outcome
    seconds: float
    failure: Failure | None = None
    final: bool = True


def serve(task: Task, pipe: Connection) -> None:
    """Judge the case numbers that come through the pipe until it closes or sends None; a worker's main function."""
    os.setsid()
    signal.signal(signal.SIGTERM, _leave)
    import torch

    torch.set_num_threads(1)  # workers share the machine
    warm()
    task.prepare()
    with _Ranks(task.most_ranks, task.prepare_ranks) as ranks:
        try:
            pipe.send(None)
            while (number := pipe.recv()) is not None:
                judge_number(task, number, ranks, pipe.send)
        except (EOFError, BrokenPipeError):
            return  # the campaign is gone
        finally:
            # The worker is leaving already, and raising in an exit function would print a traceback.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _leave(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(0)


def judge_number(task: Task, number: int, ranks: _Ranks, tell: Callable[[Judged], None]) -> None:
    """Draw and judge one case, and pass the outcome to ``tell``.

    A failed case is told twice, before and after shrinking.
    """
    since, case = time.monotonic(), task.case(number)
    extras = Extras(number % 4 == 0, number % 7 == 0, number % 9 == 0)
    try:
        if task.on_ranks(number):
            extras = replace(extras, pool=ranks.pool())
        outcome = judge(case, extras)
    except NO_RANKS:
        outcome = Outcome("failed", "ranks", traceback.format_exc())
    failure = None
    if outcome.verdict == "failed":
        failure = task.failed(number, case, outcome)
        tell(Judged(number, outcome, time.monotonic() - since, failure, final=False))
        failure = _made_small(task, number, case, outcome, extras, ranks)
    tell(Judged(number, outcome, time.monotonic() - since, failure))


def _made_small(task: Task, number: int, case: Case, outcome: Outcome, extras: Extras, ranks: _Ranks) -> Failure:
    end = time.monotonic() + SHRINKING_SECONDS
    # Only the check that failed is run again.
    only = {name: getattr(extras, name) and outcome.check == name for name in ("again", "report", "loader")}

    def again(simpler: Case) -> Outcome:
        pool = ranks.fresh() if outcome.check == "ranks" else None
        return judge(simpler, replace(extras, pool=pool, **only))

    try:
        small, said = shrunk(case, outcome, again, lambda: time.monotonic() < end)
    except NO_RANKS:
        small, said = case, outcome  # keep the case as it was drawn
    if outcome.check == "ranks":
        ranks.close()  # the ranks may be stuck anywhere
    return task.failed(number, small, said)


class _Ranks:
    """A pool of ``size`` ranks, started when it is first needed and again after it has stopped.

    ``started`` is called with every newly started pool.
    """

    def __init__(self, size: int, started: Callable[[RankPool], object]) -> None:
        self._pool: RankPool | None = None
        self._size, self._started = size, started

    def pool(self) -> RankPool:
        if self._pool is None or not all(process.is_alive() for process in self._pool.processes):
            self.close()
            self._pool = RankPool(self._size, PATIENCE)
            self._started(self._pool)
        return self._pool

    def fresh(self) -> RankPool:
        """Return a newly started pool."""
        self.close()
        return self.pool()

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def __enter__(self) -> _Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

"""A campaign: many cases, judged by worker processes that each ask for one case number after the other.

Case ``n`` of seed ``s`` is the same in every campaign, however many workers there are. The time limit is kept here,
outside of the tested code: when the time is over, the workers and their ranks are stopped, whatever they are doing. If
a worker dies, or does not answer for :data:`CASE_SECONDS`, its case counts as failed, and a new worker replaces it.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import cast

from flexcp.fuzz.findings import Found
from flexcp.fuzz.judge import Outcome
from flexcp.fuzz.worker import PATIENCE, SHRINKING_SECONDS, Judged, Task, serve
from flexcp.measure.fork_server import without_interrupt

MOST_FAILURES = 10
"""A campaign ends after this many failed cases, because one bug fails many."""
CASE_SECONDS = 2 * PATIENCE + SHRINKING_SECONDS
"""A worker that does not answer for this long counts as lost.

Ranks that do not answer are noticed earlier, by their pool.
"""
TELL_SECONDS = 1.0
"""How often a campaign reports its results so far."""
LEAVE_SECONDS = 2.0
"""How long workers may take to close their ranks before they are killed."""


@dataclass(frozen=True)
class Limits:
    """When a campaign ends: after a number of cases, of seconds, or of failures, whichever comes first.

    0 cases or 0 seconds mean no such limit.
    """

    cases: int = 0
    seconds: float = 0.0
    failures: int = MOST_FAILURES


@dataclass
class _Worker:
    """A worker process, the number of its case, and when it began that case (``time.monotonic()``).

    ``number`` is None until it asks for its first case.
    """

    process: SpawnProcess
    number: int | None
    since: float


def campaign(task: Task, limits: Limits, jobs: int = 1, tell: Callable[[Found], None] = lambda _: None) -> Found:
    """Judge cases with ``jobs`` workers until a limit is reached, and return the results.

    ``tell`` is called about once a second with the results so far. Raises RuntimeError if a worker dies before its
    first case.
    """
    found = Found(task.seed, jobs)
    begin = time.monotonic()
    numbers = iter(range(limits.cases)) if limits.cases else _endless()
    crew: dict[Connection, _Worker] = {}
    told = begin
    try:
        for _ in range(min(jobs, limits.cases or jobs)):
            _start(task, crew)
        while crew and len(found.failures) < limits.failures:
            now = time.monotonic()
            found.seconds = now - begin
            left = limits.seconds - found.seconds if limits.seconds else CASE_SECONDS
            if left <= 0:
                break
            for pipe in wait(list(crew), min(left, TELL_SECONDS)):
                _hear(task, cast(Connection, pipe), crew, found, numbers)
            for pipe, worker in list(crew.items()):
                if time.monotonic() - worker.since > CASE_SECONDS:
                    _lost(task, pipe, crew, found, f"did not answer for {CASE_SECONDS:g} s")
            if now - told >= TELL_SECONDS:
                told = now
                tell(found)
        found.unfinished = sum(worker.number is not None for worker in crew.values())
    finally:
        _end([worker.process for worker in crew.values()])
    found.seconds = time.monotonic() - begin
    found.failures.sort(key=lambda failure: failure.number)
    tell(found)
    return found


def _endless() -> Iterator[int]:
    number = 0
    while True:
        yield number
        number += 1


def _start(task: Task, crew: dict[Connection, _Worker]) -> None:
    """Start a worker with Ctrl-C blocked: only its parent reacts to that, and stops the worker."""
    context = multiprocessing.get_context("spawn")
    with without_interrupt():
        resource_tracker.ensure_running()  # starting it later would unblock the signal
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(task, theirs))
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
        crew[ours] = _Worker(process, None, time.monotonic())


def _hear(task: Task, pipe: Connection, crew: dict[Connection, _Worker], found: Found, numbers: Iterator[int]) -> None:
    """Receive a worker's message, add it to ``found``, and send the worker its next case number.

    If there are no more numbers, the worker is ended.
    """
    worker = crew[pipe]
    try:
        judged: Judged | None = pipe.recv()
    except (EOFError, ConnectionResetError):
        worker.process.join(LEAVE_SECONDS)
        _lost(task, pipe, crew, found, f"ended with code {worker.process.exitcode}")
        return
    if judged is not None:
        _note(task, judged, found)
        if not judged.final:
            return
    worker.number, worker.since = next(numbers, None), time.monotonic()
    with suppress(BrokenPipeError):  # a dead worker is noticed when its pipe closes
        pipe.send(worker.number)
    if worker.number is None:
        _end([crew.pop(pipe).process], LEAVE_SECONDS)


def _note(task: Task, judged: Judged, found: Found) -> None:
    if judged.failure is not None:
        found.failures = [failure for failure in found.failures if failure.number != judged.number]
        found.failures.append(judged.failure)
        if judged.final:
            return  # it was counted when it was first reported
    found.note(task.case(judged.number), judged.outcome)
    found.on_ranks += "ranks" in judged.outcome.checks and judged.outcome.verdict == "passed"
    found.slowest = max(found.slowest, (judged.seconds, judged.number))


def _lost(task: Task, pipe: Connection, crew: dict[Connection, _Worker], found: Found, how: str) -> None:
    """Replace a worker that died or does not answer, and count its case as failed; ``how`` says what happened to it.

    Raises RuntimeError if the worker had no case yet.
    """
    worker = crew.pop(pipe)
    _end([worker.process])
    if worker.number is None:
        raise RuntimeError(f"a process of the fuzzer {how} before its first case; see its output above")
    case, outcome = task.case(worker.number), Outcome("failed", "process", f"the process that judged it {how}")
    known = any(failure.number == worker.number for failure in found.failures)
    if not known:  # otherwise the worker was lost while it shrank a case that it had reported
        _note(task, Judged(worker.number, outcome, time.monotonic() - worker.since, None), found)
        found.failures.append(task.failed(worker.number, case, outcome))
    _start(task, crew)


def _end(processes: list[SpawnProcess], patience: float = LEAVE_SECONDS) -> None:
    """Stop processes and all that they started: first with SIGTERM, then, after ``patience`` seconds, with SIGKILL."""
    for process in processes:
        process.terminate()
    end = time.monotonic() + patience
    for process in processes:
        process.join(max(0.0, end - time.monotonic()))
        assert process.pid is not None
        with suppress(ProcessLookupError):  # a worker that does not yet lead its process group has started nothing
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.join()

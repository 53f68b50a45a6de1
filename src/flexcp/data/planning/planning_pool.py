"""Planning pool: plans made ahead of the training loop by other processes.

A :class:`Pool` has a thread per worker process. The thread takes the next job, hands it to its worker and waits for the
answer; that is all it does, so whatever happens to a worker happens to one thread and one job:

    worker dies        its job is done again by a fresh worker, with a warning; after ``TRIES`` deaths over the same
                       job it is an error
    planning fails     the worker's message, or traceback where it is no user's mistake, is raised where the training
                       loop takes that plan
    worker is stuck    after ``patience`` seconds of waiting the loop warns, ends the worker and plans the step itself

Jobs are pure functions of their arguments, so doing one twice, or elsewhere, gives the same plan. Warnings are given by
the thread that takes plans. The pool's workers end when it is closed, collected, or when the process ends in whatever
way (see ``worker.py``).
"""

from __future__ import annotations

import json
import os
import pickle
import socket
import subprocess
import sys
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from flexcp.data.planning.plan_orders import (
    PlannedPart,
    PlannerLike,
    PlanOrder,
    RecipeWish,
    from_shared_bytes,
    fulfil,
    unpacked,
)
from flexcp.data.planning.worker import START
from flexcp.data.stats import Stats

TRIES, STARTS = 3, 10
"""Workers that may die over one job while they plan it, and while they start."""


class PlanningError(RuntimeError):
    """A step could not be planned; the message holds the cause."""


@dataclass(eq=False)
class Job:
    """One step to plan, or the plans of another rank to derive recipes of, and what became of it."""

    key: Hashable
    order: PlanOrder | bytes
    parts: list[PlannedPart] | None = None
    error: str | None = None
    deaths: int = 0
    false_starts: int = 0
    dropped: bool = False

    @property
    def done(self) -> bool:
        return self.parts is not None or self.error is not None


class _Worker:
    """A worker process and our end of its pipes."""

    def __init__(self, planner: bytes) -> None:
        ours, theirs = socket.socketpair()
        life_read, life_write = os.pipe()
        try:
            path = json.dumps([os.path.abspath(p) for p in sys.path])
            command = [sys.executable, "-c", START, path, str(theirs.fileno()), str(life_read)]
            # A session of its own: Ctrl-C in a terminal is for the training process, which then lets go of the
            # lifeline.
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, pass_fds=(theirs.fileno(), life_read), start_new_session=True
            )
        except BaseException:
            os.close(life_write)
            ours.close()
            raise
        finally:
            theirs.close()
            os.close(life_read)
        self.lifeline: int | None = life_write
        self.pipe = Connection(ours.detach())
        self.planner = planner

    def greet(self) -> None:
        """Hand over the planner; raises :class:`PlanningError` where the worker cannot use it."""
        self.pipe.send_bytes(self.planner)
        what, text = self.pipe.recv()
        if what == "broken":
            raise PlanningError(
                "a planner process cannot load the planner; make it of importable, picklable parts, or plan in the "
                f"training process with workers=0:\n{text}"
            )

    def plan(self, job: Job) -> tuple[str, float, Any]:
        self.pipe.send(job.order)
        answer: tuple[str, float, Any] = self.pipe.recv()
        return answer

    def end(self) -> int:
        """Kill the process and forget it; how it ended."""
        self.process.kill()
        code = self.process.wait()
        self.pipe.close()
        if self.lifeline is not None:
            os.close(self.lifeline)
            self.lifeline = None
        return code


@dataclass(eq=False)
class _Shared:
    """What the threads and the pool have in common; it holds no reference to the pool,
    so that the pool can be collected.
    """

    planner: bytes
    stats: Stats
    change: threading.Condition = field(default_factory=threading.Condition)
    waiting: deque[Job] = field(default_factory=deque)
    at_work: dict[int, tuple[_Worker, Job | None]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    closed: bool = False

    def close(self) -> None:
        """End all workers now."""
        with self.change:
            self.closed = True
            for worker, _ in self.at_work.values():
                worker.process.kill()
            self.change.notify_all()


class Pool:
    """``workers`` processes that plan. Use :meth:`ask` ahead of time and :meth:`take` when the plan is needed."""

    def __init__(
        self, planner: PlannerLike, workers: int, patience: float, stats: Stats, wish: RecipeWish | None = None
    ) -> None:
        self.planner, self.patience, self.stats = planner, patience, stats
        self.jobs: dict[Hashable, Job] = {}
        self.shared = _Shared(_pickled(planner, wish), stats) if workers else None
        self.threads: list[threading.Thread] = []
        if self.shared is not None:
            for number in range(workers):
                thread = threading.Thread(target=_tend, args=(self.shared, number), daemon=True)
                thread.start()
                self.threads.append(thread)
            self._closing = weakref.finalize(self, _shut, self.shared, self.threads)

    def ask(self, key: Hashable, order: PlanOrder | bytes) -> None:
        """Have this planned; without workers it is planned when it is taken. Bytes are another rank's plans,
        to derive recipes of.
        """
        job = self.jobs[key] = Job(key, order)
        if self.shared is not None:
            with self.shared.change:
                self.shared.waiting.append(job)
                self.shared.change.notify_all()

    def finished(self) -> list[Hashable]:
        """Keys of plans that are ready to be taken."""
        return [key for key, job in self.jobs.items() if job.done]

    def take(self, key: Hashable, counted: bool = True) -> list[PlannedPart]:
        """The parts that were asked for; waits for it, and counts the waiting unless it is not the loop that waits."""
        job = self.jobs.pop(key)
        begin = time.perf_counter()
        ready = job.done
        try:
            parts = self._here(job) if self.shared is None else self._waited(self.shared, job)
        finally:
            if counted:
                self.stats.waited(0.0 if ready else time.perf_counter() - begin)
        return parts

    def _waited(self, shared: _Shared, job: Job) -> list[PlannedPart]:
        with shared.change:
            shared.change.wait_for(lambda: job.done, self.patience)
            notes, shared.notes = shared.notes, []
            stuck = not job.done
            if stuck:
                job.dropped = True
                for worker, busy_with in shared.at_work.values():
                    if busy_with is job:
                        worker.process.kill()
        for note in notes:
            warnings.warn(note, RuntimeWarning, stacklevel=4)
        if stuck:
            warnings.warn(
                f"step {job.key} was not planned within {self.patience:g} s of waiting; its planner process was ended, "
                "and the step is planned in the training process",
                RuntimeWarning,
                stacklevel=4,
            )
            return self._here(job)
        if job.parts is None:
            told = str(job.error)
            apart = "\n" if "\n" in told else " "
            raise PlanningError(f"step {job.key} could not be planned:{apart}{told}")
        return job.parts

    def _here(self, job: Job) -> list[PlannedPart]:
        begin = time.perf_counter()
        try:
            # No recipes: the step derives what it needs, when it needs it, in the same process.
            return (
                from_shared_bytes(job.order) if isinstance(job.order, bytes) else fulfil(self.planner, job.order, None)
            )
        except Exception as error:  # a user's planner may raise anything; callers know one error, as from a worker
            raise PlanningError(f"step {job.key} could not be planned: {type(error).__name__}: {error}") from error
        finally:
            self.stats.planned(time.perf_counter() - begin, here=True)

    def forget(self) -> None:
        """Drop everything that was asked for and not taken."""
        if self.shared is not None:
            with self.shared.change:
                self.shared.waiting.clear()
                for job in self.jobs.values():
                    job.dropped = True
        self.jobs.clear()

    def processes(self) -> list[int]:
        """Process ids of the workers that run now."""
        if self.shared is None:
            return []
        with self.shared.change:
            return [worker.process.pid for worker, _ in self.shared.at_work.values()]

    def close(self) -> None:
        """End the workers."""
        if self.shared is not None:
            self._closing()


def _pickled(planner: PlannerLike, wish: RecipeWish | None) -> bytes:
    try:
        return pickle.dumps((planner, wish))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(
            f"this planner cannot be sent to planner processes ({error}); make it of importable, picklable parts, or "
            "use workers=0"
        ) from None


def _shut(shared: _Shared, threads: list[threading.Thread]) -> None:
    shared.close()
    for thread in threads:
        thread.join(10)


def _tend(shared: _Shared, number: int) -> None:
    """A worker's thread: one job after the other until the pool closes."""
    worker: _Worker | None = None
    while True:
        with shared.change:
            shared.change.wait_for(lambda: shared.closed or bool(shared.waiting))
            if shared.closed:
                break
            job = shared.waiting.popleft()
        worker = _done(shared, number, worker, job)
    if worker is not None:
        worker.end()


def _done(shared: _Shared, number: int, worker: _Worker | None, job: Job) -> _Worker | None:
    """Get one job done, by as many workers as it takes; the worker that is left."""
    while not job.dropped:
        parts, error, seconds, ready = None, None, 0.0, worker is not None
        try:
            if worker is None:
                worker = _Worker(shared.planner)
                _at_work(shared, number, worker, job)
                worker.greet()
                ready = True
            _at_work(shared, number, worker, job)
            what, seconds, value = worker.plan(job)
            parts, error = (unpacked(value), None) if what == "parts" else (None, str(value))
        except (EOFError, ConnectionError, OSError) as lost:
            how = f"{lost}" if worker is None else _ending(worker.end())
            worker = None
            with shared.change:
                shared.at_work.pop(number, None)
                if shared.closed or job.dropped:
                    return None
                job.deaths += ready
                job.false_starts += not ready
                shared.stats.deaths += 1
                shared.notes.append(f"a planner process {how} over step {job.key}; another does it again")
            if job.deaths < TRIES and job.false_starts < STARTS:
                continue
            error = f"{job.deaths + job.false_starts} planner processes ended over it, the last one {how}"
        except Exception as failure:  # a thread that ended here would leave the job waiting for ever
            error = f"{failure}"
        with shared.change:
            if worker is not None:
                shared.at_work[number] = (worker, None)
            job.parts, job.error = parts, error
            if parts is not None and isinstance(job.order, PlanOrder):
                shared.stats.planned(seconds)
            shared.change.notify_all()
        break
    return worker


def _at_work(shared: _Shared, number: int, worker: _Worker, job: Job) -> None:
    with shared.change:
        shared.at_work[number] = (worker, job)
        if shared.closed:
            worker.process.kill()


def _ending(code: int) -> str:
    return f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"

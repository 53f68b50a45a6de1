"""Planning pool: worker processes that make plans ahead of the training loop.

A :class:`Pool` has a thread per worker process. The thread takes the next job, gives it to its worker and waits for the
answer. It does nothing else, so a failure of a worker affects one thread and one job:

    worker dies        or runs out of memory: another worker repeats the job, with a warning; after ``TRIES`` deaths
                       over the same job there is an error
    planning fails     the error is raised when the training loop takes the plan: with the message alone if it is a
                       mistake of the user, else with the traceback
    worker is stuck    after ``patience`` seconds of waiting the loop warns, kills the worker and plans the step itself

Jobs are pure functions of their arguments, so a job that is repeated or done elsewhere gives the same plan. Warnings
are issued by the thread that takes plans. The workers end when the pool is closed or collected, or when the process
ends in any way (see ``worker.py``). Threads do not survive a fork, so a pool works only in the process that made it:
a forked process is refused plans, and leaves the workers alone when it closes or collects its copy of the pool.
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
from contextlib import suppress
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
from flexcp.data.planning.worker import OUT_OF_MEMORY, START
from flexcp.data.stats import Stats

TRIES, STARTS = 3, 10
"""How many workers may die over one job before it is an error: while they plan, and while they start."""


class PlanningError(RuntimeError):
    """Raised if a step could not be planned; the message says why."""


@dataclass(eq=False)
class Job:
    """A step to plan, or plans of another rank (bytes) from which to derive recipes; and the result or error.

    ``deaths`` and ``false_starts`` count the workers that died over it while they planned and while they started. A
    ``dropped`` job needs no result any more.
    """

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
    """A worker process and the parent's ends of its pipes."""

    def __init__(self, planner: bytes) -> None:
        ours, theirs = socket.socketpair()
        life_read, life_write = os.pipe()
        try:
            path = json.dumps(_search_path())
            command = [sys.executable, "-c", START, path, str(theirs.fileno()), str(life_read)]
            # The worker has a session of its own, so that Ctrl-C in a terminal interrupts only the training process;
            # the worker ends when the lifeline closes.
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
        """Send the planner to the worker and wait until it is ready.

        Raise :class:`PlanningError` if the worker cannot load the planner.
        """
        self.pipe.send_bytes(self.planner)
        what, text = self.pipe.recv()
        if what == "broken":
            raise PlanningError(
                "a planner process cannot load the planner; make it of importable, picklable parts, or plan in the "
                f"training process with planning=Planning(workers=0):\n{text}"
            )

    def plan(self, job: Job) -> tuple[str, float, Any]:
        """Send a job to the worker, wait, and return its answer: ("parts" or "failed", seconds, parts or message).

        Raise EOFError or OSError if the worker dies.
        """
        self.pipe.send(job.order)
        answer: tuple[str, float, Any] = self.pipe.recv()
        return answer

    def end(self) -> int:
        """Kill the process and close its pipes; return its exit code."""
        self.process.kill()
        code = self.process.wait()
        self.pipe.close()
        if self.lifeline is not None:
            os.close(self.lifeline)
            self.lifeline = None
        return code


@dataclass(eq=False)
class _Shared:
    """The data shared by the pool and its threads; it does not refer to the pool, so that the pool can be collected.

    ``waiting`` are the jobs that no thread has taken, ``at_work`` the worker of each thread with its job, and ``notes``
    warnings that the next :meth:`Pool.take` issues. ``change`` is notified when a job is added or done. ``home`` is the
    process that made the pool.
    """

    planner: bytes
    stats: Stats
    change: threading.Condition = field(default_factory=threading.Condition)
    waiting: deque[Job] = field(default_factory=deque)
    at_work: dict[int, tuple[_Worker, Job | None]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    closed: bool = False
    home: int = field(default_factory=os.getpid)

    def close(self) -> None:
        """Kill all workers and let their threads end."""
        with self.change:
            self.closed = True
            for worker, _ in self.at_work.values():
                worker.process.kill()
            self.change.notify_all()


class Pool:
    """A pool of planner processes: order plans ahead of time with :meth:`ask`, and get them with :meth:`take`.

    ``workers`` is the number of processes; with 0, plans are made in this process when they are taken. ``patience`` is
    how many seconds a plan is waited for before it is made in this process, too.
    """

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
        """Order a plan under a key, such as the number of a step; without workers it is made when it is taken.

        An order of bytes holds another rank's plans, from which recipes are derived.
        """
        shared, job = self._shared_here(), Job(key, order)
        self.jobs[key] = job
        if shared is not None:
            with shared.change:
                shared.waiting.append(job)
                shared.change.notify_all()

    def finished(self) -> list[Hashable]:
        """Return the keys of the orders that are done and not taken."""
        return [key for key, job in self.jobs.items() if job.done]

    def take(self, key: Hashable, counted: bool = True) -> list[PlannedPart]:
        """Return the parts of an order, and wait for them if necessary; the wait enters ``stats`` if ``counted``.

        Raise PlanningError if planning failed.
        """
        shared, job = self._shared_here(), self.jobs.pop(key)
        begin = time.perf_counter()
        ready = job.done
        try:
            parts = self._here(job) if shared is None else self._waited(shared, job)
        finally:
            if counted:
                self.stats.waited(0.0 if ready else time.perf_counter() - begin)
        return parts

    def _waited(self, shared: _Shared, job: Job) -> list[PlannedPart]:
        """Wait for a job and return its parts; after ``patience`` seconds, kill its worker and plan it in this process.

        Raise PlanningError if planning failed, and issue the warnings that threads have left.
        """
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
                f"step {job.key} was not planned within {self.patience:g} s of waiting; its planner process was "
                "killed, and the step is planned in the training process",
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
        """Do a job in this process and return its parts, without recipes; raise PlanningError if planning fails."""
        begin = time.perf_counter()
        try:
            # Without recipes: in this process they save no time, and the step derives what it needs when it needs it.
            return (
                from_shared_bytes(job.order) if isinstance(job.order, bytes) else fulfil(self.planner, job.order, None)
            )
        except Exception as error:  # a user's planner may raise anything; callers expect a PlanningError
            raise PlanningError(f"step {job.key} could not be planned: {type(error).__name__}: {error}") from error
        finally:
            self.stats.planned(time.perf_counter() - begin, here=True)

    def forget(self) -> None:
        """Drop all orders that were not taken; workers finish the jobs they are busy with, and the results are lost."""
        shared = self._shared_here()
        if shared is not None:
            with shared.change:
                shared.waiting.clear()
                for job in self.jobs.values():
                    job.dropped = True
        self.jobs.clear()

    def processes(self) -> list[int]:
        """Return the process ids of the running workers."""
        if self.shared is None:
            return []
        with self.shared.change:
            return [worker.process.pid for worker, _ in self.shared.at_work.values()]

    def close(self) -> None:
        """End the planner processes and their threads."""
        if self.shared is not None:
            self._closing()

    def _shared_here(self) -> _Shared | None:
        """Return what the threads share, None without workers; raise RuntimeError in a forked process."""
        if self.shared is not None and self.shared.home != os.getpid():
            raise RuntimeError(
                "a loader with planner processes works only in the process that made it, and this one was forked from "
                "it; iterate the loader itself there, without torch's DataLoader around it, or make another one here"
            )
        return self.shared


def _pickled(planner: PlannerLike, wish: RecipeWish | None) -> bytes:
    """Return the planner and the recipe wish as bytes for the workers; raise ValueError if they cannot be pickled."""
    try:
        return pickle.dumps((planner, wish))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(
            f"this planner cannot be sent to planner processes ({error}); make it of importable, picklable parts, or "
            "use planning=Planning(workers=0)"
        ) from None


def _shut(shared: _Shared, threads: list[threading.Thread]) -> None:
    """End the workers and their threads; wait up to 10 seconds for each thread. A forked process has none to end."""
    if shared.home != os.getpid():
        return
    shared.close()
    for thread in threads:
        thread.join(10)


def _tend(shared: _Shared, number: int) -> None:
    """Run the thread of a worker: do one job after the other until the pool closes. ``number`` is the thread's own."""
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
    """Get one job done, with further workers if one dies; return the worker that is alive, if any.

    ``worker`` is the one that the thread ``number`` has, None to start one.
    """
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
            started = worker is not None
            how = f"could not be started ({lost})" if worker is None else _ending(worker.end())
            worker = None
            with shared.change:
                shared.at_work.pop(number, None)
                if shared.closed or job.dropped:
                    return None
                job.deaths += ready
                job.false_starts += not ready
                shared.stats.deaths += started
                again = job.deaths < TRIES and job.false_starts < STARTS
                if started:
                    shared.notes.append(
                        f"a planner process {how} over step {job.key}; another process repeats the step"
                    )
                elif again:
                    shared.notes.append(f"a planner process {how}; another start is tried")
            if again:
                continue
            if started:
                error = f"{job.deaths + job.false_starts} planner processes ended over it, the last one {how}"
            else:
                error = f"a planner process {how}; to plan in the training process, use planning=Planning(workers=0)"
        except Exception as failure:  # if the thread ended here, the training loop would wait for the job for ever
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


def _search_path() -> list[str]:
    """Return ``sys.path`` as absolute paths, for a process that may be in another folder.

    Relative entries are left out if the current folder does not exist any more, as nothing can be imported from them.
    """
    found = []
    for entry in sys.path:
        with suppress(FileNotFoundError):
            found.append(os.path.abspath(entry))
    return found


def _at_work(shared: _Shared, number: int, worker: _Worker, job: Job) -> None:
    """Note that a worker does a job; kill it if the pool was closed meanwhile."""
    with shared.change:
        shared.at_work[number] = (worker, job)
        if shared.closed:
            worker.process.kill()


def _ending(code: int) -> str:
    """Describe how a process ended, from its exit code, as the end of a sentence: ``was killed by signal 9``."""
    if code == OUT_OF_MEMORY:
        return "ran out of memory"
    return f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"

"""Mutant runs: tests on copies of a checkout in which one source is changed, several copies at a time.

Every worker has its own copy, so that the checkout itself is never changed. Tests of a copy import the copy. They run
in their own session with a time limit, and everything they started is stopped with them.

First each test file runs on the unchanged sources. A test that fails there is left out, and a file in which several
fail or that is slow is left out as a whole: they would tell nothing about a mutant, or take the time of many; the log
names them. The tests of a mutant are those of its area, first the files that name its module, the fastest first, until
one fails; of the other files only as many are run as fit into ``TEST_SECONDS``. All of them run in one process, so its
start, which no file alone can do without, counts once.
"""

from __future__ import annotations

import os
import queue
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

from lib.mutant_areas import Area
from lib.mutations import Mutant, mutants

Result = TypeVar("Result")
LEFT_BEHIND = (".git", ".venv", ".venv-axolotl", ".mypy_cache", ".ruff_cache", ".hypothesis", "build", "out", "site")
"""Folders that are not copied. ``__pycache__`` with the compiled loops is copied:
they belong to sources that no mutant changes.
"""
LOOK_SECONDS = 0.5
TEST_SECONDS = 100.0
"""What a mutant's tests take together, as the unchanged sources did; those that name its module are run in any case."""
MOST_FAILING = 3
"""A file in which more tests than this fail on the unchanged sources is left out as a whole."""
START_SECONDS = 30.0
"""Seconds that tests may take in addition to three times their time without the mutant."""


@dataclass(frozen=True)
class Place:
    """A mutant with its area and source file."""

    area: str
    source: str
    mutant: Mutant


@dataclass(frozen=True)
class Verdict:
    """The result of a mutant: killed, killed by the time limit, or survived; with the tests and their seconds."""

    place: Place
    how: str
    seconds: float
    tests: tuple[str, ...]

    @property
    def killed(self) -> bool:
        return self.how != "survived"


class Copies:
    """``jobs`` copies of a checkout in a folder; work borrows one at a time.
    Setting ``stop`` ends the tests that run in them.
    """

    def __init__(self, root: Path, folder: Path, jobs: int) -> None:
        self.jobs = jobs
        self.stop = threading.Event()
        self._free: queue.SimpleQueue[Path] = queue.SimpleQueue()
        for number in range(jobs):
            copy = folder / str(number)
            shutil.copytree(root, copy, ignore=shutil.ignore_patterns(*LEFT_BEHIND))
            self._free.put(copy)

    @contextmanager
    def threads(self) -> Iterator[ThreadPoolExecutor]:
        """Yield a pool with one thread for each copy.
        If the block ends early, by Ctrl-C too, threads and tests are stopped.
        """
        pool = ThreadPoolExecutor(self.jobs)
        try:
            yield pool
        except BaseException:
            self.stop.set()
            raise
        finally:
            pool.shutdown(cancel_futures=True)

    def with_copy(self, work: Callable[[Path], Result]) -> Result:
        """Call ``work`` with a copy that no other thread has."""
        copy = self._free.get()
        try:
            return work(copy)
        finally:
            self._free.put(copy)


class Ran(NamedTuple):
    """How tests ended: "passed", "failed" or "too slow", after how many seconds, the last line they printed, and the
    test that failed.
    """

    how: str
    seconds: float
    last_line: str
    failed: str


class Baseline(NamedTuple):
    """The seconds of each test file that passes on the unchanged sources, without the tests ``left_out``."""

    seconds: dict[str, float]
    left_out: tuple[str, ...]


def run_tests(
    copy: Path, tests: tuple[str, ...], limit: float, stop: threading.Event, left_out: tuple[str, ...] = ()
) -> Ran:
    """Run test files in a copy, without the tests ``left_out``, until one fails or the time limit is reached."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "-p", "no:cacheprovider", *tests]
    command += [f"--deselect={test}" for test in left_out]
    paths = os.pathsep.join((str(copy / "src"), str(copy / "benchmarks")))
    environment = {**os.environ, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    begin, quiet = time.monotonic(), subprocess.DEVNULL
    with tempfile.TemporaryFile("w+", errors="replace") as said:
        process = subprocess.Popen(
            command, cwd=copy, env=environment, stdin=quiet, stdout=said, stderr=said, start_new_session=True
        )
        code = None
        while code is None and time.monotonic() - begin < limit and not stop.is_set():
            with suppress(subprocess.TimeoutExpired):
                code = process.wait(LOOK_SECONDS)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # what tests have started, too
        process.wait()
        said.seek(0)
        lines = [line.strip() for line in said.readlines() if line.strip()]
    failed = next((line.removeprefix("FAILED ").split(" - ")[0] for line in lines if line.startswith("FAILED ")), "")
    how = {None: "too slow", 0: "passed"}.get(code, "failed")
    return Ran(how, time.monotonic() - begin, lines[-1] if lines else "", failed)


def baseline(copies: Copies, tests: set[str], limit: float, say: Callable[[str], None]) -> Baseline:
    """Run each test file on the unchanged sources, within the limit, without single tests that fail there."""

    def one(copy: Path, test: str) -> tuple[Ran, tuple[str, ...]]:
        left_out: tuple[str, ...] = ()
        while True:
            ran = run_tests(copy, (test,), limit, copies.stop, left_out)
            if ran.how != "failed" or not ran.failed or len(left_out) == MOST_FAILING:
                return ran, left_out
            left_out += (ran.failed,)

    seconds: dict[str, float] = {}
    failing: list[str] = []
    with copies.threads() as pool:
        runs = {pool.submit(copies.with_copy, lambda copy, t=test: one(copy, t)): test for test in sorted(tests)}
        for run in as_completed(runs):
            ran, left_out = run.result()
            note = f"; {ran.how}, so it is left out: {ran.last_line}" if ran.how != "passed" else ""
            note = f", without {' and '.join(left_out)}, which fails" if left_out and not note else note
            say(f"unchanged: {runs[run]} in {ran.seconds:.0f} s{note}")
            if ran.how == "passed":
                seconds[runs[run]] = round(ran.seconds, 1)
                failing += left_out
    return Baseline(seconds, tuple(failing))


def nearest_tests(root: Path, source: str, area: Area, seconds: dict[str, float]) -> tuple[str, ...]:
    """Return the area's test files: first those that name the source's module, within each kind the fastest first;
    of the others as many as there is time for.
    """
    parts = Path(source).with_suffix("").parts[1:]
    module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    def order(test: str) -> tuple[bool, float]:
        named = Path(test).stem == f"test_{parts[-1]}" or module in (root / test).read_text()
        return not named, seconds[test]

    found: list[str] = []
    start = min(seconds.values(), default=0.0)
    for test in sorted((test for test in area.tests if test in seconds), key=order):
        together = start + sum(seconds[other] - start for other in (*found, test))
        if not order(test)[0] or together <= TEST_SECONDS:
            found.append(test)
    return tuple(found)


def drawn(root: Path, areas: dict[str, Area], count: int, seed: int) -> list[Place]:
    """Return ``count`` mutants, taken from the areas in turn."""
    streams = {name: _stream(root, name, area, random.Random(f"{seed}/{name}")) for name, area in areas.items()}
    found: list[Place] = []
    while streams and len(found) < count:
        for name in list(streams):
            place = next(streams[name], None)
            if place is None:
                del streams[name]
            elif len(found) < count:
                found.append(place)
    return found


def _stream(root: Path, name: str, area: Area, rng: random.Random) -> Iterator[Place]:
    """Yield all mutants of an area: a source is drawn in proportion to its length, then a place in it."""
    texts = {source: (root / source).read_text() for source in area.sources}
    streams = {source: mutants(text, rng) for source, text in texts.items()}
    while streams:
        source = rng.choices(list(streams), [len(texts[source]) for source in streams])[0]
        mutant = next(streams[source], None)
        if mutant is None:
            del streams[source]
        else:
            yield Place(name, source, mutant)


def tried(
    place: Place, tests: tuple[str, ...], limit: float, copy: Path, stop: threading.Event, left_out: tuple[str, ...]
) -> Verdict:
    """Put a mutant into a copy, run its tests, without those ``left_out``, and restore the copy."""
    path = copy / place.source
    original = path.read_text()
    path.write_text(place.mutant.source)
    try:
        ran = run_tests(copy, tests, limit, stop, left_out)
    finally:
        path.write_text(original)
    words = {"passed": "survived", "failed": "killed", "too slow": "killed (too slow)"}
    return Verdict(place, words[ran.how], round(ran.seconds, 1), tests)

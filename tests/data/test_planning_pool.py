"""Tests of planner processes that die, stop, are slow or fail: training continues with a warning, or stops with an
error that names the cause, and no sample is lost or delivered twice.

Processes misbehave on purpose, as files in a folder tell them (see ``misbehaving.py``).
"""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made import LENGTHS, Numbered, arguments, batches_by_hand
from misbehaving import Misbehaving, Unloadable, planner

from flexcp.data import Loader, PlanningError
from flexcp.data.planning.plan_orders import PlanOrder
from flexcp.data.planning.planning_pool import Pool
from flexcp.data.stats import Stats

BUDGET = 150
EXPECTED = batches_by_hand(list(range(len(LENGTHS))), LENGTHS, BUDGET)


def loader(folder: Path, **options: Any) -> Loader:
    options = {"budget": BUDGET, "document_fields": ["images"], "lookahead": 2, **options}
    return Loader(Numbered(known=True), Misbehaving(folder), **arguments(**options))


def gone(pid: int, seconds: float = 10.0) -> bool:
    """Return whether a process ends within a time; a zombie counts as ended."""
    for _ in range(int(seconds * 50)):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":
            return True
        time.sleep(0.02)
    return False


def test_a_killed_worker_is_replaced_with_a_warning(tmp_path: Path) -> None:
    (tmp_path / "die").touch()
    with (
        loader(tmp_path) as data,
        pytest.warns(RuntimeWarning, match="killed by signal 9 over step 0; another process repeats the step"),
    ):
        found = []
        for batch in data:
            found.append(batch.samples.tolist())
            if batch.number == 2:  # kill another worker, this time from outside
                os.kill(data.plans.processes()[0], signal.SIGKILL)  # type: ignore[union-attr]
    assert found == EXPECTED
    assert data.stats.deaths >= 1 and data.stats.planned_ahead == len(EXPECTED)


def test_a_forked_process_is_refused_plans_and_leaves_the_workers_alone(tmp_path: Path) -> None:
    """It waited two minutes for threads that do not survive a fork, and its exit killed the workers of its parent."""
    with loader(tmp_path) as data, warnings.catch_warnings():
        warnings.filterwarnings("error", "a planner process", RuntimeWarning)
        found, batches = [], iter(data)
        found.append(next(batches).samples.tolist())
        child = os.fork()
        if child == 0:
            try:
                next(iter(data))
            except RuntimeError as error:
                data.close()
                os._exit("was forked" in str(error))
            os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
        assert len(data.plans.processes()) == 1  # type: ignore[union-attr]
        found += [batch.samples.tolist() for batch in batches]
    assert found == EXPECTED


def test_a_plan_that_kills_every_worker_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "always die").touch()
    with loader(tmp_path) as data, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(PlanningError, match=r"step 0 .*: 3 planner processes ended over it, .*signal 9"):
            next(iter(data))
        (tmp_path / "always die").unlink()
        assert [b.samples.tolist() for b in data] == EXPECTED


def test_a_worker_without_memory_is_replaced_with_a_warning(tmp_path: Path) -> None:
    (tmp_path / "exhaust").touch()
    with (
        loader(tmp_path) as data,
        pytest.warns(RuntimeWarning, match="a planner process ran out of memory over step 0; another process repeats"),
    ):
        assert [batch.samples.tolist() for batch in data] == EXPECTED
    assert data.stats.deaths == 1 and data.stats.planned_ahead == len(EXPECTED)


def test_processes_that_cannot_be_started_are_not_counted_as_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = []

    def refused(*_: Any, **__: Any) -> Any:
        tries.append(len(tries))
        if len(tries) <= refusals:
            raise OSError(errno.EMFILE, "Too many open files")
        return start(*_, **__)

    start = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", refused)
    refusals = 2
    with (
        loader(tmp_path) as data,
        pytest.warns(RuntimeWarning, match=r"could not be started \(.*Too many open files\); another start is tried"),
    ):
        assert [b.samples.tolist() for b in data] == EXPECTED
    assert data.stats.deaths == 0 and len(tries) == 3
    refusals = 1000
    with loader(tmp_path) as data, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(PlanningError, match=r"could not be started .*Too many open files.*Planning\(workers=0\)"):
            next(iter(data))


def test_planner_processes_start_in_a_folder_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a notebook the first entry of ``sys.path`` is the current folder, "", which is then nowhere."""
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend("")
    folder.rmdir()
    with loader(tmp_path) as data:
        assert [b.samples.tolist() for b in data] == EXPECTED
    assert data.stats.planned_ahead == len(EXPECTED)


def test_a_plan_that_needs_more_memory_than_there_is_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "always exhaust").touch()
    with loader(tmp_path) as data, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(PlanningError, match=r"step 0 .*: 3 planner processes ended over it, .*ran out of memory"):
            next(iter(data))
        (tmp_path / "always exhaust").unlink()
        assert [b.samples.tolist() for b in data] == EXPECTED


def test_a_stopped_worker_is_ended_and_its_step_planned_here(tmp_path: Path) -> None:
    (tmp_path / "stop").touch()
    with loader(tmp_path, patience=3.0) as data:
        steps = iter(data)
        with pytest.warns(
            RuntimeWarning, match=r"step 0 was not planned within 3 s .* planned in the training process"
        ):
            found = [next(steps).samples.tolist()]
        found += [b.samples.tolist() for b in steps]
        assert found == EXPECTED
        assert data.stats.planned_here >= 1 and data.stats.longest_wait_s > 2.9


def test_a_slow_worker_is_waited_for_and_the_wait_is_counted(tmp_path: Path) -> None:
    (tmp_path / "slow").touch()
    with loader(tmp_path) as data, warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [b.samples.tolist() for b in data] == EXPECTED
    stats = data.stats
    assert stats.first_wait_s > 1.4 and stats.waited_s >= stats.longest_wait_s >= stats.first_wait_s
    assert 1 <= stats.waits <= stats.steps == len(EXPECTED)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_plan_that_fails_stops_with_its_cause_at_its_step(workers: int, tmp_path: Path) -> None:
    tokens = sum(LENGTHS[n] for n in EXPECTED[2])
    (tmp_path / f"fail {tokens}").touch()
    with loader(tmp_path, workers=workers) as data:
        found = []
        with pytest.raises(PlanningError, match=rf"step 2 could not be planned:(.|\n)*no plan for {tokens} tokens"):
            for batch in data:
                found.append(batch.samples.tolist())
        assert found == EXPECTED[:2]
        (tmp_path / f"fail {tokens}").unlink()
        assert [b.samples.tolist() for b in data] == EXPECTED[2:]  # nothing skipped, nothing twice


def test_plans_of_workers_are_the_planners_own() -> None:
    stats = Stats()
    pool = Pool(planner(3, "blocks"), 1, 60, stats)
    lengths = np.array([300, 20, 1])
    for step in range(3):
        pool.ask(step, PlanOrder(lengths + step))
    parts = [pool.take(step) for step in range(3)]
    assert all(part.documents == [0, 1, 2] for (part,) in parts)
    assert [part.plan for (part,) in parts] == [planner(3, "blocks")(lengths + step) for step in range(3)]
    (pid,) = pool.processes()
    pool.close()
    assert gone(pid)
    assert stats.planned_ahead == 3 and stats.planning_s > 0


def test_a_planner_that_cannot_travel_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot be sent to planner processes"):
        Pool(lambda lengths: planner(1)(lengths), 1, 60, Stats())


def test_a_planner_that_cannot_be_loaded_is_an_error_with_the_cause() -> None:
    pool = Pool(Unloadable(), 1, 60, Stats())
    pool.ask(0, PlanOrder(np.array([3])))
    with pytest.raises(PlanningError, match=r"cannot load the planner(.|\n)*only here"):
        pool.take(0)
    pool.close()


BENCHMARKS = Path(__file__).parents[2] / "benchmarks"  # the script below imports lib from there
SCRIPT = """
import sys, time
import numpy as np
import flexcp
from flexcp.data.planning.plan_orders import PlanOrder
from flexcp.data.planning.planning_pool import Pool
from flexcp.data.stats import Stats
from lib.slow_planner import SlowPlanner
planner = flexcp.Planner(4, 2, 32, cluster=flexcp.cluster("cpu", 1, 2), strategy="zigzag")
pool = Pool(SlowPlanner(planner, 100), 1, 60, Stats())
pool.ask(0, PlanOrder(np.array([30])))
while not pool.processes():
    time.sleep(0.01)
time.sleep(1)
print(pool.processes()[0], flush=True)
if sys.argv[1] == "wait":
    time.sleep(100)
"""


@pytest.mark.parametrize("ending", ["exit", "interrupt", "kill"])
def test_no_process_stays_behind(ending: str) -> None:
    """A script without a ``__main__`` guard ends in each of three ways while its worker is in the middle of a plan."""
    command = [sys.executable, "-c", SCRIPT, "exit" if ending == "exit" else "wait"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    # A background job of a shell inherits an ignored SIGINT, so the default handler is restored.
    with subprocess.Popen(
        command, cwd=BENCHMARKS, **pipes, text=True, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        worker = int(process.stdout.readline())
        if ending != "exit":
            process.send_signal(signal.SIGINT if ending == "interrupt" else signal.SIGKILL)
        process.wait(30)
        assert gone(worker)
        errors = process.stderr.read()
        assert "Traceback" not in errors or (ending == "interrupt" and errors.count("Traceback") == 1), errors


def test_a_worker_whose_parent_has_ended_says_nothing() -> None:
    """The parent ends before the worker could report that it is ready, and before the worker notices that the parent's
    end of the lifeline pipe is closed.
    """
    script = """
import os, pickle, sys
from multiprocessing import Pipe
from flexcp.data.planning.worker import main
ours, theirs = Pipe()
ours.send_bytes(pickle.dumps((None, None)))
lifeline = os.pipe()
ours.close()
main(theirs.fileno(), lifeline[0])
sys.exit("it went on")
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, "")

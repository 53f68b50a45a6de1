"""Replay of dumps: run the plans of telemetry dumps again on this machine, to find which of them is bad.

Every plan is read and executed symbolically. If it fits on this machine, it is also run on real processes, forward and
backward under each of its masks, against dense float64 attention. Inputs are random, because a dump holds plans and no
data. A plan that fails its symbolic check is not run, since it could hang. Dumps of several ranks are read together: a
plan that is in several of them is replayed once, and steps in which ranks have different plans are reported.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from flexcp.measure.ranks import RankError, RankPool
from flexcp.measure.verify import Options, Verdict, check_verifiable, verify_on
from flexcp.plan.check import PlanError
from flexcp.plan.plan import Plan
from flexcp.telemetry.dump import Dump, find_dumps, read_dump

MOST_RANKS = 16
"""The most processes that are started here; a plan for more ranks is only checked symbolically."""


@dataclass
class Replayed:
    """A plan from the dumps: which ranks had it in which step, and what came of it.

    ``problem`` says what is wrong with the plan, ``not_run`` why it was not run on processes; each is empty if it does
    not apply.
    """

    plan: Plan
    held: list[tuple[int, int]]
    """(global rank, step number) of every dump that has the plan."""
    problem: str = ""
    not_run: str = ""
    verdicts: dict[str, Verdict] = field(default_factory=dict)
    """The verdict for each mask by name, if the plan ran."""

    @property
    def passed(self) -> bool:
        return not self.problem and all(v.passed for v in self.verdicts.values())


@dataclass(frozen=True)
class Replay:
    """All dumps, all replayed plans, and one line for each step in which ranks had different plans."""

    dumps: list[Dump]
    plans: list[Replayed]
    disagreements: list[str]

    @property
    def passed(self) -> bool:
        return not self.disagreements and all(p.passed for p in self.plans)


def replay(
    path: Path, seed: int, kernel: str | None, progress: Callable[[str], None], pool: RankPool | None = None
) -> Replay:
    """Replay the dump at ``path``, or all dumps in that folder.

    ``seed`` draws the random inputs, ``kernel`` is the name of the kernel (None: chosen), and ``progress`` receives a
    message for each plan. Plans run on ``pool`` if it is large enough, else on new processes.
    """
    dumps = [read_dump(file) for file in find_dumps(path)]
    plans: dict[str, Replayed] = {}
    for dump in dumps:
        for step in dump.steps:
            found = plans.setdefault(step.plan.hash, Replayed(step.plan, []))
            if (dump.global_rank, step.number) not in found.held:
                found.held.append((dump.global_rank, step.number))
    for found in plans.values():
        progress(f"checking {found.plan!r}")
        _check(found, kernel)
    runnable = [p for p in plans.values() if not p.problem and not p.not_run]
    most = max((p.plan.ranks for p in runnable), default=0)
    if runnable:
        with nullcontext(pool) if pool is not None and pool.size >= most else RankPool(most) as ranks:
            for found in runnable:
                progress(f"running {found.plan!r} on real processes")
                _run(ranks, found, seed, kernel)
                if found.problem:
                    break  # the ranks may be stuck, and later plans would only fail for that reason
    for found in runnable:
        if not found.problem and not found.verdicts:
            found.not_run = "a plan before it stopped the ranks"
    return Replay(dumps, list(plans.values()), _disagreements(dumps))


def _check(found: Replayed, kernel: str | None) -> None:
    """Execute a plan symbolically, and write to ``found`` what is wrong with it or why it cannot run here."""
    try:
        found.plan.check()
    except PlanError as error:
        found.problem = f"symbolic execution: {error}"
        return
    if found.plan.ranks > MOST_RANKS:
        found.not_run = f"it is for {found.plan.ranks} ranks, and at most {MOST_RANKS} are started here"
        return
    try:
        check_verifiable(found.plan, Options(kernel=kernel))
    except (ValueError, NotImplementedError) as error:
        found.not_run = str(error)


def _run(pool: RankPool, found: Replayed, seed: int, kernel: str | None) -> None:
    """Run a plan under each of its masks, and write the verdicts, or what went wrong, to ``found``."""
    for number, mask in enumerate(found.plan.batch.masks):
        options = Options(seed=seed, kernel=kernel, mask=number)
        try:
            found.verdicts[mask.name] = pool.run(verify_on, found.plan, options, ranks=found.plan.ranks)[0]
        except RankError as error:
            found.problem = f"under mask {mask.name!r}: {error}"
            return


def _disagreements(dumps: list[Dump]) -> list[str]:
    """Return one line for each step in which ranks of one group have different plans."""
    by_step: dict[int, dict[str, list[int]]] = {}
    for dump in dumps:
        for step in dump.steps:
            by_step.setdefault(step.number, {}).setdefault(step.plan.hash, []).append(dump.global_rank)
    found = []
    for number, holders in sorted(by_step.items()):
        ranks = [rank for some in holders.values() for rank in some]
        if len(holders) > 1 and _one_group(dumps, number, len(set(ranks))):
            words = "; ".join(f"{digest[:12]} on ranks {sorted(set(some))}" for digest, some in holders.items())
            found.append(f"step {number}: {words}")
    return found


def _one_group(dumps: list[Dump], number: int, ranks: int) -> bool:
    """Return whether the ``ranks`` ranks that dumped step ``number`` fit into one group.

    With several groups, different plans are correct.
    """
    sizes = [step.plan.ranks for dump in dumps for step in dump.steps if step.number == number]
    return ranks <= min(sizes)

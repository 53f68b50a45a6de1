"""The judge: runs all checks on one case.

A case passes, is refused, or fails. It is refused if the planner raises a ValueError or NotImplementedError of one
line, which is a valid answer if the case asks for something that can be refused. It fails if a check found something,
or an exception was raised that no user should see. A failure has the name of its check, by which the shrinker
recognizes it.
"""

from __future__ import annotations

import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from flexcp.fuzz.cases import Case
from flexcp.fuzz.plan_checks import check_file, check_promises, check_simulation, check_slices, check_tokens
from flexcp.fuzz.token_machine import Wrong, require
from flexcp.measure.ranks import RankPool
from flexcp.plan.check import PlanError
from flexcp.plan.file import PlanFormatError
from flexcp.plan.plan import Plan

Verdict = Literal["passed", "refused", "failed"]
LONGEST_MESSAGE = 1000
MAY_DIFFER = ("hypergraph", "dcp")
"""Strategies that do not promise the same plan for the same request."""
ALWAYS_PLAN = ("blocks", "auto", "dp")
"""Strategies that must not refuse a batch without caps, tolerances or a fixed layout."""


@dataclass(frozen=True)
class Outcome:
    """The result of a case: which check failed and its message, or how the planner refused.

    ``plans`` is the number of plans that were made and checked, 0 unless the case passed.
    """

    verdict: Verdict
    check: str = ""
    message: str = ""
    plans: int = 0
    checks: tuple[str, ...] = ()
    """The checks that passed; each name occurs once per plan."""


@dataclass(frozen=True)
class Extras:
    """The slower checks, which a campaign runs on a share of its cases.

    ``again`` plans a second time, ``report`` checks the HTML report, ``loader`` a data loader, and with ``pool`` plans
    run on real ranks. ``seconds`` limits the CPU time of a case in this process.
    """

    again: bool = True
    report: bool = True
    loader: bool = True
    pool: RankPool | None = None
    seconds: int = 60


class _TooLong(Exception):  # noqa: N818
    """Raised by the timer of :func:`_limited`."""


def judge(case: Case, extras: Extras = Extras()) -> Outcome:
    """Run all checks that apply to a case and return the outcome; exceptions of the case are part of it."""
    at, passed = "plan", list[str]()
    try:
        with _limited(extras.seconds):
            parts = _planned(case)
            if isinstance(parts, Outcome):
                return parts
            for documents, plan in parts:
                for name, check in _checks(case, documents, plan, extras):
                    at = name
                    check()
                    passed.append(name)
            if extras.loader and case.small:
                at = "loader"
                from flexcp.fuzz.loader_check import check_loader

                check_loader(case)
                passed.append(at)
    except (Wrong, PlanError, PlanFormatError) as finding:
        return Outcome("failed", at, str(finding))
    except _TooLong:
        return Outcome("failed", at, f"took more than {extras.seconds} s of computing")
    except Exception:
        return Outcome("failed", at, traceback.format_exc())
    return Outcome("passed", plans=len(parts), checks=tuple(passed))


def _planned(case: Case) -> list[tuple[list[int], Plan]] | Outcome:
    """Return (documents, plan) of each micro-batch, or the outcome if the planner refused.

    Raises :class:`Wrong` if the micro-batches do not hold every document once.
    """
    try:
        planner, arguments = case.made_planner(), case.arguments()
        if case.micro_batches and "layout" not in arguments:
            parts = planner.micro_batches(case.lengths, **arguments)
        else:
            parts = [(list(range(len(case.lengths))), planner(case.lengths, **arguments))]
    except (PlanError, PlanFormatError):
        raise
    except (ValueError, NotImplementedError) as refusal:
        words = str(refusal)
        if not 0 < len(words) <= LONGEST_MESSAGE or "\n" in words:
            return Outcome("failed", "refusal", f"{type(refusal).__name__} of {len(words)} characters: {words[:300]}")
        if _leaves_no_room(case):
            return Outcome(
                "failed", "refusal", f"refused, although the case asks for nothing that may be refused: {words}"
            )
        return Outcome("refused", "plan", words)
    given = sorted(document for documents, _ in parts for document in documents)
    require(given == list(range(len(case.lengths))), f"micro-batches hold the documents {given}")
    return parts


def _leaves_no_room(case: Case) -> bool:
    """Return whether a refusal is a failure, because the case asks for nothing that may be refused."""
    caps = ("max_tokens_per_rank", "max_memory_per_rank", "max_peers", "compute_tolerance", "token_tolerance")
    free = not case.call and not any(case.planner.get(name) is not None for name in caps)
    return free and case.strategy in ALWAYS_PLAN


def _checks(case: Case, documents: list[int], plan: Plan, extras: Extras) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield (name, check) in order: a later check may assume what an earlier one has checked.

    ``documents`` are the numbers of the plan's documents in the case.
    """
    dense: list[list[NDArray[np.bool_]]] = []
    words = [[layer.of_document(d) for d in documents] for layer in case.layers]
    yield "check", plan.check
    if case.small:
        yield "slices", lambda: dense.extend(check_slices(plan, words))
        yield "promises", lambda: check_promises(plan, case)
        yield "tokens", lambda: check_tokens(plan, dense)
    yield "simulator", lambda: check_simulation(plan)
    yield "file", lambda: check_file(plan)
    if extras.again and case.strategy.partition(":")[0] not in MAY_DIFFER:
        yield "again", lambda: _check_again(case, documents, plan)
    if extras.report:
        from flexcp.fuzz.report_check import check_report

        yield "report", lambda: check_report(plan)
    pool = extras.pool
    if pool is not None and case.small and plan.ranks <= pool.size and plan.shape.latent is None:
        from flexcp.fuzz.rank_check import check_ranks

        yield "ranks", lambda: check_ranks(plan, dense, case.run, pool)


def _check_again(case: Case, documents: list[int], plan: Plan) -> None:
    parts = _planned(case)
    hashes = {} if isinstance(parts, Outcome) else {tuple(some): other.hash for some, other in parts}
    require(hashes.get(tuple(documents)) == plan.hash, "planning the same again gives another plan")


@contextmanager
def _limited(seconds: int) -> Iterator[None]:
    """Raise :class:`_TooLong` inside the context after ``seconds`` of this process's CPU time.

    Ranks have their own limits.
    """

    def ring(*_: object) -> None:
        raise _TooLong

    before = signal.signal(signal.SIGVTALRM, ring)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)

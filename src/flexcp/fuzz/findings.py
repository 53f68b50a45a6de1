"""The results of a campaign: what it did, what its cases covered, and which of them failed."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flexcp.fuzz.cases import Case
from flexcp.fuzz.judge import Outcome
from flexcp.planners.static.dealing import method_of


@dataclass(frozen=True)
class Failure:
    """A failing case: its number, the file with the case, the failed check and its message.

    The case in the file is shrunk, as far as that was possible.
    """

    number: int
    file: Path
    check: str
    message: str


@dataclass
class Found:
    """Counts of a campaign, its failures, and what its cases covered.

    ``jobs`` is the number of workers, ``refused`` how many cases the planner refused, ``on_ranks`` how many passed on
    real ranks. ``covered`` counts, for each kind of feature (strategy, mask, ...), how many cases had it.
    """

    seed: int
    jobs: int = 1
    cases: int = 0
    plans: int = 0
    refused: int = 0
    on_ranks: int = 0
    unfinished: int = 0
    """Cases that were still being judged when the time was over; they are not counted elsewhere."""
    seconds: float = 0.0
    slowest: tuple[float, int] = (0.0, -1)
    """Seconds of the slowest case, and its number."""
    failures: list[Failure] = field(default_factory=list)
    checks: Counter[str] = field(default_factory=Counter)
    """How many plans passed each check."""
    covered: dict[str, Counter[str]] = field(default_factory=dict)

    def note(self, case: Case, outcome: Outcome) -> None:
        """Count a case and what it covers; a refused case covers nothing."""
        self.cases += 1
        self.plans += outcome.plans
        self.checks.update(outcome.checks)
        if outcome.verdict == "refused":
            self.refused += 1
            return
        for what, values in _facts(case).items():
            self.covered.setdefault(what, Counter()).update(values)

    def as_data(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        return {
            "seed": self.seed,
            "jobs": self.jobs,
            "cases": self.cases,
            "plans": self.plans,
            "refused": self.refused,
            "on_ranks": self.on_ranks,
            "unfinished": self.unfinished,
            "seconds": round(self.seconds, 1),
            "slowest": {"seconds": round(self.slowest[0], 2), "case": self.slowest[1]},
            "checks": dict(self.checks.most_common()),
            "covered": {what: dict(counts.most_common()) for what, counts in self.covered.items()},
            "failures": [
                {"case": f.number, "file": str(f.file), "check": f.check, "message": f.message} for f in self.failures
            ],
        }


def _facts(case: Case) -> dict[str, set[str]]:
    """Return what a case contains, by kind: strategy, masks, ranks and so on."""
    words = [layer.words if layer.each else [layer.words] for layer in case.layers]
    layout = case.call.get("layout", case.call.get("tokens", "free"))
    told = {name for name, value in case.planner.items() if name not in ("strategy", "effort") and value is not None}
    return {
        "strategy": {method_of(case.strategy)},
        "mask": {word[0] for some in words for word in some},
        "ranks": {str(case.cluster)[len(case.machine["name"]) + 1 :]},
        "dtype": {str(case.attention["dtype"])},
        "layout": {"index map" if isinstance(layout, list) else layout},
        "masks a model": {str(len(case.layers))},
        "option": told | ({"micro_batches"} if case.micro_batches else set()),
    }

"""Strategies that cannot run an epoch, because they refuse some of its passes.

A few simulated passes may all suit a strategy that refuses others, as ``dp`` refuses a pass with a document that is
longer than a rank may keep. So the tokens of more passes are placed, those that
:func:`flexcp.compare.epoch_memory.passes_to_plan` names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from flexcp.compare.compare import refusal
from flexcp.compare.epoch_memory import passes_to_plan
from flexcp.planners.request import Request


@dataclass(frozen=True)
class Refusals:
    """How many of the ``planned`` passes of an epoch ``strategy`` refuses, the first for the reason ``why``."""

    strategy: str
    refused: int
    planned: int
    why: str

    def words(self) -> str:
        """Return a clause for a user."""
        return f"{self.strategy} cannot run {self.refused} of {self.planned} planned passes: {self.why}"


@dataclass(eq=False)
class EpochPasses:
    """The passes of an epoch that are planned, and which strategies can run all of them.

    ``longest`` has the length of each pass's longest document, and ``request_of(number)`` returns the request of a
    pass. ``known`` has the first reason why a strategy refuses a pass, None if it refuses none, by its name.
    """

    longest: Sequence[int]
    request_of: Callable[[int], Request]
    known: dict[str, str | None] = field(default_factory=dict)

    def can_run(self, name: str) -> bool:
        """Return whether a strategy refuses no planned pass; passes with the longest documents are placed first.

        ``auto`` can run whatever any strategy can, so it is not asked.
        """
        if name == "auto":
            return True
        if name not in self.known:
            numbers = sorted(passes_to_plan(self.longest), key=lambda number: -self.longest[number])
            reasons = (refusal(self.request_of(number), name) for number in numbers)
            self.known[name] = next((why for why in reasons if why is not None), None)
        return self.known[name] is None

    def refusals(self, name: str) -> Refusals:
        """Return how many planned passes a strategy refuses, and why."""
        numbers = passes_to_plan(self.longest)
        reasons = [why for number in numbers if (why := refusal(self.request_of(number), name)) is not None]
        return Refusals(name, len(reasons), len(numbers), reasons[0] if reasons else "")

    @property
    def refusing(self) -> dict[str, str]:
        """The strategies that were found to refuse a pass, with the reason of the first refusal."""
        return {name: why for name, why in self.known.items() if why is not None}

"""Stats: how the loader spent its time, as seen from the training loop."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass
class Stats:
    """Counts and seconds of this rank since the loader was made.

    ``waited_s`` is the time that the loop waited for plans; a step whose plan is ready costs no waiting.
    ``first_wait_s`` is the wait for the first plan, which nothing can hide; it is part of ``waited_s``. ``planning_s``
    is the time that planning took, in planner processes and in this process.
    """

    steps: int = 0
    waits: int = 0
    waited_s: float = 0.0
    first_wait_s: float = 0.0
    longest_wait_s: float = 0.0
    planned_ahead: int = 0
    planned_here: int = 0
    planning_s: float = 0.0
    deaths: int = 0
    """Planner processes that died."""
    documents_read: int = 0
    reading_s: float = 0.0
    sharing_s: float = 0.0
    """Seconds spent on exchanging plans, lengths and rows of samples with other ranks."""
    dropped: int = 0
    """Documents that were left out because they are too long."""
    cut: int = 0
    """Documents that were cut because they are too long."""

    tokens_saved: int = 0
    """How many tokens the trees have less than their sequences together."""
    tokens_repeated: int = 0
    """Tokens that several parts of a cut tree hold, beyond the first part that holds them."""

    def waited(self, seconds: float) -> None:
        """Count a plan for which the training loop waited ``seconds``."""
        if self.steps == 0:
            self.first_wait_s = seconds
        self.steps += 1
        self.waits += seconds > 0
        self.waited_s += seconds
        self.longest_wait_s = max(self.longest_wait_s, seconds)

    def planned(self, seconds: float, here: bool = False) -> None:
        """Count a plan that took ``seconds`` to make, in a planner process or in this process (``here``)."""
        self.planned_here += here
        self.planned_ahead += not here
        self.planning_s += seconds

    def as_json(self) -> dict[str, Any]:
        """Return the statistics as plain values."""
        return asdict(self)

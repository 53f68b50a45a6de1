"""Stats: where the loader's time went, seen from the training loop."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass
class Stats:
    """Counts and seconds of this rank since the loader was made.

    A step whose plan is ready costs no waiting. ``first_wait_s`` is the wait for the first plan, which nothing can
    hide; it is part of ``waited_s``. ``planning_s`` is what planning took, wherever it was done.
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
    """Planner processes that ended before they were told to."""
    documents_read: int = 0
    reading_s: float = 0.0
    sharing_s: float = 0.0
    """Exchanging plans, lengths and parts of samples with other ranks."""
    dropped: int = 0
    """Documents over the maximum that were left out."""
    cut: int = 0
    """Documents over the maximum that were cut."""

    tokens_saved: int = 0
    """Tokens of sequences that trees held once for several."""
    tokens_repeated: int = 0
    """Tokens of trees that were cut which an earlier part of their tree held, too."""

    def waited(self, seconds: float) -> None:
        """The loop took a plan after so many seconds."""
        if self.steps == 0:
            self.first_wait_s = seconds
        self.steps += 1
        self.waits += seconds > 0
        self.waited_s += seconds
        self.longest_wait_s = max(self.longest_wait_s, seconds)

    def planned(self, seconds: float, here: bool = False) -> None:
        """A plan was made, by a worker or in this process."""
        self.planned_here += here
        self.planned_ahead += not here
        self.planning_s += seconds

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

"""Stats: how the loader spent its time, as seen from the training loop."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass
class Stats:
    """Counts and seconds of this rank since the loader was made.

    ``steps`` counts the plans that the training loop took, and ``waits`` those that were not ready. ``waited_s`` is the
    time that the loop waited for plans; a step whose plan is ready costs no waiting. ``first_wait_s`` is the wait for
    the first plan, which nothing can hide; it is part of ``waited_s``. ``planned_ahead`` and ``planned_here`` count the
    plans made in planner processes and in this process, and ``planning_s`` is the time that both took.
    ``documents_read`` and ``reading_s`` are of samples that this rank read; documents that were cut or dropped are
    counted on every rank.
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
    """Tokens that trees saved: those of all their sequences, minus those of the trees."""
    tokens_repeated: int = 0
    """Tokens that several parts of a cut tree hold: one for each part after the first that holds the token."""

    def waited(self, seconds: float) -> None:
        """Count a plan that the training loop took after waiting for ``seconds``, 0 if it was ready."""
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
        """Return the statistics by name, as plain values for JSON."""
        return asdict(self)

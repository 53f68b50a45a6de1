"""Follow: every so many steps the ranks of a loader tell each other what they measured,
and agree once on how fast each of them is.

Every rank comes to the exchange at the same step, adds the same correction to its list and lets it begin at the first
step that none of them has asked for yet: after the look-ahead. Nothing else of what was measured reaches a plan.
"""

from __future__ import annotations

from typing import Any

from flexcp.clusters import Cluster
from flexcp.data.planning.plan_orders import PlannerLike
from flexcp.data.row_sharing import Peers
from flexcp.data.speeds.corrections import Correction, agreed_speeds, speeds_at
from flexcp.data.speeds.measured import MeasuredWork
from flexcp.telemetry.telemetry import Telemetry


class SpeedFollower:
    """The corrections of a loader; with ``every`` above 0 it makes new ones, else it only replays those it has."""

    def __init__(self, planner: PlannerLike, every: int, telemetry: Any, peers: Peers) -> None:
        if not isinstance(every, int) or isinstance(every, bool) or every < 0:
            raise ValueError(f"follow_speeds is a count of steps between two corrections, or 0 for none; got {every!r}")
        if every and not isinstance(telemetry, Telemetry):
            raise ValueError(
                f"follow_speeds={every} needs telemetry=flexcp.Telemetry(...), which measures; got "
                f"telemetry={telemetry!r}"
            )
        self.cluster: Cluster | None = getattr(planner, "cluster", None)
        if every and (self.cluster is None or not hasattr(planner, "with_speeds")):
            raise ValueError(
                f"follow_speeds={every} needs a planner with a cluster and with_speeds, "
                f"as flexcp.Planner has; got {planner!r}"
            )
        self.every, self.peers = every, peers
        self.corrections: list[Correction] = []
        self._measured = MeasuredWork(telemetry) if every else None

    def at(self, epoch: int, step: int) -> tuple[int, ...] | None:
        """The speeds that a step is planned with; None for the planner's own."""
        return speeds_at(self.corrections, epoch, step)

    def after(self, epoch: int, step: int, unasked: int) -> None:
        """Agree on a correction if it is time for one: ``step`` was given out and trained,
        ``unasked`` is the first not yet asked for.

        On all ranks at the same step. While a correction waits for its step nothing is agreed on, because all that is
        measured then is of plans without it.
        """
        if self._measured is None or (step + 1) % self.every or self._pending(epoch, step):
            return
        told = self.peers.all_gather(self._measured.since_last())
        assert self.cluster is not None
        found = agreed_speeds(told, self.at(epoch, unasked) or self.cluster.rank_speeds)
        if found is not None:
            self.corrections.append(Correction(epoch, unasked, found))

    def _pending(self, epoch: int, step: int) -> bool:
        assert self._measured is not None
        if not self.corrections or (self.corrections[-1].epoch, self.corrections[-1].step) <= (epoch, step):
            return False
        self._measured.forget()
        return True

    def state(self) -> list[Any]:
        """The corrections as plain values."""
        return [correction.plain() for correction in self.corrections]

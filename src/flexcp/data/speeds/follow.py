"""Follow: at regular steps, the ranks of a loader exchange their measurements and agree on the speed of each rank.

All ranks take part at the same step and add the same correction to their lists. The correction begins at the first step
after the look-ahead, for which no rank has ordered a plan yet. Measurements affect plans in no other way.
"""

from __future__ import annotations

from typing import Any

from flexcp.clusters import Cluster
from flexcp.data.planning.plan_orders import PlannerLike
from flexcp.data.reading.row_sharing import Peers
from flexcp.data.speeds.corrections import Correction, agreed_speeds, speeds_at
from flexcp.data.speeds.measured import MeasuredWork
from flexcp.io.setting_checks import check_whole
from flexcp.telemetry.telemetry import Telemetry


class SpeedFollower:
    """The speed corrections of a loader.

    Every ``every`` steps (0: never) the ranks compare measurements and may add a correction. Raise ValueError if
    ``every`` is not 0 and telemetry does not measure, or the planner cannot change speeds.
    """

    def __init__(self, planner: PlannerLike, every: int, telemetry: Any, peers: Peers) -> None:
        check_whole("follow_speeds", every, "a count of steps between two corrections, or 0 for none", 0)
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
        """Return the speeds of the ranks, in per mille, with which a step is planned; None for the planner's own."""
        return speeds_at(self.corrections, epoch, step)

    def after(self, epoch: int, step: int, unasked: int) -> None:
        """Agree on a correction after ``step`` if one is due; it begins at step ``unasked``, the first not yet ordered.

        All ranks call this at the same step. No correction is made while the last one has not begun, because the steps
        measured until then were planned without it, nor if speeds have hardly changed.
        """
        if self._measured is None or (step + 1) % self.every or self._pending(epoch, step):
            return
        told = self.peers.all_gather(self._measured.since_last(), "the loader's exchange of speeds")
        assert self.cluster is not None
        found = agreed_speeds(told, self.at(epoch, unasked) or self.cluster.rank_speeds)
        if found is not None:
            self.corrections.append(Correction(epoch, unasked, found))

    def _pending(self, epoch: int, step: int) -> bool:
        """Return whether the last correction has not begun yet; if so, forget what was measured until now."""
        assert self._measured is not None
        if not self.corrections or (self.corrections[-1].epoch, self.corrections[-1].step) <= (epoch, step):
            return False
        self._measured.forget()
        return True

    def state(self) -> list[Any]:
        """Return the corrections as plain values, for the state of the loader."""
        return [correction.plain() for correction in self.corrections]

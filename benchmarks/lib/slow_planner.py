"""A planner that takes longer than needed, to test what waits for it.
No torch here: planner processes import this file.
"""

from __future__ import annotations

import time
from typing import Any

from flexcp.plan.plan import Plan
from flexcp.planner import Planner


class SlowPlanner:
    """``planner`` with a sleep of ``seconds`` before each plan."""

    def __init__(self, planner: Planner, seconds: float) -> None:
        self.planner, self.seconds = planner, seconds
        self.cluster, self.strategy = planner.cluster, planner.strategy

    def __call__(self, lengths: Any, **arguments: Any) -> Plan:
        time.sleep(self.seconds)
        return self.planner(lengths, **arguments)

"""Proves that plans which several strategies made are timed once, so that ``auto`` has no regret against itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import flexcp
import regret


def test_equal_plans_have_one_time_and_the_shorter_one_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    def made(strategy: str) -> Any:
        return flexcp.Planner(4, 2, 8, cluster=flexcp.cluster("cpu", 1, 2), strategy=strategy)([30, 20])

    asked: list[str] = []

    def replay(plan: Any, device: str, **options: Any) -> Any:
        asked.append(plan.strategy)
        return SimpleNamespace(attention_ns=1e6 * (10 - len(asked)))

    monkeypatch.setattr(regret, "replay", replay)
    times = regret.replayed({"auto": made("ring"), "ring": made("ring"), "ulysses": made("ulysses")}, "cpu")
    assert asked == ["ring", "ulysses", "ulysses", "ring"]
    assert times == {"auto": 6.0, "ring": 6.0, "ulysses": 7.0}

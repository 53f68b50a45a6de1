"""Tests on CPU ranks of ``benchmarks/trust_gpu.py``, which needs a GPU for real runs: the functions of every part run,
a case that fails or takes too long becomes a row, and the page is made of the rows.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import flexcp
import telemetry
import trust_gpu
from flexcp.measure.ranks import RankPool
from lib import trust_memory, trust_nccl, trust_numbers, trust_page, trust_telemetry
from lib.trust_ranks import Setting, attempted


def setting() -> Setting:
    return Setting("cpu", time.monotonic() + 600, small=True)


def test_a_part_in_its_own_process_writes_its_rows(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    words = ["--device", "cpu", "--small", "--only", "numbers", "--minutes", "4", "--write", str(path)]
    assert trust_gpu.main(words) == 0
    found = json.loads(path.read_text())
    rows = found["parts"]["numbers"]["rows"]
    assert len(rows) >= 10 and all(row["ok"] for row in rows)
    text = trust_page.tables([found], "a test")
    assert "256 merges" in text and text.count("as it should be") == len(rows)


def test_a_part_that_takes_too_long_is_killed_and_said(tmp_path: Path) -> None:
    asked = argparse.Namespace(device="cpu", seed=0, small=True)
    begin = time.monotonic()
    found = trust_gpu._watched_part("soak", asked, 0.5)
    assert time.monotonic() - begin < 20
    assert [(row["ok"], row["why"]) for row in found["rows"]] == [(False, "killed after 0 s")]


def test_a_case_that_fails_or_has_no_time_is_a_row() -> None:
    def fails() -> dict[str, Any]:
        raise torch.OutOfMemoryError("no room")

    row = attempted(setting(), "a case", 1, fails)
    assert (row["ok"], row["why"]) == (False, "OutOfMemoryError: no room")
    late = Setting("cpu", time.monotonic() + 3, small=True)
    assert attempted(late, "a case", 1, fails)["why"].startswith("not run")


def test_checks_for_nccl_hold_on_cpu_ranks(pool: RankPool) -> None:
    for answer in pool.run(trust_nccl._checks, "cpu", "float32", ranks=2)[:2]:
        assert set(answer) == {"telemetry", "loader", "latents", "another stream"}
        assert not [line for told in answer.values() for line in told if line.startswith("wrong")]


def test_memory_of_ranks_and_batches_under_a_cap(pool: RankPool) -> None:
    plans = [trust_memory._planner(setting(), 2, strategy)([96]) for strategy in ("ring", "allgather")]
    rows = pool.run(trust_memory._measured_all, plans, "cpu", ranks=2)[0]
    assert [row["predicted"] for row in rows] == [plan.memory(0).total for plan in plans]
    row = trust_memory.under_a_cap(setting())
    assert row["ok"] and 0.9 * row["cap"] < row["largest predicted"] <= 0.95 * row["cap"]


def test_telemetry_is_timed_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a layer of each kind to warm up, layers with and without telemetry alternate in who is first."""
    watched, layer = list[bool](), telemetry.layer
    monkeypatch.setattr(
        telemetry, "layer", lambda step, inputs: watched.append(step.telemetry is not None) or layer(step, inputs)
    )
    row = trust_telemetry._timed(setting(), 1, "40,9", 2)
    assert row["layers"] == 2 and row["ms with"] > 0 and row["us of stamps"] > 0
    assert watched == [False, True, True, False, False, True]


def test_wrong_numbers_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def off(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        found = flexcp.slice_attention(q, k, v, flexcp.causal())
        assert isinstance(found, torch.Tensor)
        return found * 1.001

    monkeypatch.setattr(trust_numbers, "_flexcp", off)
    row = trust_numbers._judged(setting(), 64, lambda q, k, v: (q, k, v), torch.float32)
    assert not row["ok"]


def test_the_page_has_a_place_for_the_tables() -> None:
    page = trust_page.PAGE.read_text()
    assert "a table\n" in trust_page.with_tables(page, "a table\n")

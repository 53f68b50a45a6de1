"""Proves the trainers' examples: each on two ranks logs what its plain twin logs on one process,
and differs from it by a few lines.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from trl_runs import generated, logged

from flexcp.measure.ranks import RankPool
from lib.trainer_table import added_lines

TRAINERS = ["trainer", "trl_sft", "trl_dpo", "trl_grpo", "rl_loop", "lightning_fsdp2"]
TIMES = ("runtime", "per_second", "time", "flos", "balance")
"""What a log says of the machine, and TRL's count of operations, which takes the padding of each rank for work."""


def assert_same_logs(ours: list[dict[str, Any]], plain: list[dict[str, Any]]) -> None:
    """Every number that both runs logged, the twin's all."""
    assert len(ours) == len(plain)
    for mine, theirs in zip(ours, plain, strict=True):
        for name, value in theirs.items():
            if not any(word in name for word in TIMES):
                assert mine[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name


@pytest.mark.parametrize("name", TRAINERS)
def test_a_trainer_logs_what_one_process_does(two: RankPool, name: str, request: pytest.FixtureRequest) -> None:
    steps = request.config.getoption("--trainer-steps", default=4)
    pytest.importorskip({"trl": "trl", "lightning": "lightning"}.get(name.split("_")[0], "transformers"))
    plain = logged(None, f"{name}_plain", ["--steps", str(steps)])
    for ours in two.run(logged, name, ["--steps", str(steps)]):
        assert_same_logs(ours, plain)
    losses = [entry["loss"] for entry in plain if "loss" in entry]
    assert len(losses) == steps
    assert len(set(losses)) == steps
    assert name in ("trl_grpo", "rl_loop") or "eval_loss" in plain[-1]


@pytest.mark.parametrize("name", [*TRAINERS, "axolotl_sft"])
def test_few_lines_of_a_script_change(name: str) -> None:
    added = added_lines(name)
    assert any("flexcp" in line for line in added)
    assert len(added) <= 10


def test_rollouts_that_the_model_generates_are_those_of_data_parallelism(two: RankPool, tmp_path: Path) -> None:
    pytest.importorskip("trl")
    plain = two.run(generated, str(tmp_path), False)[0]
    assert_same_logs(two.run(generated, str(tmp_path), True)[0], plain)
    assert plain[1]["kl"] > 0

"""Tests of the examples for trainers: each example on two ranks logs what its twin without flexcp logs on one process,
and differs from that twin by a few lines.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from trl_runs import generated, logged

from flexcp.measure.ranks import RankPool
from lib.trainer_table import added_lines

TRAINERS = ["trainer", "trl_sft", "trl_dpo", "trl_grpo", "rl_loop", "lightning_fsdp2"]
ALWAYS_DISTRIBUTED = ["megatron_pretrain", "torchtitan_pretrain"]
"""Examples whose twins without flexcp also need a process group, of one rank."""
WITHOUT_EVALUATION = ["trl_grpo", "rl_loop", "torchtitan_pretrain"]
TIMES = ("runtime", "per_second", "time", "flos", "balance")
"""Parts of names of logged times, and of TRL's count of operations, which includes the padding of each rank."""


def assert_same_logs(ours: list[dict[str, Any]], plain: list[dict[str, Any]]) -> None:
    """Check every number that the run without flexcp logged, except times."""
    assert len(ours) == len(plain)
    for mine, theirs in zip(ours, plain, strict=True):
        for name, value in theirs.items():
            if not any(word in name for word in TIMES):
                assert mine[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name


def logged_alone(name: str, arguments: list[str]) -> list[dict[str, Any]]:
    """Return the log of an example's twin without flexcp on one process."""
    if name not in ALWAYS_DISTRIBUTED:
        return logged(None, f"{name}_plain", arguments)
    with RankPool(1) as one:
        found: list[dict[str, Any]] = one.run(logged, f"{name}_plain", arguments)[0]
    return found


@pytest.mark.parametrize("name", [*TRAINERS, *ALWAYS_DISTRIBUTED])
def test_a_trainer_logs_what_one_process_does(two: RankPool, name: str, request: pytest.FixtureRequest) -> None:
    steps = request.config.getoption("--trainer-steps", default=4)
    first = name.split("_")[0]
    pytest.importorskip(first if first in ("trl", "lightning", "megatron", "torchtitan") else "transformers")
    plain = logged_alone(name, ["--steps", str(steps)])
    for ours in two.run(logged, name, ["--steps", str(steps)]):
        assert_same_logs(ours, plain)
    losses = [entry["loss"] for entry in plain if "loss" in entry]
    assert len(losses) == steps
    assert len(set(losses)) == steps
    assert name in WITHOUT_EVALUATION or "eval_loss" in plain[-1]


@pytest.mark.parametrize("name", [*TRAINERS, *ALWAYS_DISTRIBUTED, "axolotl_sft"])
def test_few_lines_of_a_script_change(name: str) -> None:
    added = added_lines(name)
    assert any("flexcp" in line for line in added)
    assert len(added) <= 10


def test_rollouts_that_the_model_generates_are_those_of_data_parallelism(two: RankPool, tmp_path: Path) -> None:
    pytest.importorskip("trl")
    plain = two.run(generated, str(tmp_path), False)[0]
    assert_same_logs(two.run(generated, str(tmp_path), True)[0], plain)
    assert plain[1]["kl"] > 0

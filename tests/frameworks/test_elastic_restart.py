"""Tests that a run can be resumed on another number of ranks: a checkpoint of 4 ranks, resumed on 3 and on 6, gives the
same samples and losses.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from elastic_runs import first_logits, stream, trained

from flexcp.measure.ranks import RankPool

SAVED, STEPS = 3, 6
"""The example saves every 3 steps; an epoch of its data has 4 steps."""


@pytest.fixture(scope="module")
def run(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """Folder and steps of an uninterrupted run on 4 ranks."""
    folder = tmp_path_factory.mktemp("run")
    return folder, pool.run(trained, folder, STEPS, ranks=4)[0]


@pytest.mark.parametrize("ranks", [3, 6])
def test_a_checkpoint_is_resumed_on_another_number_of_ranks(
    pool: RankPool, run: tuple[Path, list[dict[str, Any]]], tmp_path: Path, ranks: int
) -> None:
    folder, whole = run
    assert sorted(whole[0]["samples"] + whole[1]["samples"]) != sorted(whole[2]["samples"] + whole[3]["samples"])
    shutil.copytree(folder / f"step-{SAVED:06}", tmp_path / f"step-{SAVED:06}")
    for found in pool.run(trained, tmp_path, STEPS, ranks=ranks):
        assert [(step["step"], step["samples"]) for step in found] == [(s["step"], s["samples"]) for s in whole[SAVED:]]
        assert [s["loss"] for s in found] == pytest.approx([s["loss"] for s in whole[SAVED:]], rel=1e-5)


def test_weights_are_a_stock_checkpoint_and_load_from_one(
    pool: RankPool, run: tuple[Path, list[dict[str, Any]]]
) -> None:
    """Transformers alone loads the weights that a run saved, and a sharded model loads what Transformers saved."""
    from transformers import AutoModelForCausalLM

    weights = run[0] / "weights"
    assert "flexcp" not in json.dumps(json.loads((weights / "config.json").read_text()))
    stock = AutoModelForCausalLM.from_pretrained(weights, attn_implementation="eager")
    stock.save_pretrained(run[0] / "stock")
    with torch.no_grad():
        right = stock(stream()[None], use_cache=False).logits[0]
    found = pool.run(first_logits, str(run[0] / "stock"), ranks=3)[0]
    torch.testing.assert_close(found, right, atol=1e-5, rtol=1e-5)

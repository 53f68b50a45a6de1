"""Tests of the axolotl example: with flexcp's plugin two ranks log the numbers that axolotl alone logs on one process.

axolotl pins other versions of Transformers and TRL than the environment of these tests has: ``make axolotl`` makes a
separate environment and runs this file there. In ``make test`` the file is skipped.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from lib.trainer_table import ROOT, TRAINERS

pytest.importorskip("axolotl", reason="axolotl has an environment of its own: make axolotl")

STEPS = 20
SAME = ("loss", "grad_norm", "learning_rate", "eval_loss", "step")


def trained(folder: Path, settings: str, ranks: int, *options: str) -> subprocess.CompletedProcess[str]:
    """Run axolotl's command with the settings of an example, in a folder that has a tiny model and synthetic text."""
    start = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m"] if ranks > 1 else []
    words = [*start, "axolotl.cli.train", str(ROOT / "examples" / f"{settings}.yaml"), *options]
    alone = {"AXOLOTL_DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT / "examples")}
    alone |= {"ACCELERATE_USE_CPU": "true"} if ranks > 1 else {}
    return subprocess.run(
        [sys.executable, "-m", *words],
        cwd=folder,
        env=os.environ | alone,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
    )


def logged(folder: Path, settings: str, ranks: int, *options: str) -> list[dict[str, Any]]:
    """Run axolotl and return its log, read from the last checkpoint."""
    output = f"build/{settings}"
    found = trained(folder, settings, ranks, f"--output_dir={output}", *options)
    assert found.returncode == 0, found.stdout[-3000:] + found.stderr[-3000:]
    state = folder / output / f"checkpoint-{STEPS}" / "trainer_state.json"
    entries: list[dict[str, Any]] = json.loads(state.read_text())["log_history"]
    return entries


def numbers(entries: list[dict[str, Any]]) -> list[dict[str, float]]:
    """Return the logged numbers that two runs must have in common."""
    return [{name: entry[name] for name in SAME if name in entry} for entry in entries]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model and conversations."""
    found = tmp_path_factory.mktemp("axolotl")
    subprocess.run([sys.executable, ROOT / "examples" / "made_text.py", "build/made"], cwd=found, check=True)
    return found


def test_the_plugin_logs_what_one_process_does(folder: Path) -> None:
    ours = logged(folder, "axolotl_sft", 2)
    plain = logged(folder, "axolotl_sft_plain", 1)
    assert len({entry["loss"] for entry in plain if "loss" in entry}) == STEPS
    assert sum("eval_loss" in entry for entry in plain) == 2, "before the first step and after the last"
    for mine, theirs in zip(numbers(ours), numbers(plain), strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5)
    assert all(entry["tokens_per_second"] > 0 for entry in ours if "loss" in entry)


def test_the_table_has_this_version() -> None:
    assert version("axolotl") == next(trainer.version for trainer in TRAINERS if trainer.package == "axolotl")

"""Tests of ``flexcp bench step``: real ranks run every strategy and report measured and predicted times; refused
strategies, and packages that are not flexcp's, are rows of the table too.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import flexcp
from flexcp.cli.commands.bench_step import as_data, table
from flexcp.cost import CostModel
from flexcp.measure.baselines import baselines
from flexcp.measure.bench_step import BenchTask, Measured, _foreign, bench, median_error
from flexcp.measure.ranks import RankPool
from flexcp.shape import Shape

SHAPE = Shape(4, 2, 16, 16, "float32")
STRATEGIES = ("blocks", "zigzag", "ulysses:2", "ulysses:4")
TASK = BenchTask((300, 60, 20), flexcp.causal(), SHAPE, flexcp.cluster("cpu", 1, 2), CostModel(), STRATEGIES, repeats=1)


def test_every_strategy_is_measured_beside_its_prediction(pool: RankPool) -> None:
    said: list[str] = []
    rows: list[Measured] = pool.run(bench, TASK, ranks=2, on_item=said.append)[0]
    assert said[:4] == list(TASK.strategies) and said[4] == "torch.context_parallel"
    ran = {row.name: row for row in rows if row.step_ms is not None}
    assert set(ran) == {"blocks", "zigzag", "ulysses:2"}
    for row in ran.values():
        assert row.step_ms is not None and row.forward_ms is not None and row.planning_ms is not None
        assert 0 < row.forward_ms < row.step_ms and row.planning_ms > 0
        assert row.predicted_ms is not None and row.predicted_ms > 0 and row.error is not None
        assert row.bytes is not None and row.bytes > 0
    missing = {row.name: row.missing for row in rows if row.missing is not None}
    assert "ulysses:4" in missing and "no CPU path" in str(missing["torch.context_parallel"])
    data = as_data(rows, TASK)
    commands = (Path(__file__).parents[2] / "docs" / "commands.md").read_text()
    documented = commands.partition("\n## JSON output\n")[2]
    assert all(f"`{key}`" in documented for key in [*data, *data["rows"][0]])
    assert json.loads(json.dumps(data)) == data
    text = table(rows, data)
    assert text.startswith("measured on cpu:1x2") and "median error" in text and "ulysses:4: " in text


def test_the_median_error_is_of_what_has_both() -> None:
    rows = [
        Measured("a", 1, 1, 10.0, 11.0),
        Measured("b", 1, 1, 10.0, 8.0),
        Measured("c", 1, 1, 10.0),
        Measured("d", missing="x"),
    ]
    assert median_error(rows) is not None and abs(median_error(rows) - 0.15) < 1e-9  # type: ignore[operator]
    assert median_error(rows[2:]) is None


def broken(group: Any, task: BenchTask) -> Measured:
    def run() -> Any:
        raise RuntimeError("no kernel\nfor this")

    return _foreign(group, task, "theirs", run)


def test_a_failure_of_what_is_not_ours_is_its_row(pool: RankPool) -> None:
    rows = pool.run(broken, TASK, ranks=2)
    assert rows == [Measured("theirs", missing="RuntimeError: no kernel")] * 2


def test_what_is_not_ours_says_why_it_does_not_run() -> None:
    nobody: Any = None
    found = baselines(nobody, [8], flexcp.masks.lambda_(), TASK.shape, "cuda")
    assert "knows causal and full attention only" in str(found["torch.context_parallel"])


def test_python_m_flexcp_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "flexcp", "--version"], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == flexcp.__version__
    help_text = subprocess.run(
        [sys.executable, "-m", "flexcp", "bench", "step", "--help"], capture_output=True, text=True, timeout=120
    )
    assert help_text.returncode == 0 and "torchrun" in help_text.stdout

"""Tests of ``flexcp calibrate``: which heads are measured where none are given, and what is said of a poor fit. The
measurement itself is replaced; tests/measure/calibrate runs it.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from flexcp.calibration import SHORT_DOCUMENTS, Calibration, Errors
from flexcp.cli.main import app, run
from flexcp.cost import CostModel
from flexcp.measure.calibrate import calibrate as measuring
from flexcp.shape import Shape

GOOD, POOR = Errors(9, 0.05, 0.1, 0.2), Errors(2, 1.21, 1.7, 1.9)


def calibrated(monkeypatch: pytest.MonkeyPatch, found: dict[str, Errors], *arguments: str) -> tuple[Any, Shape]:
    """Run the command with these held-out errors; return its result and the shape that was measured."""
    asked = []

    def instead(shape: Shape, *_: Any) -> Calibration:
        asked.append(shape)
        return Calibration(CostModel("calibrated"), "a machine", {"gflops": 7000}, found)

    monkeypatch.setattr(measuring, "calibrate_here", instead)
    result = CliRunner().invoke(app, ["calibrate", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result, asked[0]


@pytest.mark.parametrize(
    ("gpu", "arguments", "shape"),
    [
        pytest.param(False, [], Shape(8, 8, 64, 64, "float32"), id="CPU"),
        pytest.param(True, [], Shape(32, 8, 128, 128, "bfloat16"), id="GPU"),
        pytest.param(True, ["--device", "cpu"], Shape(8, 8, 64, 64, "float32"), id="CPU of a machine with a GPU"),
        pytest.param(True, ["--heads", "16"], Shape(16, 16, 128, 128, "bfloat16"), id="heads given"),
    ],
)
def test_heads_without_a_model_are_those_of_the_device(
    monkeypatch: pytest.MonkeyPatch, gpu: bool, arguments: list[str], shape: Shape
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    result, measured = calibrated(monkeypatch, {"kernels": GOOD}, *arguments)
    assert measured == shape
    assert f"a machine, {shape.heads} / {shape.kv_heads} heads of {shape.head_dim}: " in result.stdout


def test_a_fit_that_cannot_be_written_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = Calibration(CostModel("calibrated"), "a machine", {"gflops": 7000}, {"kernels": GOOD})
    monkeypatch.setattr(measuring, "calibrate_here", lambda *_: found)
    monkeypatch.setattr("sys.argv", ["flexcp", "calibrate", "--write", "/dev/full", "--json"])
    with pytest.raises(SystemExit) as end:
        run()
    out, err = capsys.readouterr()
    assert json.loads(out) == found.to_json()
    assert (end.value.code, err) == (2, "flexcp: cannot use /dev/full: No space left on device\n")


def test_a_poor_fit_is_called_poor(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"kernels": GOOD, SHORT_DOCUMENTS: POOR, "layers": POOR}
    result, _ = calibrated(monkeypatch, found, "--json")
    assert json.loads(result.stdout)["held_out"].keys() == found.keys()
    assert [line.partition(";")[0] for line in result.stderr.splitlines()] == [
        "flexcp: the fit of layers is off by 121% in the median, and plans made with it may be slow"
    ]
    assert "--head-dim" in result.stderr


def test_a_good_fit_and_a_quiet_command_say_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    for found, arguments in (({"kernels": GOOD}, []), ({"layers": POOR}, ["--quiet"])):
        result, _ = calibrated(monkeypatch, found, *arguments)
        assert result.stderr == ""

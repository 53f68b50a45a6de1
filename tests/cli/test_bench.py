"""Tests that ``flexcp bench kernel`` exists, and that without a GPU it says what it needs."""

from __future__ import annotations

import pytest
import torch
from typer.testing import CliRunner

from flexcp.cli.main import app


def test_help_names_the_baselines() -> None:
    result = CliRunner().invoke(app, ["bench", "kernel", "--help"], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    for name in ("cudnn", "flex", "varlen", "docsN"):
        assert name in result.output


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu() -> None:
    result = CliRunner().invoke(app, ["bench", "kernel"])
    assert isinstance(result.exception, ValueError)
    assert "needs a CUDA GPU" in str(result.exception)

"""Tests of ``flexcp doctor``: it lists what is installed, tries it out, says what to fix, and exits with 1 if
something must be fixed.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from flexcp.cli.main import app
from flexcp.executor.exchange.start_group import start_group
from flexcp.measure import doctor
from flexcp.measure.doctor import Finding


def test_what_is_here() -> None:
    found = {f.name: f for f in doctor.examine()}
    assert found["torch"].value.startswith(torch.__version__)
    assert found["torch"].ok and found["gloo"].ok
    assert ("GPU 0" in found) == torch.cuda.is_available()
    assert found["kernel for bfloat16"].value.partition(":")[0] in ("cpu", "triton", "hopper", "cute")
    assert "not installed" in found["triton"].value or found["triton"].value[0].isdigit()


def test_transfers_want_a_stream_of_high_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    class Group:
        def __init__(self, high: bool) -> None:
            self.options = SimpleNamespace(is_high_priority_stream=high)

        def _get_backend(self, device: torch.device) -> Any:
            return self

    monkeypatch.setattr("torch.distributed.get_backend_config", lambda group: "cpu:gloo,cuda:nccl")
    groups: list[Any] = [None, Group(True), Group(False)]
    unknown, high, low = (doctor.transfer_stream(group) for group in groups)
    assert (
        unknown.hint is not None
        and "is_high_priority_stream=True" in unknown.hint
        and "groups that flexcp makes" in unknown.value
    )
    assert (high.value, high.hint) == ("of high priority", None)
    assert low.value == "not of high priority" and low.hint is not None and "pg_options" in low.hint


def test_groups_that_flexcp_makes_ask_for_high_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.distributed as dist

    asked: list[tuple[str, dict[str, Any]]] = []
    nccl = SimpleNamespace(
        Options=lambda is_high_priority_stream: SimpleNamespace(high=is_high_priority_stream, config=SimpleNamespace())
    )
    monkeypatch.setattr(dist, "ProcessGroupNCCL", nccl, raising=False)
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **options: asked.append((backend, options)))
    monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD="world"))
    assert start_group(True, world_size=4) == start_group(False) == "world"
    options = SimpleNamespace(high=True, config=SimpleNamespace(max_ctas=16))
    assert asked == [("nccl", {"world_size": 4, "pg_options": options}), ("gloo", {})]


def test_trying_out_runs_two_processes() -> None:
    result = CliRunner().invoke(app, ["doctor", "--json"], catch_exceptions=False)
    found = json.loads(result.stdout)
    assert result.exit_code == (0 if found["ok"] else 1)
    assert "732 tokens on 2 ranks" in found["tests"]["plan a batch"]
    assert "bytes as planned" in found["tests"]["two processes against dense attention"]
    assert found["fixes"] == {}


def test_what_fails_is_a_fix_and_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> str:
        raise RuntimeError("gloo is out\nof order")

    monkeypatch.setattr(doctor, "_run_two", broken)
    monkeypatch.setattr(doctor, "_can_write", lambda _: False)
    monkeypatch.setattr("flexcp.arrays.jit.cache_folders", lambda: (Path("/no folder"),))
    result = CliRunner().invoke(app, ["doctor"], catch_exceptions=False)
    assert result.exit_code == 1
    assert "fix two processes against dense attention: RuntimeError: gloo is out\n" in result.stdout
    assert "NUMBA_CACHE_DIR" in result.stdout


def test_a_folder_of_compiled_loops_that_others_can_write_is_a_fix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flexcp.arrays.jit.cache_folders", lambda: (tmp_path / "loops",))
    assert doctor._cache().hint == "flexcp warmup compiles the planners' loops now instead of during the first plan"
    (tmp_path / "loops").mkdir()
    (tmp_path / "loops" / "x.nbc").touch()
    assert doctor._cache().fix is None
    (tmp_path / "loops").chmod(0o777)
    fix = doctor._cache().fix
    assert fix is not None and "can be written by others (mode 777)" in fix


def test_old_torch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.10.1+cu126")
    found = {f.name: f for f in doctor.examine()}
    assert found["torch"].fix == "flexcp needs torch 2.11 or newer: pip install -U torch"


def test_only_looking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "examine", lambda: iter([Finding("a", "1", hint="do b")]))
    result = CliRunner().invoke(app, ["doctor", "--no-test"], catch_exceptions=False)
    assert result.stdout == "  a  1\n\nhint: do b\n"


def test_sources_in_an_archive_are_a_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flexcp.arrays.jit.cache_folders", lambda: ())
    found = doctor._cache()
    assert found.value == "not kept, because the sources cannot be read"
    assert found.fix is not None and found.fix.startswith("install flexcp as files, not in an archive")

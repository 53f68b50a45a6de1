"""Proves that a compiled CuTe kernel is stored on disk and loaded from there, but never from a file that is damaged or
that other users can write.

The CuTe DSL is not needed: functions that write and read bytes replace its compiler and loader.
"""

from __future__ import annotations

import importlib
import logging
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest


class Made:
    """Stands for a compiled function of the CuTe DSL."""

    def export_to_c(self, path: str, function_name: str) -> None:
        assert function_name == "flexcp_kernel"
        Path(path).write_bytes(b"code")


def load_module(path: str, enable_tvm_ffi: bool) -> Any:
    content = Path(path).read_bytes()
    if content != b"code" or not enable_tvm_ffi:
        raise RuntimeError(f"no object file: {content!r}")
    return SimpleNamespace(flexcp_kernel=content)


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    cutlass, name = ModuleType("cutlass"), "flexcp.executor.kernels.cute.kept"
    cutlass.cute = SimpleNamespace(runtime=SimpleNamespace(load_module=load_module))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cutlass", cutlass)
    monkeypatch.delitem(sys.modules, name, raising=False)
    module = importlib.import_module(name)
    monkeypatch.setattr(module, "_folders", lambda: (tmp_path / "first", tmp_path / "second"))
    yield module
    sys.modules.pop(name, None)


def test_a_function_is_compiled_once(kept: Any, tmp_path: Path) -> None:
    compiled: list[str] = []

    def compile_now() -> Made:
        compiled.append("now")
        return Made()

    assert [kept.kept("forward", compile_now) for _ in range(3)] == [b"code"] * 3
    assert compiled == ["now"]
    assert (tmp_path / "first/forward.o").read_bytes() == b"code"
    kept.kept("backward", compile_now)
    assert compiled == ["now", "now"]


def test_a_spoilt_or_foreign_file_is_compiled_anew(kept: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kept.kept("forward", Made)
    file = tmp_path / "first/forward.o"
    file.write_bytes(b"half a fi")
    with caplog.at_level(logging.WARNING, "flexcp.compile"):
        assert kept.kept("forward", Made) == b"code"
    assert "half a fi" in caplog.text and file.read_bytes() == b"code"
    file.chmod(0o666)
    with caplog.at_level(logging.WARNING, "flexcp.compile"):
        assert kept.kept("forward", Made) == b"code"
    assert "can be written by others" in caplog.text


def test_without_a_folder_it_still_runs(kept: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("first", "second"):
        (tmp_path / name).write_text("a file where the folder would be")
    with caplog.at_level(logging.WARNING, "flexcp.compile"):
        assert kept.kept("forward", Made) == b"code"
    assert "lost with this process" in caplog.text


def test_sources_that_cannot_be_read_are_told_of_once(
    kept: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The folders of compiled loops, of which there are then none, warn of it already."""
    monkeypatch.setattr(kept, "_folders", tuple)
    with caplog.at_level(logging.WARNING, "flexcp.compile"):
        assert kept.kept("forward", Made) == b"code"
    assert caplog.text == ""

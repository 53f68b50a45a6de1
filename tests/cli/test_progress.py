"""Tests that the compilation of loops is shown on a terminal, and nowhere else."""

from __future__ import annotations

import json
import logging
import sys

import pytest
from typer.testing import CliRunner

from flexcp.cli.main import app
from flexcp.cli.shared.progress import compiling

LOGGER = logging.getLogger("flexcp.compile")


def compile_two() -> None:
    for name in ("loops.pack", "loops.level"):
        LOGGER.info("compiling %s", name)


def test_a_terminal_sees_the_loop_at_hand(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm")
    with compiling() as found:
        compile_two()
    out, err = capsys.readouterr()
    assert out == ""
    assert "compiling loops.level (loop 2)" in err
    assert found.count == 2


def test_a_pipe_sees_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with compiling() as found:
        compile_two()
        LOGGER.warning("no folder takes it")
    assert capsys.readouterr() == ("", "")
    assert (found.count, found.complaints) == (2, ["no folder takes it"])


def test_listening_ends() -> None:
    level, handlers = LOGGER.level, list(LOGGER.handlers)
    with pytest.raises(KeyError), compiling():
        assert LOGGER.isEnabledFor(logging.INFO)
        raise KeyError
    assert (LOGGER.level, LOGGER.handlers) == (level, handlers)


def warmup(monkeypatch: pytest.MonkeyPatch, warm: object, *options: str) -> tuple[int, str, str]:
    from flexcp.measure import warmup as module

    monkeypatch.setattr(module, "warm", warm)
    result = CliRunner().invoke(app, ["warmup", *options], catch_exceptions=False)
    return result.exit_code, result.stdout, result.stderr


def test_warmup_says_what_it_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, err = warmup(monkeypatch, compile_two)
    assert (code, err) == (0, "")
    assert out.startswith("ready after ") and out.endswith("2 loops compiled\n")
    code, out, err = warmup(monkeypatch, compile_two, "--json")
    found = json.loads(out)
    assert (code, err, found.pop("seconds") >= 0, found) == (0, "", True, {"compiled": 2, "kept": True})


def test_warmup_that_keeps_nothing_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, err = warmup(monkeypatch, lambda: LOGGER.warning("no folder takes it"), "--json")
    assert code == 1
    assert json.loads(out)["kept"] is False
    assert err == "flexcp: no folder takes it; set NUMBA_CACHE_DIR to a folder of your own that can be written\n"

"""Proves that compiled loops are cached on disk where possible, found again in every folder that may hold them, and run
in any case.

A small module stands for the planners' loops; importing it again is what a new process would do. Folders that cannot be
written are real: a path below a file, where no user can write, and a process that has changed its user, where
permissions decide.
"""

from __future__ import annotations

import errno
import importlib.util
import json
import logging
import os
import pickle
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numba
import numpy as np
import pytest

from flexcp.arrays import jit
from flexcp.io import private_files

SOURCE = """
from flexcp.arrays.jit import compiled


@compiled
def scaled(x, by):
    return x * by


@compiled
def total(values):
    found = scaled(values[0], 3) - scaled(values[0], 3)
    for x in values:
        found += scaled(x, 2) + scaled(x, len(values))
    return found
"""
LEAVES = """
from flexcp.arrays.jit import compiled, compiled_leaf


@compiled_leaf
def scaled(values, i, by):
    return values[i] * by


@compiled
def total(values):
    found = 0
    for i in range(len(values)):
        found += scaled(values, i, 2) + scaled(values, i, len(values))
    return found
"""
VALUES = np.arange(1, 5)
TOTAL = 2 * 10 + 4 * 10


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """Forget the folders, digests and warnings that a process remembers, so that every test starts like
    a new process.
    """
    yield
    forget()


def forget() -> None:
    for remembered in (jit._folders, jit._digest, jit._warn, jit._warn_of_version, jit._warn_of_sources):
        remembered.cache_clear()


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write the small module, with the user's cache folder at a path where nobody can write."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(nowhere(tmp_path)))
    path = tmp_path / "package" / "compiled_small.py"
    path.parent.mkdir()
    path.write_text(SOURCE)
    return path


def nowhere(folder: Path) -> Path:
    """Return a path below a file, which cannot be created."""
    (folder / "file").touch()
    return folder / "file" / "below"


def fresh(path: Path) -> ModuleType:
    """Return the module as a new process would import it."""
    forget()
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def records(caplog: pytest.LogCaptureFixture, path: Path, values: np.ndarray = VALUES) -> list[str]:
    """Return what a new process logs when it runs the loops, whose sum must be right."""
    caplog.clear()
    with caplog.at_level(logging.INFO, "flexcp.compile"):
        assert fresh(path).total(values) == TOTAL
    return [record.getMessage() for record in caplog.records]


BOTH = ["compiling compiled_small.total", "compiling compiled_small.scaled"]


def kept(folder: Path) -> list[Path]:
    return sorted(folder.glob("flexcp-*/*"))


def test_compiled_once_and_found_again(source: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert records(caplog, source) == BOTH
    assert [file.name.split("-")[0] for file in kept(source.parent / "__pycache__")] == [
        "compiled_small.scaled",
        "compiled_small.total",
    ]
    assert records(caplog, source) == []
    assert records(caplog, source, VALUES.astype(np.float64)) == BOTH, "another signature"
    assert records(caplog, source) == []
    assert records(caplog, source, VALUES.astype(np.float64)) == []


def test_nothing_is_printed(source: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (source.parent / "__pycache__").touch()  # a file instead of a folder, so there is something to complain about
    assert fresh(source).total(VALUES) == TOTAL
    assert capfd.readouterr() == ("", "")


def test_constants_are_no_types_of_their_own(source: Path) -> None:
    module = fresh(source)
    module.total(VALUES)
    assert len(module.scaled.nopython_signatures) == 1


def test_the_folder_of_numba_comes_first(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "given"))
    records(caplog, source)
    assert len(kept(tmp_path / "given")) == 2
    assert not kept(source.parent / "__pycache__")


def test_the_users_folder_comes_last(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(nowhere(tmp_path)))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    (source.parent / "__pycache__").touch()
    records(caplog, source)
    assert len(kept(tmp_path / "user" / "flexcp")) == 2
    assert records(caplog, source) == []


def test_where_nothing_can_be_written_loops_run_all_the_same(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(nowhere(tmp_path)))
    (source.parent / "__pycache__").touch()
    for _ in range(2):
        said = records(caplog, source)
        assert [s for s in said if s.startswith("compiling")] == BOTH
        assert [s for s in said if "is lost with this process, no folder takes it" in s] == [
            s for s in said if not s.startswith("compiling")
        ]


def test_a_home_that_is_nowhere_is_no_folder(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as for a user without a home folder
    jit._folders.cache_clear()
    assert [folder.parent for folder in jit._folders(source)] == [source.parent / "__pycache__"]


@pytest.mark.parametrize("content", [b"", b"half a pickle", b"\x80\x05K\x01."])
def test_a_broken_file_is_replaced(source: Path, caplog: pytest.LogCaptureFixture, content: bytes) -> None:
    records(caplog, source)
    for file in kept(source.parent / "__pycache__"):
        file.write_bytes(content)
    assert [s for s in records(caplog, source) if s.startswith("compiling")] == BOTH
    assert records(caplog, source) == []


def test_a_change_in_another_file_counts(source: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Compiled code may contain the code of functions from other files."""
    records(caplog, source)
    (source.parent / "compiled_other.py").write_text("# new\n")
    assert records(caplog, source) == BOTH
    (source.parent / "unrelated.py").write_text("# new\n")
    assert records(caplog, source) == []


def test_loops_of_the_whole_package_count(source: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A loop may call loops from a folder above or below its own."""
    (source.parent / "__init__.py").touch()
    inner = source.parent / "inner" / "compiled_small.py"
    inner.parent.mkdir()
    inner.write_text(SOURCE)
    said = [s.replace("compiled_small", "inner.compiled_small") for s in BOTH]
    assert records(caplog, inner) == said
    assert records(caplog, source) == BOTH, "of the same name, in another folder"
    assert records(caplog, inner) == records(caplog, source) == []
    source.write_text(SOURCE + "# new\n")
    assert records(caplog, inner) == said


# --- Numba's own names ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [(0, 59), (0, 69), (1, 0)])
@pytest.mark.parametrize("text", ["SOURCE", "LEAVES"])
def test_an_unknown_numba_compiles_plainly_and_a_warning_says_so(
    source: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    version: tuple[int, int],
    text: str,
) -> None:
    """With an unknown version nothing is used that it may lack: the compiled function here can only be called."""
    source.write_text(globals()[text])
    monkeypatch.setattr(numba, "version_info", SimpleNamespace(short=version))
    monkeypatch.setattr(numba, "__version__", "{}.{}.1".format(*version))
    monkeypatch.setattr(numba, "njit", Plain)
    for _ in range(2):
        [said] = records(caplog, source)
        assert (
            "lost with this process: they are kept with Numba 0.60 to 0.68, and this is {}.{}.1".format(*version)
            in said
        )
    # Only Python's own bytecode files are there.
    assert {path.suffix for path in source.parent.rglob("*") if path.is_file()} <= {".py", ".pyc"}


class Plain:
    """A compiled function without any of Numba's attributes."""

    def __init__(self, function: Callable[..., object]) -> None:
        self.function = function

    def __call__(self, *args: object) -> object:
        return self.function(*args)


def test_the_numba_at_hand_is_known() -> None:
    assert jit.KNOWN[0] <= numba.version_info.short <= jit.KNOWN[1]


def test_another_processor_is_another_file(
    source: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Code with instructions that a processor lacks would crash the process."""
    records(caplog, source)
    monkeypatch.setattr("numba.core.codegen.CPUCodegen.magic_tuple", lambda self: ("another", "processor", "+much"))
    assert records(caplog, source) == BOTH
    assert len(kept(source.parent / "__pycache__")) == 4
    assert records(caplog, source) == []


def test_numba_may_compile_all_anew(source: Path, caplog: pytest.LogCaptureFixture) -> None:
    module = fresh(source)
    assert module.total(VALUES) == TOTAL
    module.total.recompile()
    assert module.total(VALUES) == TOTAL
    assert module.total.stats.cache_path == str(kept(source.parent / "__pycache__")[0].parent)


def test_sources_that_cannot_be_read_are_compiled_in_every_process(
    source: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in an archive: without a digest of the sources, code of another version could be taken."""
    monkeypatch.setattr(Path, "read_bytes", lambda path: (_ for _ in ()).throw(NotADirectoryError(path)))
    module = fresh(source)
    with caplog.at_level(logging.WARNING, logger="flexcp.compile"):
        assert module.total(VALUES) == TOTAL
    assert module.total.stats.cache_path == "" and jit.cache_folders() == ()
    (warning,) = (record.getMessage() for record in caplog.records if record.levelno == logging.WARNING)
    assert "lost with this process: the sources cannot be read" in warning
    monkeypatch.undo()
    assert not kept(source.parent / "__pycache__")


def test_leaves_are_kept_too(source: Path, caplog: pytest.LogCaptureFixture) -> None:
    source.write_text(LEAVES)
    assert records(caplog, source) == BOTH
    assert records(caplog, source) == []


def test_leaves_count_no_references(source: Path) -> None:
    source.write_text(LEAVES)
    leaf = fresh(source).scaled
    assert leaf(VALUES, 1, 3) == 6
    assert not leaf.targetoptions["_nrt"]


def test_inlined_functions_are_compiled_and_kept_with_their_callers_only(
    source: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source.write_text(LEAVES.replace("compiled_leaf", "compiled_inline"))
    assert records(caplog, source) == ["compiling compiled_small.total"]
    assert records(caplog, source) == []
    source.write_text(source.read_text().replace("* by", "* by * 1"))
    assert records(caplog, source) == ["compiling compiled_small.total"], "a change in one is a change in its callers"


# --- other users and processes ----------------------------------------------------------------------------------------

PROCESS = """
import json, logging, os, sys
import numpy as np
said = []
class Keep(logging.Handler):
    def emit(self, record):
        said.append(record.getMessage())
logging.getLogger("flexcp.compile").addHandler(Keep())
logging.getLogger("flexcp.compile").setLevel(logging.INFO)
sys.path.insert(0, sys.argv[1])
sys.dont_write_bytecode = True
import numba
import flexcp.arrays.jit
numba.njit(lambda x: x + 1)(1)  # loads all that compiling needs, while it may still be read
if sys.argv[2] == "nobody" and os.geteuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
import compiled_small
values = np.arange(1, 5, dtype=sys.argv[3])
print(json.dumps({"total": int(compiled_small.total(values)), "said": said}))
"""


def started(source: Path, user: str = "me", dtype: str = "int64", **environment: str) -> subprocess.Popen[str]:
    env = {**os.environ, "HOME": "/nonexistent", "XDG_CACHE_HOME": "", "NUMBA_CACHE_DIR": "", **environment}
    command = [sys.executable, "-c", PROCESS, str(source.parent), user, dtype]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def said_by(process: subprocess.Popen[str], refused: bool = False) -> list[str]:
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert err.count("does not use compiled loops that others may have written") == (1 if refused else 0), err
    assert refused or err == ""
    found = json.loads(out)
    assert found["total"] == TOTAL
    return list(found["said"])


def open_to_all(folder: Path) -> None:
    """Let every user read a folder below pytest's own."""
    root = next(path for path in folder.parents if path.name.startswith("pytest-of-"))
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    while folder != root.parent:
        folder.chmod(folder.stat().st_mode | 0o055)
        folder = folder.parent


def test_what_another_user_warmed_up_is_read_where_nothing_can_be_written(source: Path) -> None:
    """As in a container image: root ran ``flexcp warmup``, and a user without a home folder plans."""
    said_by(started(source))
    open_to_all(source.parent)
    if os.geteuid() != 0:
        (source.parent / "__pycache__").chmod(0o555)
    assert said_by(started(source, "nobody")) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes files of another user")
def test_files_of_another_user_are_no_obstacle(source: Path, tmp_path: Path) -> None:
    """A shared folder that everybody can write is not used at all."""
    said_by(started(source))
    open_to_all(source.parent)
    folder = kept(source.parent / "__pycache__")[0].parent
    for file in kept(source.parent / "__pycache__"):
        file.chmod(0o600)
    folder.chmod(0o1777)
    (tmp_path / "own").mkdir(mode=0o777)
    (tmp_path / "own").chmod(0o777)
    said = said_by(started(source, "nobody", XDG_CACHE_HOME=str(tmp_path / "own")), refused=True)
    assert said == BOTH
    assert len(kept(tmp_path / "own" / "flexcp")) == 2
    said = said_by(started(source, "nobody", XDG_CACHE_HOME=str(tmp_path / "own")), refused=True)
    assert not [s for s in said if s.startswith("compiling")]


def planted(source: Path) -> tuple[Path, Path]:
    """Replace the cached files by files that leave a mark when they are executed; return their folder and the mark."""
    assert fresh(source).total(VALUES) == TOTAL
    files, mark = kept(source.parent / "__pycache__"), source.parent / "mark"
    for file in files:
        file.write_bytes(pickle.dumps(Executed(str(mark))))
    return files[0].parent, mark


class Executed:
    def __init__(self, mark: str) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (self.mark,)


def foreign_files(folder: Path) -> None:
    for file in folder.iterdir():
        os.chown(file, 65534, 65534)


def foreign_folder(folder: Path) -> None:
    os.chown(folder, 65534, 65534)


def writable_files(folder: Path) -> None:
    for file in folder.iterdir():
        file.chmod(0o664)


def writable_folder(folder: Path) -> None:
    folder.chmod(0o1777)


def linked_files(folder: Path) -> None:
    for number, file in enumerate(list(folder.iterdir())):
        file.rename(folder.parent / f"elsewhere{number}")
        file.symlink_to(folder.parent / f"elsewhere{number}")


def linked_folder(folder: Path) -> None:
    folder.rename(folder.parent / "elsewhere")
    folder.symlink_to(folder.parent / "elsewhere")


ROOT_ONLY = pytest.mark.skipif(os.geteuid() != 0, reason="only root makes files of another user")


@pytest.mark.parametrize(
    "open_door",
    [
        pytest.param(foreign_files, marks=ROOT_ONLY),
        pytest.param(foreign_folder, marks=ROOT_ONLY),
        writable_files,
        writable_folder,
        linked_files,
        linked_folder,
    ],
)
def test_what_others_may_have_written_is_never_executed(
    source: Path, caplog: pytest.LogCaptureFixture, open_door: Callable[[Path], None]
) -> None:
    folder, mark = planted(source)
    open_door(folder)
    with pytest.warns(RuntimeWarning, match="does not use compiled loops that others may have written") as warned:
        said = records(caplog, source)
    assert [s for s in said if s.startswith("compiling")] == BOTH
    assert not mark.exists()
    assert len(warned) == 1 and str(folder) in str(warned[0].message)


def test_what_the_user_wrote_is_executed(source: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Files of the user's own are executed, which shows that the tests above replace the right files."""
    _, mark = planted(source)
    records(caplog, source)
    assert mark.exists()


def test_folders_are_made_for_nobody_else_to_write(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "given" / "below"))
    before = os.umask(0)
    try:
        records(caplog, source)
    finally:
        os.umask(before)
    files = kept(tmp_path / "given" / "below")
    wanted = 0o755 if os.geteuid() == 0 else 0o700
    for folder in (files[0].parent, files[0].parents[1], files[0].parents[2]):
        assert stat.S_IMODE(folder.stat().st_mode) == wanted
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o644}
    assert records(caplog, source) == []


def test_a_kept_file_is_whole_from_its_first_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file is written under another name and renamed when complete; if that fails, the old file stays."""
    private_files.write_own(tmp_path / "kept", "loop", b"old")
    names: list[list[str]] = []
    replace = os.replace

    def seen(*args: Any, **kwargs: Any) -> None:
        names.append(sorted(os.listdir(tmp_path / "kept")))
        assert private_files.read_own(tmp_path / "kept", "loop") == b"old"
        replace(*args, **kwargs)

    monkeypatch.setattr(os, "replace", seen)
    private_files.write_own(tmp_path / "kept", "loop", b"new")
    assert private_files.read_own(tmp_path / "kept", "loop") == b"new"
    assert len(names) == 1 and len(names[0]) == 2 and "loop" in names[0]

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space"):
        private_files.write_own(tmp_path / "kept", "loop", b"newer")
    assert os.listdir(tmp_path / "kept") == ["loop"]
    assert private_files.read_own(tmp_path / "kept", "loop") == b"new"


def test_processes_that_compile_at_once(source: Path, tmp_path: Path) -> None:
    shared = str(tmp_path / "shared")
    at_once = [started(source, dtype=dtype, NUMBA_CACHE_DIR=shared) for dtype in ("int64", "float64")]
    for process in at_once:
        said_by(process)
    assert len(kept(Path(shared))) == 4, "two loops for two types, and nothing half-written"
    for dtype in ("int64", "float64"):
        assert said_by(started(source, dtype=dtype, NUMBA_CACHE_DIR=shared)) == []

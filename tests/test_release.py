"""Proves what people install: wheel and sdist are built, hold what the package needs and nothing else, and work in an environment of their own.

The environment sees the packages flexcp depends on, but not this checkout: editable installs are found by a path file that it does not read.
"""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

import flexcp

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a wheel and an sdist."""
    folder = tmp_path_factory.mktemp("dist")
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-d", str(folder)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return folder


def environment(folder: Path, package: Path) -> Path:
    """A fresh environment with the package in it; its folder of commands."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    python = folder / "bin" / "python"
    site = next(folder.glob("lib/python*/site-packages"))
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--disable-pip-version-check"]
    done = subprocess.run(
        [*pip, "--no-deps", "--no-build-isolation", "--ignore-installed", package], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return folder / "bin"


def test_the_wheel_holds_the_package_and_nothing_else(built: Path) -> None:
    names = zipfile.ZipFile(next(built.glob("*.whl"))).namelist()
    assert {name.split("/")[0] for name in names} == {"flexcp", f"flexcp-{flexcp.__version__}.dist-info"}
    scripts = {f"flexcp/report/page/{path.name}" for path in (ROOT / "src/flexcp/report/page").iterdir()}
    assert {"flexcp/py.typed", *scripts} <= set(names)
    assert not [name for name in names if "__pycache__" in name or name.endswith((".nbc", ".pyc"))]
    assert {p for p in names if p.endswith(".py")} == {
        str(p.relative_to(ROOT / "src")) for p in (ROOT / "src/flexcp").rglob("*.py")
    }


def test_the_sdist_can_be_built_from(built: Path) -> None:
    names = tarfile.open(next(built.glob("*.tar.gz"))).getnames()
    top = f"flexcp-{flexcp.__version__}"
    for needed in ("pyproject.toml", "README.md", "LICENSE", "src/flexcp/py.typed", "CHANGELOG.md", "tests/test_release.py"):
        assert f"{top}/{needed}" in names, needed


@pytest.mark.parametrize("kind", ["*.whl", "*.tar.gz"])
def test_it_works_where_it_is_installed(built: Path, kind: str, tmp_path: Path) -> None:
    commands = environment(tmp_path / "env", next(built.glob(kind)))

    def run(*words: str) -> str:
        done = subprocess.run([str(w) for w in words], cwd=tmp_path, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout

    where = run(commands / "python", "-c", "import flexcp; print(flexcp.__file__)")  # type: ignore[arg-type]
    assert str(tmp_path / "env") in where
    assert run(commands / "flexcp", "--version") == f"{flexcp.__version__}\n"  # type: ignore[arg-type]
    words = ["plan", "--lengths", "900,31,1", "--ranks", "4", "--strategy", "zigzag"]
    assert "zigzag on h100:1x4" in run(commands / "flexcp", *words)  # type: ignore[arg-type]
    script = "from flexcp.report.page import page; from flexcp.report.sections import words_section as w; print(len(page([w('a', ['b'])], 't')))"
    assert int(run(commands / "python", "-c", script)) > 10_000  # type: ignore[arg-type]


def test_versions_agree() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", flexcp.__version__)
    assert f"## {flexcp.__version__}" in (ROOT / "CHANGELOG.md").read_text()
    assert f"version: {flexcp.__version__}" in (ROOT / "CITATION.cff").read_text()

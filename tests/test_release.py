"""Tests of what users install: wheel and sdist hold what the package needs and nothing else, and the wheel works in a
new environment.

The new environment sees the packages that flexcp depends on, but not this checkout: an editable install is found by a
.pth file, which the new environment does not read.
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
    """A folder with a freshly built wheel and sdist."""
    folder = tmp_path_factory.mktemp("dist")
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-d", str(folder)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return folder


def environment(folder: Path, package: Path) -> Path:
    """Make a new virtual environment with the package installed, and return its folder of commands."""
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


def test_the_sdist_makes_the_same_wheel(built: Path, tmp_path: Path) -> None:
    with tarfile.open(next(built.glob("*.tar.gz"))) as packed:
        packed.extractall(tmp_path, filter="data")
    top = tmp_path / f"flexcp-{flexcp.__version__}"
    for needed in ("LICENSE", "CHANGELOG.md", "tests/test_release.py"):
        assert (top / needed).is_file(), needed
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)], cwd=top, check=True
    )
    again, first = (zipfile.ZipFile(next(folder.glob("*.whl"))).namelist() for folder in (tmp_path, built))
    assert sorted(again) == sorted(first)


def test_it_works_where_it_is_installed(built: Path, tmp_path: Path) -> None:
    commands = environment(tmp_path / "env", next(built.glob("*.whl")))

    def run(*words: str) -> str:
        done = subprocess.run(
            [str(commands / words[0]), *words[1:]], cwd=tmp_path, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert str(tmp_path / "env") in run("python", "-c", "import flexcp; print(flexcp.__file__)")
    assert run("flexcp", "--version") == f"{flexcp.__version__}\n"
    assert "zigzag on h100:1x4" in run(
        "flexcp", "plan", "--lengths", "900,31,1", "--ranks", "4", "--strategy", "zigzag"
    )
    script = (
        "from flexcp.report import page, sections; print(len(page.page([sections.words_section('a', ['b'])], 't')))"
    )
    assert int(run("python", "-c", script)) > 10_000


def test_versions_agree() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", flexcp.__version__)
    assert f"## {flexcp.__version__}" in (ROOT / "CHANGELOG.md").read_text()
    assert f"version: {flexcp.__version__}" in (ROOT / "CITATION.cff").read_text()

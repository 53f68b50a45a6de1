"""Tests that the site builds with warnings as errors, has every page and public name, and loads nothing from other
hosts.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import flexcp

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocs")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_every_page_is_there_and_reached(site: Path) -> None:
    pages = {page.relative_to(ROOT / "docs").with_suffix("").as_posix() for page in (ROOT / "docs").rglob("*.md")}
    assert {page.relative_to(site).with_suffix("").as_posix() for page in site.rglob("*.html")} >= pages
    start = (site / "index.html").read_text()
    assert not [page for page in pages if f'href="{page}.html"' not in start and page != "index"]


def test_pages_load_nothing_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        loaded = re.findall(r'<(?:script|link|img|iframe)[^>]*(?:src|href)="(https?:[^"]*)"', page.read_text())
        assert not loaded, (page.name, loaded)


def test_public_names_are_in_the_reference(site: Path) -> None:
    text = (site / "api.html").read_text()
    missing = [name for name in flexcp.__all__ if name not in text]
    assert not missing


def test_json_keys_and_commands_are_documented() -> None:
    import typer

    from flexcp.cli.main import app

    listed, _, documented = (ROOT / "docs" / "commands.md").read_text().partition("\n## JSON output\n")
    for name in typer.main.get_command(app).commands:
        assert f"flexcp {name}" in documented, name
        assert f"flexcp {name}" in listed, name


def test_every_picture_is_on_a_page() -> None:
    texts = "".join(page.read_text() for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
    shown = set(re.findall(r"/([\w.-]+)[)\"]", texts))
    assert not [picture.name for picture in (ROOT / "docs" / "pictures").iterdir() if picture.name not in shown]


def test_pictures_of_both_themes_exist() -> None:
    """Pictures for two themes are HTML tags, which mkdocs does not check; it checks Markdown links alone."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    found = [(page, path) for page in pages for path in re.findall(r'\bsrc(?:set)?="([^"]+)"', page.read_text())]
    assert found and not [(page.name, path) for page, path in found if not (page.parent / path).is_file()]


def test_the_readme_is_short() -> None:
    """At most 1,000 words, not counting code blocks, comments, HTML tags and the rules of tables."""
    text = (ROOT / "README.md").read_text()
    text = re.sub(r"^```.*?^```$|<!--.*?-->|<[^>\n]+>", "", text, flags=re.MULTILINE | re.DOTALL)
    words = [word for word in text.split() if not re.fullmatch(r"[|#*-]+", word)]
    assert len(words) <= 1000


def test_links_of_the_readme_lead_somewhere() -> None:
    """The README is no page of the site, so mkdocs does not check its links."""
    for target in re.findall(r"\]\(([^)]+)\)", (ROOT / "README.md").read_text()):
        path, _, anchor = target.partition("#")
        text = (ROOT / path).read_text() if path.endswith(".md") else ""
        titles = [
            re.sub(r"[^\w -]", "", line.lstrip("# ")).lower().replace(" ", "-")
            for line in text.split("\n")
            if line.startswith("#")
        ]
        assert (ROOT / path).exists() and (not anchor or anchor in titles), target

"""The browser for tests of the HTML report: a Chromium on the path, driven by Playwright.

``make test`` installs Debian's Chromium if it can (root and apt-get). Without a browser these tests are skipped with a
message. With ``--screenshots FOLDER`` (``make screenshots``) pictures for the docs are kept.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--screenshots", metavar="FOLDER", default=None, help="Keep pictures of the report in this folder."
    )


@pytest.fixture(scope="session")
def screenshots(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which pictures of the report are saved."""
    given = request.config.getoption("--screenshots", default=None)
    folder = Path(given) if given else tmp_path_factory.mktemp("screenshots")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A headless Chromium."""
    found = next((path for name in CHROMIUM if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip(f"no browser: none of {', '.join(CHROMIUM)} on the path (apt-get install chromium)")
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as play:
        launched = play.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield launched
        launched.close()

"""Proves that every page of results says whether it was measured or simulated, when, and by which command,
and is listed in the index of results and in the navigation.
"""

from __future__ import annotations

import re

import blocks
import pytest

PAGES = {
    name: text for name, text in blocks.pages().items() if name.startswith("results/") and name != "results/index.md"
}


@pytest.mark.parametrize("page", PAGES)
def test_a_page_says_what_it_is(page: str) -> None:
    begin = PAGES[page].split("\n\n")[1]
    assert re.match(r"\*\*(Measured|Simulated|Measured against simulated|Computed from plans)\*\*", begin), begin
    assert re.search(r"\d{4}-\d\d-\d\d|on the dates of the sections|on the dates and by", begin), begin
    assert re.search(r"`make [a-z-]+|python benchmarks/", PAGES[page])


@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_listed(page: str) -> None:
    listed = blocks.pages()["results/index.md"]
    assert f"]({page.removeprefix('results/')})" in listed
    assert f": {page}\n" in (blocks.ROOT / "mkdocs.yml").read_text()

"""Tests that the numbers which the README and the summary quote are those of the tables of result pages."""

from __future__ import annotations

import re
from pathlib import PurePosixPath

import blocks
import pytest

PAGES = blocks.pages()
SUMMARY = PAGES["summary.md"]
NUMBER = re.compile(r"[+]?\d[\d,.]*(?:e-\d+)?(?:\s?%)?")


def cells(text: str) -> list[list[str]]:
    """Return the rows of all tables of a page, without heads."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    rules = [i for i, row in enumerate(rows) if set("".join(row)) <= {"-", " ", ":"}]
    heads = {i - 1 for i in rules}
    return [row for i, row in enumerate(rows) if i not in rules and i not in heads]


@pytest.mark.parametrize("row", cells(SUMMARY), ids=lambda row: row[0])
def test_a_number_of_the_summary_is_on_the_page_beside_it(row: list[str]) -> None:
    page = re.search(r"\]\(([^)]+)\)", row[-1])
    assert page, f"{row} names no page"
    text = PAGES[str(PurePosixPath(page[1]))]
    said = " ".join(row[1:-1])
    for name in (r"1\.4B", "H200", "64;", "8 ranks", "FlashAttention-4", "float64"):
        said = re.sub(name, "", said)
    for number in NUMBER.findall(said):
        alone = rf"(?<![\d.,]){re.escape(number.strip(',.'))}(?![\d])"
        assert re.search(alone, text), f"{number} of {row} is not on {page[1]}"


def regimes() -> list[tuple[str, str, str, str]]:
    """Return (mean, worst, best, over one fixed) of each regime, as the page of results has them."""
    first_table = PAGES["results/regimes.md"].split("\n## ")[0]
    return [(row[2], row[3], row[4], row[6]) for row in cells(first_table)]


def test_the_table_of_the_readme_is_that_of_the_regimes() -> None:
    readme = (blocks.ROOT / "README.md").read_text().split("## When it pays")[1].split("<picture>")[0]
    said = [(*re.findall(r"\d\.\d\d", row[2]), row[3]) for row in cells(readme)]
    assert said == regimes()


def test_gains_of_the_summary_are_those_of_the_regimes() -> None:
    said = [(row[1], row[2]) for row in cells(SUMMARY) if "regimes.md" in row[-1]]
    means = [(mean, fixed) for mean, _, _, fixed in regimes()]
    assert said == [means[i] for i in (0, 1, 3, 4, 6)]

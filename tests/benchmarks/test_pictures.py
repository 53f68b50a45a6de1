"""Tests that the pictures of the main results are drawn from the tables that the docs show now."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

from lib.svg_plots import THEMES, Scale

ROOT = Path(__file__).parents[2]
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def pictures() -> ModuleType:
    spec = importlib.util.spec_from_file_location("pictures", ROOT / "benchmarks" / "pictures.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["pictures"] = module
    spec.loader.exec_module(module)
    return module


def test_the_pictures_are_those_of_the_pages(pictures: ModuleType) -> None:
    for name, svg in pictures.drawn().items():
        assert (ROOT / "docs" / "pictures" / name).read_text() == svg, f"{name} is old: run make pictures"


def test_every_row_of_a_table_is_a_mark(pictures: ModuleType) -> None:
    page = (ROOT / "docs" / "results" / "box.md").read_text()
    steps = pictures.table(page, "batch", "load", "strategy")
    assert len(steps) > 100
    published = pictures.counted((ROOT / "docs" / "results" / "published.md").read_text())
    stated = [row for row in published if row["setting"].startswith("stated")]
    for svg in (pictures.drawn()[f"predictions-{theme.name}.svg"] for theme in THEMES):
        assert svg.count("<circle ") == len(steps) + len(stated) + 1  # 1 for the legend
        assert svg.count("<rect ") == len(published) - len(stated) + 1 + 1  # 1 for the legend, 1 for the background


def test_marks_and_words_stay_inside(pictures: ModuleType) -> None:
    for name, svg in pictures.drawn().items():
        root = ElementTree.fromstring(svg)
        width, height = float(root.attrib["width"]), float(root.attrib["height"])
        for node in root.iter():
            for key, most in (("x", width), ("cx", width), ("y", height), ("cy", height)):
                assert 0 <= float(node.attrib.get(key, 0)) <= most, (name, node.attrib)
        for node in root.iter(f"{SVG}text"):
            x, wide = float(node.attrib["x"]), 6.0 * len(node.text or "")
            begin = {"start": x, "end": x - wide, "middle": x - wide / 2}[node.attrib["text-anchor"]]
            assert begin > 0 and begin + wide < width, (name, node.text)


def test_a_table_is_found_by_its_columns(pictures: ModuleType) -> None:
    page = "words\n\n| a | b |\n| --- | --- |\n| 1 | 2 |\n| 3 | 4 |\n\n| a | c |\n| --- | --- |\n| 5 | 6 |"
    assert pictures.table(page, "a", "b") == [{"a": "1", "b": "2"}, {"a": "3", "b": "4"}]
    assert pictures.table(page, "a", "c") == [{"a": "5", "c": "6"}]
    with pytest.raises(ValueError, match="no table begins with the columns a, d"):
        pictures.table(page, "a", "d")


def test_scales_are_linear_or_logarithmic() -> None:
    assert Scale(0, 10, 100, 200).at(5) == 150
    assert Scale(1, 100, 200, 100, log=True).at(10) == pytest.approx(150)


def test_themes_differ_in_colours_alone(pictures: ModuleType) -> None:
    light, dark = (
        [
            re.sub(r"#[0-9a-f]{6}", "", svg)
            for name, svg in pictures.drawn().items()
            if name.endswith(f"{theme.name}.svg")
        ]
        for theme in THEMES
    )
    assert light == dark and len(light) == 4

"""Tests of the HTML elements of a report: the tools of a figure, and the cells of tables."""

from __future__ import annotations

import re
from typing import Any

from flexcp.report.markup import choice, figure, folded, paragraphs, table, tiles


def made(**options: Any) -> str:
    return figure("picture", 1, title="A & B", says="c", caption="d", behind="<i>e</i>", **options)


def test_a_figure_has_the_tools_it_was_given_and_no_bar_without_any() -> None:
    assert re.findall(r'data-zoom="(\w+)"', made()) == ["in", "out", "all"] and 'class="tools"' in made()
    assert re.findall(r'data-zoom="(\w+)"', made(tools="<u>t</u>")) == ["in", "out", "all"]
    only = made(tools="<u>t</u>", zoom=False)
    assert (
        "data-zoom" not in only and '<div class="tools" role="group" aria-label="Tools of A &amp; B"><u>t</u>' in only
    )
    assert 'class="tools"' not in made(zoom=False)


def test_a_figure_says_what_it_shows_and_halves_stand_side_by_side() -> None:
    text = made()
    assert 'data-picture="picture" data-section="1"><h3>A &amp; B</h3><p class="caption">d</p>' in text
    assert 'aria-label="A &amp; B: c"></canvas><i>e</i></figure>' in text
    assert text.startswith("<figure data") and made(half=True).startswith("<figure class=half data")


def test_numbers_are_written_with_their_value_to_sort_by() -> None:
    text = table(["name", "n"], [["a<b", 12_345], ["c", 2.5]], "Caption")
    assert "<td>a&lt;b</td>" in text and "<caption>Caption</caption>" in text
    assert '<td class="number" data-value="12345">12,345</td>' in text
    assert '<td class="number" data-value="2.5">2.500</td>' in text
    assert len(re.findall("<th ", text)) == 2 and len(re.findall("<tr>", text)) == 3


def test_words_tiles_choices_and_what_is_folded() -> None:
    assert paragraphs(["a<", "b"]) == "<p>a&lt;</p><p>b</p>"
    assert tiles([("n", "1 x")]) == '<dl class="tiles"><div><dt>n</dt><dd>1 x</dd></div></dl>'
    assert folded("s", "<p>x</p>") == "<details><summary>s</summary><p>x</p></details>"
    wanted = '<label>Mask <select data-choice="mask"><option value="0">full</option></select></label>'
    assert choice("mask", "Mask", [(0, "full")]) == wanted

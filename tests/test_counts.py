"""Proves that the counts of a checkout are what a reader would count."""

from __future__ import annotations

from pathlib import Path

import counts
import flexcp
import flexcp.data


def test_counts_of_this_checkout_agree_with_the_package() -> None:
    found = counts.counts(counts.ROOT)
    assert found["names of flexcp"] == str(len(flexcp.__all__))
    assert found["names of flexcp.data"] == str(len(flexcp.data.__all__))
    assert found[f"Python lines over {counts.MOST_COLUMNS} columns"] == "0"


def test_words_are_those_that_a_reader_sees(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    hidden = "<!-- not this -->\n```python\nnor this\n```\n<img src='x'>"
    page.write_text(f"# One two\n\n{hidden}three\n\n| four | five |\n| --- | --- |\n")
    assert counts.words(page) == 5


def test_arguments_are_counted_without_self_and_old_ones(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("class A:\n  def f(self, a, /, b, *, c=1, **old): pass\n")
    assert counts.arguments(tmp_path / "a.py", "A.f") == 3
    (tmp_path / "b.py").write_text('__all__ = ["a", "b"]\n')
    assert counts.public_names(tmp_path / "b.py") == ["a", "b"] and counts.public_names(tmp_path / "a.py") == []

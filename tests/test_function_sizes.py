"""Proves that functions stay within the limits on length and depth, and that the check finds those that do not."""

from __future__ import annotations

import ast

import pytest

from function_sizes import IN_ONE_PIECE, MOST_LEVELS, MOST_LINES, sizes, sizes_in
from house import SOURCE


def test_no_function_is_too_long_or_too_deep() -> None:
    """Listed GPU functions may exceed the limits if their docstring says why."""
    large = {size.name: size for size in sizes(SOURCE) if size.too_large}
    unlisted = [str(size) for name, size in large.items() if name not in IN_ONE_PIECE]
    assert not unlisted, f"over {MOST_LINES} lines or {MOST_LEVELS} levels; take out a part that has a name: {unlisted}"
    assert large.keys() == IN_ONE_PIECE, "listed, but within the limits: take it off the list"
    for size in large.values():
        assert size.on_gpu, f"{size.name} is no GPU function"
        assert "In one piece" in size.docstring, f"{size.name} does not say why it is in one piece"


@pytest.mark.parametrize(
    ("body", "levels"),
    [
        ("pass", 1),
        ("if a:\n  b()", 2),
        ("if a:\n  b()\nelif c:\n  d()\nelse:\n  e()", 2),
        ("if a:\n  b()\nelse:\n  e()\n  if c:\n    d()", 3),
        ("for a in b:\n  while c:\n    with d:\n      e()", 4),
        ("try:\n  a()\nexcept b:\n  if c:\n    d()", 3),
        ("match a:\n  case 1:\n    if b:\n      c()", 3),
        ("if a:\n  def g():\n    if b:\n      c()", 2),
    ],
)
def test_levels_are_blocks(body: str, levels: int) -> None:
    text = "def f():\n" + "".join(f"  {line}\n" for line in body.splitlines())
    assert next(sizes_in("m", ast.parse(text))).levels == levels


def test_functions_inside_functions_and_classes_are_counted() -> None:
    text = "class A:\n  @cute.jit\n  def f(self):\n    '''Why.'''\n    def g():\n      pass\nif x:\n  def h(): pass\n"
    found = {size.name: size for size in sizes_in("m", ast.parse(text))}
    assert list(found) == ["m.A.f", "m.A.f.g", "m.h"]
    assert found["m.A.f"].lines == 4 and found["m.A.f"].on_gpu and found["m.A.f"].docstring == "Why."
    assert not found["m.h"].on_gpu

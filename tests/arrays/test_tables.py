"""Proves that tables are sorted by their columns as they are given, whatever numbers these hold."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from flexcp.arrays.tables import Table

Ints = NDArray[np.int64]
NUMBERS = st.one_of(st.integers(-3, 3), st.integers(0, 1 << 40), st.integers(-(1 << 63), (1 << 63) - 1))


@dataclass(frozen=True, eq=False)
class Rows(Table):
    a: Ints
    b: Ints
    c: Ints
    number: Ints


@given(st.lists(st.tuples(NUMBERS, NUMBERS, NUMBERS), max_size=30), st.permutations(["a", "b", "c"]))
def test_rows_are_sorted_by_the_first_column_first_and_equal_ones_keep_their_order(
    rows: list[tuple[int, int, int]], names: list[str]
) -> None:
    columns = np.array(rows, np.int64).reshape(-1, 3).T
    table = Rows(*columns, np.arange(len(rows)))
    found = table.sorted_by(*names)
    place = ["abc".index(name) for name in names]
    expected = sorted(range(len(rows)), key=lambda i: [rows[i][p] for p in place])
    assert found.number.tolist() == expected

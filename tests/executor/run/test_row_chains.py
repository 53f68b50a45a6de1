"""Proves that chains cover every stretch once, in the order of stretches; test_row_runs.py reduces numbers by them."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from flexcp.executor.run.row_chains import Stretches, find_chains

rectangles = st.tuples(*(st.integers(low, 9) for low in (0, 0, 1, 0, 1)))


@settings(max_examples=200, deadline=None)
@given(st.lists(rectangles, min_size=1, max_size=6), st.integers(1, 30))
def test_parts_of_a_piece_are_one_chain_in_the_order_of_stretches(drawn: list[tuple[int, ...]], most: int) -> None:
    chains = find_chains(Stretches(*np.array(drawn).T), most)
    covered: dict[tuple[int, int, int], list[int]] = {}
    written: list[tuple[int, int, int]] = []
    for stretch, row, rows, column, columns, parts in zip(*(each.tolist() for each in chains), strict=True):
        assert rows == 1 or rows * columns <= most
        cells = [(drawn[stretch][0], r, c) for r in range(row, row + rows) for c in range(column, column + columns)]
        written += cells if parts else []
        for cell in cells:
            covered.setdefault(cell, []).append(stretch)
    expected: dict[tuple[int, int, int], list[int]] = {}
    for stretch, (target, row, rows, column, columns) in enumerate(drawn):
        for cell in ((target, r, c) for r in range(row, row + rows) for c in range(column, column + columns)):
            expected.setdefault(cell, []).append(stretch)
    assert covered == expected
    assert sorted(written) == sorted(expected), "one program writes each cell"
    begins = np.flatnonzero(chains.parts)
    assert np.array_equal(np.diff(np.append(begins, len(chains.parts))), chains.parts[begins])


def test_no_stretches_make_no_chains() -> None:
    chains = find_chains(Stretches(*np.zeros((5, 0), np.int64)), 10)
    assert all(len(column) == 0 for column in chains)

"""Proves that a table of sums adds everything once, in order, and that no two programs write the same element."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from flexcp.executor.run.row_sums import PIECE_ELEMENTS, Additions, sum_runs

HEADS, WIDTH, ROWS, SOURCE = 3, 40, 150, 20_000
STEP = HEADS * WIDTH


@st.composite
def additions(draw: st.DrawFn) -> list[tuple[int, int, int, int, int, int]]:
    """Draw (target tensor, first row, rows, first head, last head + 1, distance of rows in the source)."""
    found = []
    for _ in range(draw(st.integers(1, 8))):
        row, h0 = draw(st.integers(0, ROWS - 1)), draw(st.integers(0, HEADS - 1))
        h1 = draw(st.integers(h0 + 1, HEADS))
        gap = draw(st.sampled_from([0, 8]))
        found.append((draw(st.integers(0, 1)), row, draw(st.integers(1, ROWS - row)), h0, h1, (h1 - h0) * WIDTH + gap))
    return found


@settings(max_examples=150, deadline=None)
@given(additions(), st.integers(0, 10))
def test_every_element_is_added_once_in_the_order_of_messages(
    drawn: list[tuple[int, int, int, int, int, int]], seed: int
) -> None:
    random = np.random.default_rng(seed)
    source = random.standard_normal((2, SOURCE)).astype(np.float32)
    begins = random.integers(0, SOURCE - ROWS * (STEP + 8), len(drawn))
    expected = random.standard_normal((2, ROWS * STEP)).astype(np.float32)
    found = expected.copy()
    for begin, (tensor, row, rows, h0, h1, step) in zip(begins, drawn, strict=True):
        for r in range(rows):
            at, length = (row + r) * STEP + h0 * WIDTH, (h1 - h0) * WIDTH
            expected[tensor, at : at + length] += source[tensor, begin + r * step :][:length]
    columns = [
        (tensor, begin, step, row, rows, h0 * WIDTH, STEP, (h1 - h0) * WIDTH)
        for begin, (tensor, row, rows, h0, h1, step) in zip(begins, drawn, strict=True)
    ]
    table = sum_runs(Additions(*np.array(columns, np.int64).T))
    written = np.zeros_like(found, np.int64)
    for program in range(table.shape[1]):
        tensor, _, to, length, rows, _, step_to, chain = table[:, program].tolist()
        assert rows * length <= PIECE_ELEMENTS
        assert (rows == 0) == (chain == 0), "only the first part of a chain has rows"
        for r in range(rows):
            at = slice(to + r * step_to, to + r * step_to + length)
            written[tensor, at] += 1
            for part in range(program, program + chain):
                found[tensor, at] += source[tensor, table[1, part] + r * table[5, part] :][:length]
    assert written.max() == 1
    assert np.array_equal(found, expected), "the same bits as one addition after the other"


def test_additions_to_the_same_rows_are_one_chain() -> None:
    column = np.zeros(5, np.int64)
    added = Additions(column, 1000 * np.arange(5), column + 8, column, column + 4, column, column + 8, column + 8)
    table = sum_runs(added)
    assert table[7].tolist() == [5, 0, 0, 0, 0]
    assert table[1].tolist() == [0, 1000, 2000, 3000, 4000]
    assert table[3].tolist() == [32] * 5, "rows without gaps are one long row"
    assert table[4].tolist() == [1, 0, 0, 0, 0]


def test_nothing_to_add_makes_an_empty_table() -> None:
    assert sum_runs(Additions(*np.zeros((8, 0), np.int64))).shape == (8, 0)

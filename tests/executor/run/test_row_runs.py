"""Proves that tables of copies move everything once, and those of additions and merges reduce everything once, in
order, and that no two programs write the same element.
"""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from flexcp.executor.run.row_runs import (
    COPY_BYTES,
    COPY_ROWS,
    MERGE_ELEMENTS,
    PROGRAMS,
    SUM_ELEMENTS,
    Move,
    Place,
    copy_runs,
    merge_runs,
    sum_runs,
)
from flexcp.shape import DTYPE_BYTES

HEADS, WIDTH, ROWS, SOURCE = 3, 40, 150, 40_000
STEP = HEADS * WIDTH
Floats = NDArray[np.float64]
Drawn = list[tuple[int, int, int, int, int, int]]
SEEDS = st.integers(0, 10)


@st.composite
def reductions(draw: st.DrawFn) -> Drawn:
    """Draw (target tensor, first row, rows, first head, last head + 1, gap between rows of the source in heads)."""
    found = []
    for _ in range(draw(st.integers(1, 8))):
        row, h0 = draw(st.integers(0, ROWS - 1)), draw(st.integers(0, HEADS - 1))
        h1 = draw(st.integers(h0 + 1, HEADS))
        rows = draw(st.integers(1, ROWS - row))
        found.append((draw(st.integers(0, 1)), row, rows, h0, h1, draw(st.sampled_from([0, 1]))))
    return sorted(found, key=lambda each: each[0])  # launches group moves by tensors


def place(shelf: int | None, name: str, row: int, rows: int, start: int, step: int) -> Place:
    return Place(shelf, name, "float32", slice(row, row + rows), start, step)


@settings(max_examples=100, deadline=None)
@given(
    reductions(), st.sampled_from([("float32", "float32"), ("bfloat16", "bfloat16"), ("float32", "bfloat16")]), SEEDS
)
def test_every_byte_is_copied_once(drawn: Drawn, dtypes: tuple[str, str], seed: int) -> None:
    random, unit = np.random.default_rng(seed), DTYPE_BYTES[dtypes[0]] if dtypes[0] == dtypes[1] else 1
    source = random.integers(0, 256, (2, unit * SOURCE))
    expected, found, written = (np.zeros((2, unit * ROWS * STEP), np.int64) for _ in range(3))
    pairs: dict[int, list[Move]] = {}
    taken = np.zeros((2, ROWS, HEADS), bool)
    for tensor, row, rows, h0, h1, gap in drawn:
        if taken[tensor, row : row + rows, h0:h1].any():  # copies to the same place have no order
            continue
        taken[tensor, row : row + rows, h0:h1] = True
        begin, length, step = int(random.integers(0, 9000)), (h1 - h0) * WIDTH, (h1 - h0 + gap) * WIDTH
        where = np.arange(row, row + rows)
        if gap:  # rows of the target in any order, some of them one after the other
            where = (
                np.concatenate(random.permutation(np.array_split(where, 3), axis=0)) if rows % 3 == 0 else where[::-1]
            )
        here = Place(None, "k", dtypes[0], slice(0, rows), begin, step)
        there = Place(tensor, "k", dtypes[1], where if gap else slice(row, row + rows), h0 * WIDTH, STEP)
        pairs.setdefault(tensor, []).append(Move("copy", here, there, length))
        for r, to in enumerate(where.tolist()):
            at = unit * (to * STEP + h0 * WIDTH)
            expected[tensor, at : at + unit * length] = source[tensor, unit * (begin + r * step) :][: unit * length]
    table, tensors = copy_runs(list(pairs.values())), list(pairs)
    for pair, begin, to, length, rows, step_from, step_to in table.T.tolist():
        assert rows <= COPY_ROWS[0] and rows * length <= COPY_BYTES[0], "few bytes are spread over many programs"
        for r in range(rows):
            at = slice(to + r * step_to, to + r * step_to + length)
            written[tensors[pair], at] += 1
            found[tensors[pair], at] = source[tensors[pair], begin + r * step_from :][:length]
    assert written.max() == 1
    assert np.array_equal(found, expected)


@settings(max_examples=150, deadline=None)
@given(reductions(), SEEDS)
def test_every_element_is_added_once_in_the_order_of_messages(drawn: Drawn, seed: int) -> None:
    random = np.random.default_rng(seed)
    source = random.standard_normal((2, SOURCE)).astype(np.float32)
    expected = random.standard_normal((2, ROWS * STEP)).astype(np.float32)
    found = expected.copy()
    pairs: dict[int, list[Move]] = {}
    for tensor, row, rows, h0, h1, gap in drawn:
        begin, length, step = int(random.integers(0, 9000)), (h1 - h0) * WIDTH, (h1 - h0 + gap) * WIDTH
        target = place(tensor, "dk", row, rows, h0 * WIDTH, STEP)
        pairs.setdefault(tensor, []).append(Move("add", place(None, "dk", 0, rows, begin, step), target, length))
        for r in range(rows):
            at = (row + r) * STEP + h0 * WIDTH
            expected[tensor, at : at + length] += source[tensor, begin + r * step :][:length]
    table = sum_runs(list(pairs.values()))
    tensors = list(pairs)
    written = np.zeros_like(found, np.int64)
    for program in range(table.shape[1]):
        pair, _, to, length, rows, _, step_to, chain = table[:, program].tolist()
        assert rows * length <= SUM_ELEMENTS[0], "few elements are spread over many programs"
        for r in range(rows if chain else 0):
            at = slice(to + r * step_to, to + r * step_to + length)
            written[tensors[pair], at] += 1
            for part in range(program, program + chain):
                found[tensors[pair], at] += source[tensors[pair], table[1, part] + r * table[5, part] :][:length]
    assert written.max() == 1
    assert np.array_equal(found, expected), "the same bits as one addition after the other"


def merge(
    out: NDArray[np.float64], lse: float, more: NDArray[np.float64], its: float
) -> tuple[NDArray[np.float64], float]:
    total = np.logaddexp(lse, its)
    return out * np.exp(lse - total) + more * np.exp(its - total), float(total)


@settings(max_examples=60, deadline=None)
@given(reductions(), SEEDS)
def test_every_head_is_merged_once_in_the_order_of_messages(drawn: Drawn, seed: int) -> None:
    random = np.random.default_rng(seed)
    source, source_lse = random.standard_normal(SOURCE), random.standard_normal(SOURCE)
    outs, lses = random.standard_normal((2, ROWS * STEP)), random.standard_normal((2, ROWS * HEADS))
    outs[1], lses[1] = outs[0], lses[0]  # by moves, and by the table
    moves = []
    for _, row, rows, h0, h1, gap in drawn:
        heads, begin, its = h1 - h0, int(random.integers(0, 9000)), int(random.integers(0, 9000))
        step = heads + gap
        lse = place(None, "lse", 0, rows, its, step), place(0, "lse", row, rows, h0, HEADS)
        there = place(0, "out", row, rows, h0 * WIDTH, STEP)
        moves.append(Move("merge", place(None, "out", 0, rows, begin, step * WIDTH), there, heads * WIDTH, heads, lse))
        for r in range(rows):
            for h in range(heads):
                at, where = (row + r) * STEP + (h0 + h) * WIDTH, (row + r) * HEADS + h0 + h
                new = source[begin + (r * step + h) * WIDTH :][:WIDTH]
                both = merge(outs[0, at : at + WIDTH], lses[0, where], new, source_lse[its + r * step + h])
                outs[0, at : at + WIDTH], lses[0, where] = both
    table = merge_runs(moves)
    written = np.zeros(ROWS * HEADS, np.int64)
    for program in range(table.shape[1]):
        rows, heads, *_, chain = table[:, program].tolist()
        assert rows * heads * WIDTH <= MERGE_ELEMENTS[0]
        for r in range(rows if chain else 0):
            for h in range(heads):
                _, _, _, _, to, to_step, _, _, to_lse, to_lse_step, _ = table[:, program].tolist()
                at, where = to + r * to_step + h * WIDTH, to_lse + r * to_lse_step + h
                written[where] += 1
                for part in range(program, program + chain):
                    _, _, begin, step, _, _, its, its_step, *_ = table[:, part].tolist()
                    new = source[begin + r * step + h * WIDTH :][:WIDTH]
                    both = merge(outs[1, at : at + WIDTH], lses[1, where], new, source_lse[its + r * its_step + h])
                    outs[1, at : at + WIDTH], lses[1, where] = both
    assert written.max() == 1
    assert np.array_equal(outs[0], outs[1]) and np.array_equal(lses[0], lses[1])


def test_results_of_the_same_rows_are_one_chain() -> None:
    moves = [Move("add", place(None, "dk", 0, 4, 1000 * n, 8), place(0, "dk", 0, 4, 0, 8), 8) for n in range(5)]
    table = sum_runs([moves])
    assert table[7].tolist() == [5, 0, 0, 0, 0]
    assert table[1].tolist() == [0, 1000, 2000, 3000, 4000]
    assert table[3].tolist() == [32] * 5, "rows without gaps are one long row"
    assert table[4].tolist() == [1] * 5


def test_large_launches_have_longer_runs() -> None:
    rows = SUM_ELEMENTS[1] * PROGRAMS // 8
    table = sum_runs([[Move("add", place(None, "dk", 0, rows, 0, 8), place(0, "dk", 0, rows, 0, 8), 8)]])
    assert table.shape[1] == PROGRAMS and set(table[3].tolist()) == {SUM_ELEMENTS[1]}
    moves = [Move("add", place(None, "dk", 0, 2 * rows, 0, 8), place(0, "dk", 0, 2 * rows, 0, 8), 8)]
    table = sum_runs([moves])
    assert table.shape[1] == 2 * PROGRAMS and set(table[3].tolist()) == {SUM_ELEMENTS[1]}, "but not longer than that"


def test_large_copies_have_longer_runs() -> None:
    def copied(rows: int, gap: int) -> Move:
        return Move("copy", place(None, "k", 0, rows, 0, 64), place(0, "k", 0, rows, 0, 64 + gap), 64)

    rows = COPY_BYTES[1] * PROGRAMS // (4 * 64)
    assert copy_runs([[copied(rows, 0)]]).shape[1] == PROGRAMS, "of rows without gaps"
    assert copy_runs([[copied(rows, 0), copied(rows, 0)]]).shape[1] == 2 * PROGRAMS, "but not longer than that"
    rows = COPY_ROWS[1] * PROGRAMS
    assert copy_runs([[copied(rows, 64)]]).shape[1] == PROGRAMS, "of rows with gaps"
    assert copy_runs([[copied(rows, 64), copied(rows, 64)]]).shape[1] == 2 * PROGRAMS

"""Proves masks: every named mask against its definition for each query, slice operations against brute force, and every
conversion.

The definitions below follow the literature's wording (keys seen by query i of a document of n tokens), one query at a
time with plain sets, and share no code with the slices they are compared with.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from flexcp import masks
from flexcp.masks import (
    MASK_MOD_MAX_LENGTH,
    MASK_MOD_MAX_SLICES,
    UNBOUNDED,
    Mask,
    causal,
    causal_blockwise,
    from_cu_seqlens,
    from_key_ranges,
    from_mask_mod,
    from_slices,
    full,
    lambda_,
    modality,
    parse_mask,
    prefix,
    shared_question,
    window,
)

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Rule = Callable[[int, int], set[int]]
Case = tuple[Mask, int, Rule]
quick = settings(max_examples=50, deadline=None)
lengths = st.integers(1, 60)


def dense_of(rule: Rule, n: int) -> Bools:
    """Return the boolean matrix of a definition for each query."""
    out = np.zeros((n, n), bool)
    for i in range(n):
        out[i, sorted(rule(i, n) & set(range(n)))] = True
    return out


# --- the definitions --------------------------------------------------------------------------------------------------


def answer_start(i: int, question: int, answers: list[int]) -> int:
    start = question
    for size in answers:
        if i < start + size:
            return start
        start += size
    raise AssertionError(f"token {i} is in no answer")


def shared_keys(i: int, question: int, answers: list[int]) -> set[int]:
    if i < question:
        return set(range(i + 1))
    return set(range(question)) | set(range(answer_start(i, question, answers), i + 1))


def blockwise_keys(i: int, n: int, block: int, local: int) -> set[int]:
    if i < block or i // block == (n - 1) // block:
        return set(range(i + 1))
    return set(range(block)) | set(range(max(block, i - local * block), i + 1))


def modality_keys(i: int, spans: list[tuple[int, int]], self_only: bool) -> set[int]:
    for start, end in spans:
        if start <= i < end:
            return set(range(start if self_only else 0, end))
    return set(range(i + 1))


def window_keys(i: int, n: int, left: int | None, right: int | None) -> set[int]:
    return {k for k in range(n) if (left is None or k - i >= -left) and (right is None or k - i <= right)}


# --- cases: (mask, length, definition) --------------------------------------------------------------------------------


@st.composite
def window_case(draw: st.DrawFn) -> Case:
    side = st.one_of(st.none(), st.integers(0, 70))
    left, right = draw(side), draw(side)
    return window(left, right), draw(lengths), lambda i, n: window_keys(i, n, left, right)


@st.composite
def lambda_case(draw: st.DrawFn) -> Case:
    sink, width = draw(st.integers(0, 20)), draw(st.integers(1, 20))
    return (
        lambda_(sink, width),
        draw(lengths),
        lambda i, n: set(range(min(sink, i + 1))) | set(range(max(0, i - (width - 1)), i + 1)),
    )


@st.composite
def shared_by_share_case(draw: st.DrawFn) -> Case:
    count, share = draw(st.integers(1, 6)), draw(st.sampled_from([0.0, 0.1, 0.2, 0.5, 0.95, 1.0]))

    def rule(i: int, n: int) -> set[int]:
        q = int(share * n)
        each = (n - q) // count
        return shared_keys(i, q, [each] * (count - 1) + [n - q - each * (count - 1)])

    return shared_question(count, share), draw(lengths), rule


@st.composite
def shared_by_lengths_case(draw: st.DrawFn) -> Case:
    answers = draw(st.lists(st.integers(0, 12), min_size=1, max_size=5))
    question = draw(st.integers(0, 15))
    if question + sum(answers) == 0:
        question = 1
    mask = shared_question(answers, question)
    return mask, question + sum(answers), lambda i, n: shared_keys(i, question, answers)


@st.composite
def blockwise_case(draw: st.DrawFn) -> Case:
    block, local = draw(st.integers(1, 15)), draw(st.integers(0, 4))
    return causal_blockwise(block, local), draw(lengths), lambda i, n: blockwise_keys(i, n, block, local)


@st.composite
def prefix_case(draw: st.DrawFn) -> Case:
    p = draw(st.integers(0, 70))
    return prefix(p), draw(lengths), lambda i, n: set(range(p)) | set(range(i + 1))


@st.composite
def modality_case(draw: st.DrawFn, self_only: bool) -> Case:
    n = draw(lengths)
    edges = sorted(draw(st.lists(st.integers(0, n), max_size=8)))
    spans = list(zip(edges[::2], edges[1::2], strict=False))
    return modality(spans, self_only), n, lambda i, n: modality_keys(i, spans, self_only)


CASES: dict[str, st.SearchStrategy[Case]] = {
    "causal": lengths.map(lambda n: (causal(), n, lambda i, n: set(range(i + 1)))),
    "full": lengths.map(lambda n: (full(), n, lambda i, n: set(range(n)))),
    "window": window_case(),
    "lambda": lambda_case(),
    "shared question by share": shared_by_share_case(),
    "shared question by lengths": shared_by_lengths_case(),
    "causal blockwise": blockwise_case(),
    "prefix": prefix_case(),
    "modality": modality_case(self_only=False),
    "modality, self only": modality_case(self_only=True),
}
any_case = st.one_of(*CASES.values())


@pytest.mark.parametrize("name", CASES)
@quick
@given(data=st.data())
def test_dense_equals_the_definition(name: str, data: st.DataObject) -> None:
    mask, n, rule = data.draw(CASES[name])
    np.testing.assert_array_equal(mask.dense(n), dense_of(rule, n))


@pytest.mark.parametrize("name", CASES)
@quick
@given(data=st.data())
def test_slices_are_trimmed_disjoint_and_not_empty(name: str, data: st.DataObject) -> None:
    mask, n, _ = data.draw(CASES[name])
    slices = mask.slices(n)
    times = sum((pairs(s, n) for s in slices), np.zeros((n, n), np.int64))
    assert times.max(initial=0) <= 1
    assert all(pairs(s, n).any() for s in slices)
    np.testing.assert_array_equal(masks.trim(slices), slices)
    assert masks.area(slices).sum() == times.sum()


@quick
@given(any_case, st.lists(lengths, min_size=1, max_size=5))
def test_slices_of_many_documents_are_those_of_each(case: Case, many: list[int]) -> None:
    mask, n, _ = case
    if mask.length is not None or mask.name == "modality":
        many = [n] * len(many)
    documents, slices = mask.slices_of(np.array(many, np.int64))
    assert documents.tolist() == sorted(documents.tolist())
    for d, length in enumerate(many):
        np.testing.assert_array_equal(slices[documents == d], mask.slices(length))


def test_a_prefix_longer_than_the_document_is_full() -> None:
    np.testing.assert_array_equal(prefix(9).dense(5), np.ones((5, 5), bool))


def test_defaults_are_the_published_ones() -> None:
    assert lambda_() == lambda_(64, 4096)
    assert shared_question() == shared_question(4, 0.2)
    assert causal_blockwise() == causal_blockwise(256, 2)
    assert window(5) == window(5, 0)


@quick
@given(lengths)
def test_causal_is_the_window_without_left_limit(n: int) -> None:
    np.testing.assert_array_equal(window(None, 0).dense(n), causal().dense(n))


def test_masks_are_equal_by_value_and_hashable() -> None:
    assert {window(3, 0), window(3, 0), window(3, 1), causal()} == {window(3, 1), causal(), window(3, 0)}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: window(-1, 0), "window left must be 0 or more"),
        (lambda: window(0, -2), "window right must be 0 or more"),
        (lambda: lambda_(-1, 4), "sink -1"),
        (lambda: lambda_(4, 0), "window 0"),
        (lambda: shared_question(0), "answers >= 1"),
        (lambda: shared_question(2, 1.5), "0 <= question <= 1"),
        (lambda: shared_question(2, -0.5), "0 <= question <= 1"),
        (lambda: shared_question([]), "answer lengths"),
        (lambda: shared_question([3, -1], 2), "answer lengths"),
        (lambda: shared_question([3], 0.5), "answer lengths"),
        (lambda: causal_blockwise(0, 2), "block >= 1"),
        (lambda: causal_blockwise(4, -1), "local >= 0"),
        (lambda: prefix(-1), "got -1"),
        (lambda: modality([(5, 3)]), "ascending"),
        (lambda: modality([(0, 4), (3, 6)]), "disjoint"),
        (lambda: modality([(-1, 4)]), "ascending"),
        (lambda: modality([(2, 9)]).slices(8), r"span \(2, 9\) lies outside a document of 8 tokens"),
        (lambda: shared_question([3, 4], 2).slices(10), "document of 9 tokens but was given one of 10"),
    ],
)
def test_a_wrong_value_is_named(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("make", [lambda: window(2.5), lambda: prefix(1.5), lambda: lambda_(1.5, 4)])
def test_a_fraction_of_a_token_is_refused(make: Callable[[], Mask]) -> None:
    with pytest.raises(ValueError, match=r"\.5"):
        make().slices(6)


@pytest.mark.parametrize(
    "make", [lambda: from_slices(4, [(0, 1.7, 0, 4, None, None)]), lambda: from_cu_seqlens([0, 1.7, 3])]
)
def test_a_fraction_of_a_token_is_refused_in_conversions(make: Callable[[], Any]) -> None:
    with pytest.raises(ValueError, match="integer"):
        make()


# --- operations on slices ---------------------------------------------------------------------------------------------

GRID = 12
coordinate = st.integers(0, GRID)
band = st.one_of(st.integers(-GRID - 2, GRID + 2), st.sampled_from([-UNBOUNDED, UNBOUNDED]))
wild_row = st.tuples(coordinate, coordinate, coordinate, coordinate, band, band)


@st.composite
def full_row(draw: st.DrawFn) -> tuple[int, ...]:
    """Draw a slice that usually has pairs, since independent numbers nearly always give an empty one."""
    q0, k0 = draw(st.integers(0, 7)), draw(st.integers(0, 7))
    q1, k1 = draw(st.integers(q0 + 1, GRID)), draw(st.integers(k0 + 1, GRID))
    middle = k0 - q0 + draw(st.integers(-3, 3))
    lo, hi = middle - draw(st.integers(0, 5)), middle + draw(st.integers(0, 5))
    open_ = draw(st.sampled_from(["neither", "neither", "low", "high", "both"]))
    return (
        *(q0, q1, k0, k1),
        -UNBOUNDED if open_ in ("low", "both") else lo,
        UNBOUNDED if open_ in ("high", "both") else hi,
    )


any_row = st.one_of(full_row(), full_row(), wild_row)
ordered_band = any_row.map(lambda r: (*r[:4], min(r[4:]), max(r[4:])))


def table(rows: list[tuple[int, ...]]) -> Ints:
    return np.array(rows, np.int64).reshape(-1, 6)


def tables(row: st.SearchStrategy[tuple[int, ...]], most: int = 6) -> st.SearchStrategy[Ints]:
    return st.lists(row, max_size=most).map(table)


def pairs(s: Ints, size: int, first: int = 0) -> Bools:
    """Return the pairs of one slice with coordinates in ``first..size`` as a boolean matrix."""
    q0, q1, k0, k1, lo, hi = s.tolist()
    q, k = np.arange(first, size)[:, None], np.arange(first, size)[None, :]
    return (q0 <= q) & (q < q1) & (k0 <= k) & (k < k1) & (lo <= k - q) & (k - q <= hi)


@quick
@given(tables(ordered_band))
def test_area_counts_pairs(slices: Ints) -> None:
    assert masks.area(slices).tolist() == [pairs(s, GRID).sum() for s in slices]


@quick
@given(tables(ordered_band), st.integers(-2, GRID + 2), st.integers(-2, GRID + 2))
def test_rows_area_counts_pairs_of_those_rows(slices: Ints, first: int, last: int) -> None:
    expected = [pairs(s, GRID)[max(first, 0) : max(last, 0)].sum() for s in slices]
    assert masks.rows_area(slices, first, last).tolist() == expected
    columns = np.full(len(slices), first), np.full(len(slices), last)
    assert masks.rows_area(slices, *columns).tolist() == expected


@pytest.mark.parametrize("n", [2**20 + 1, 2**30 - 1])
def test_areas_are_exact_for_the_longest_documents(n: int) -> None:
    assert masks.area(causal().slices(n)).tolist() == [n * (n + 1) // 2]
    assert masks.area(full().slices(n)).tolist() == [n * n]
    assert masks.area(window(4095, 0).slices(n)).tolist() == [4096 * n - 4095 * 4096 // 2]


@quick
@given(tables(any_row))
def test_trim_keeps_the_pairs_in_the_smallest_slice(slices: Ints) -> None:
    trimmed = masks.trim(slices)
    for before, after in zip(slices, trimmed, strict=True):
        held = pairs(before, GRID)
        np.testing.assert_array_equal(pairs(after, GRID), held)
        q, k = np.nonzero(held)
        tight = (q.min(), q.max() + 1, k.min(), k.max() + 1, (k - q).min(), (k - q).max()) if len(q) else (0,) * 6
        assert tuple(after) == tight


@quick
@given(tables(any_row))
def test_a_trimmed_slice_is_empty_exactly_when_it_holds_no_pair(slices: Ints) -> None:
    assert masks.is_empty(masks.trim(slices)).tolist() == [not pairs(s, GRID).any() for s in slices]


@quick
@given(tables(any_row), coordinate, coordinate, coordinate, coordinate)
def test_cut_keeps_the_pairs_inside_the_ranges(slices: Ints, q0: int, q1: int, k0: int, k1: int) -> None:
    inside = np.zeros((GRID, GRID), bool)
    inside[q0:q1, k0:k1] = True
    given_slices = slices.copy()
    found = masks.cut(slices, q0, q1, k0, k1)
    np.testing.assert_array_equal(slices, given_slices)
    for before, after in zip(slices, found, strict=True):
        np.testing.assert_array_equal(pairs(after, GRID), pairs(before, GRID) & inside)
    np.testing.assert_array_equal(masks.trim(found), found)


@quick
@given(tables(ordered_band), st.integers(-8, 8), st.integers(-8, 8))
def test_shift_moves_every_pair(slices: Ints, queries: int, keys: int) -> None:
    low, high = -10, GRID + 10
    given_slices = slices.copy()
    for before, after in zip(slices, masks.shift(slices, queries, keys), strict=True):
        expected = {(q + queries, k + keys) for q, k in np.argwhere(pairs(before, GRID)).tolist()}
        assert {(q + low, k + low) for q, k in np.argwhere(pairs(after, high, low)).tolist()} == expected
    np.testing.assert_array_equal(slices, given_slices)


@quick
@given(tables(any_row, most=4))
def test_overlapping_pair_finds_two_slices_that_share_a_pair(slices: Ints) -> None:
    slices = masks.trim(slices)
    slices = slices[~masks.is_empty(slices)]
    share = {(i, j) for i in range(len(slices)) for j in range(len(slices)) if i != j and shared(slices[i], slices[j])}
    found = masks.overlapping_pair(slices)
    assert (found in share) if share else (found is None)


def shared(a: Ints, b: Ints) -> bool:
    return bool((pairs(a, GRID) & pairs(b, GRID)).any())


# --- explicit masks ---------------------------------------------------------------------------------------------------

sorted_row = st.tuples(
    st.tuples(coordinate, coordinate).map(sorted),
    st.tuples(coordinate, coordinate).map(sorted),
    st.tuples(st.integers(-13, 13), st.integers(-13, 13)).map(sorted),
).map(lambda t: (*t[0], *t[1], *t[2]))
slice_rows = st.one_of(full_row(), sorted_row).map(
    lambda r: (*r[:4], *(None if abs(x) == UNBOUNDED else x for x in r[4:]))
)


@settings(max_examples=120, deadline=None)
@given(st.lists(slice_rows, max_size=4))
def test_from_slices_takes_exactly_the_disjoint_ones(rows: list[tuple[int | None, ...]]) -> None:
    bounded = table([(*r[:4], *(-99 if r[4] is None else r[4], 99 if r[5] is None else r[5])) for r in rows])
    times = sum((pairs(s, GRID).astype(int) for s in bounded), np.zeros((GRID, GRID), int))
    if times.max() > 1:
        with pytest.raises(ValueError, match="share a"):
            from_slices(GRID, rows)
    else:
        np.testing.assert_array_equal(from_slices(GRID, rows).dense(GRID), times == 1)


def test_a_mask_without_slices_or_pairs_is_valid() -> None:
    assert not from_slices(5, []).dense(5).any()
    assert not from_slices(5, [(2, 2, 0, 5, None, None), (0, 5, 0, 5, 7, None)]).dense(5).any()


def test_rectangles_may_overlap_where_bands_do_not() -> None:
    mask = from_slices(6, [(0, 6, 0, 6, None, -1), (0, 6, 0, 6, 0, 0), (0, 6, 0, 6, 1, None)])
    assert mask.dense(6).all()


@pytest.mark.parametrize(
    ("length", "row", "message"),
    [
        (4, (3, 2, 0, 4, None, None), "q0 <= q1"),
        (4, (0, 4, 3, 2, None, None), "k0 <= k1"),
        (4, (0, 4, 0, 4, 1, 0), "lo <= hi"),
        (4, (-1, 4, 0, 4, None, None), "outside its document of 4"),
        (4, (0, 4, -1, 4, None, None), "outside its document of 4"),
        (4, (0, 5, 0, 4, None, None), "outside its document of 4"),
        (4, (0, 4, 0, 5, None, None), "outside its document of 4"),
        (4, (0, 4, 0, 4, None), "a slice is"),
        (4, (None, 4, 0, 4, None, None), "only lo and hi may be None"),
        (0, (0, 0, 0, 0, None, None), "at least 1 token"),
    ],
)
def test_from_slices_refuses_what_is_no_slice(length: int, row: tuple[int | None, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_slices(length, [row])


def test_an_explicit_mask_fits_one_length_only() -> None:
    with pytest.raises(ValueError, match="document of 4 tokens but was given one of 5"):
        from_slices(4, []).slices(5)


@st.composite
def key_ranges(draw: st.DrawFn) -> list[list[tuple[int, int]]]:
    n = draw(st.integers(1, 14))
    one = st.tuples(st.integers(0, n), st.integers(0, n)).map(lambda p: (min(p), max(p)))
    return draw(st.lists(st.lists(one, max_size=5), min_size=n, max_size=n))


def ranges_matrix(ranges: list[list[tuple[int, int]]]) -> Bools:
    out = np.zeros((len(ranges), len(ranges)), bool)
    for q, mine in enumerate(ranges):
        for a, b in mine:
            out[q, a:b] = True
    return out


@settings(max_examples=150, deadline=None)
@given(key_ranges())
def test_key_ranges_are_united_and_kept_exactly(ranges: list[list[tuple[int, int]]]) -> None:
    np.testing.assert_array_equal(from_key_ranges(ranges).dense(len(ranges)), ranges_matrix(ranges))


@quick
@given(any_case)
def test_key_ranges_of_a_named_mask_give_it_back(case: Case) -> None:
    mask, n, _ = case
    dense = mask.dense(n)
    edges = np.diff(np.pad(dense.astype(int), ((0, 0), (1, 1))), axis=1)
    ranges = [list(zip(*(np.flatnonzero(row == s).tolist() for s in (1, -1)), strict=True)) for row in edges]
    np.testing.assert_array_equal(from_key_ranges(ranges).dense(n), dense)


def test_key_ranges_may_be_an_array() -> None:
    array = np.array([[[0, 1], [0, 0]], [[0, 2], [1, 2]], [[0, 1], [2, 3]]])
    expected = np.array([[1, 0, 0], [1, 1, 0], [1, 0, 1]], bool)
    np.testing.assert_array_equal(from_key_ranges(array).dense(3), expected)


def test_regular_key_ranges_become_few_slices() -> None:
    n = 200
    assert len(from_key_ranges([[(0, i + 1)] for i in range(n)]).slices(n)) == 1
    assert len(from_key_ranges([[(max(0, i - 9), min(n, i + 5))] for i in range(n)]).slices(n)) <= 3
    assert len(from_key_ranges([[(0, 7), (100, 150)]] * n).slices(n)) == 2


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: masks.from_mask_mod(lambda *_: True, 5), "mask_mod returned True; it returns a tensor"),
        (
            lambda: masks.from_mask_mod(lambda b, h, q, k: q[:3] >= k[:, :3], 5),
            r"mask_mod returned a tensor of shape \(3, 3\) for 5 queries and 5 keys",
        ),
        (lambda: masks.from_mask_mod("causal", 5), "mask_mod is a function .*; got 'causal'"),
        (lambda: masks.from_key_ranges(None), "ranges is a list .*; got None"),
        (lambda: masks.from_key_ranges([[(0, 1)], [(0,)]]), r"query 1: key ranges are \[\(start, end\), ...\]; got"),
        (lambda: masks.from_slices(5, None), "slices is a list of .*; got None"),
        (lambda: masks.from_slices(5, [None]), "a slice is .*; got None"),
        (lambda: masks.tree_of(None), "sequences is a list of lists of token ids; got None"),
    ],
)
def test_what_is_no_description_of_a_mask_is_named(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("bad", [(2, 1), (-1, 2), (0, 4)])
def test_bad_key_ranges_are_refused_with_their_query(bad: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="query 1: key ranges"):
        from_key_ranges([[(0, 1)], [bad], []])


# --- mask_mod ---------------------------------------------------------------------------------------------------------


@quick
@given(
    st.integers(1, 18).flatmap(
        lambda n: st.lists(st.lists(st.booleans(), min_size=n, max_size=n), min_size=n, max_size=n)
    )
)
def test_a_mask_mod_is_kept_exactly(rows: list[list[bool]]) -> None:
    import torch

    matrix = torch.tensor(rows)
    mask = from_mask_mod(lambda b, h, q, k: matrix[q, k], len(rows))
    np.testing.assert_array_equal(mask.dense(len(rows)), matrix.numpy())


def test_a_mask_mod_may_ignore_the_query_or_the_key() -> None:
    first_two = np.arange(5) < 2
    keys, queries = from_mask_mod(lambda b, h, q, k: k < 2, 5), from_mask_mod(lambda b, h, q, k: q < 2, 5)
    np.testing.assert_array_equal(keys.dense(5), np.tile(first_two, (5, 1)))
    np.testing.assert_array_equal(queries.dense(5), np.tile(first_two, (5, 1)).T)


def test_a_mask_mod_in_several_chunks_joins_into_the_same_few_slices() -> None:
    n = 4500  # 1 << 24 pairs in a chunk make two chunks
    mask = from_mask_mod(lambda b, h, q, k: (q >= k) & (q - k < 300), n)
    assert len(mask.slices(n)) <= 3
    assert masks.area(mask.slices(n)).sum() == masks.area(window(299, 0).slices(n)).sum()
    assert masks.overlapping_pair(np.concatenate([mask.slices(n), table([(0, n, 0, n, 1, UNBOUNDED)])])) is None
    assert masks.overlapping_pair(np.concatenate([mask.slices(n), table([(0, n, 0, n, -UNBOUNDED, -300)])])) is None


def test_a_long_mask_mod_is_refused_before_it_is_called() -> None:
    def never(*_: Any) -> Any:
        raise AssertionError("must not be evaluated")

    with pytest.raises(NotImplementedError, match=f"up to {MASK_MOD_MAX_LENGTH} tokens; got {MASK_MOD_MAX_LENGTH + 1}"):
        from_mask_mod(never, MASK_MOD_MAX_LENGTH + 1)


def test_a_mask_mod_of_too_many_slices_is_refused_with_their_number() -> None:
    def dots(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (q % 2 == 0) & (k % 2 == 0)

    fits = 2 * int(MASK_MOD_MAX_SLICES**0.5)
    assert len(from_mask_mod(dots, fits).slices(fits)) == MASK_MOD_MAX_SLICES
    with pytest.raises(
        NotImplementedError, match=f"needs {(fits // 2 + 1) ** 2} slices, more than {MASK_MOD_MAX_SLICES}"
    ):
        from_mask_mod(dots, fits + 1)


@pytest.mark.parametrize("length", [0, -1])
def test_a_mask_mod_needs_a_token(length: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        from_mask_mod(lambda b, h, q, k: q >= k, length)


def test_a_mask_mod_of_integers_counts_by_truth() -> None:
    mask = from_mask_mod(lambda b, h, q, k: (q >= k) * 2, 4)
    np.testing.assert_array_equal(mask.dense(4), causal().dense(4))


# --- cumulative lengths -----------------------------------------------------------------------------------------------


@quick
@given(st.lists(st.integers(1, 50), min_size=1, max_size=8))
def test_cumulative_lengths_give_the_lengths(many: list[int]) -> None:
    borders = [sum(many[:i]) for i in range(len(many) + 1)]
    assert from_cu_seqlens(borders) == (many, causal())
    assert from_cu_seqlens(np.array(borders, np.int32), full()) == (many, full())


@pytest.mark.parametrize(
    ("borders", "message"),
    [
        ([], "starts at 0"),
        ([0], "starts at 0"),
        ([1, 3], "starts at 0"),
        ([[0, 3]], "starts at 0"),
        ([0, 3, 3], "must ascend"),
        ([0, 4, 2], "must ascend"),
    ],
)
def test_bad_cumulative_lengths_are_refused(borders: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_cu_seqlens(borders)


# --- text forms -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "mask"),
    [
        ("causal", causal()),
        ("full", full()),
        ("window:4096", window(4095, 0)),
        ("window:1", window(0, 0)),
        ("lambda", lambda_()),
        ("lambda:8", lambda_(8)),
        ("lambda:64,4096", lambda_(64, 4096)),
        ("shared-question", shared_question()),
        ("shared-question:3", shared_question(3)),
        ("shared-question:4,0.2", shared_question(4, 0.2)),
        ("blockwise", causal_blockwise()),
        ("blockwise:16", causal_blockwise(16)),
        ("blockwise:256,2", causal_blockwise(256, 2)),
        ("prefix:128", prefix(128)),
    ],
)
def test_every_text_form_gives_its_mask(text: str, mask: Mask) -> None:
    assert parse_mask(text) == mask


def test_the_forms_we_print_are_forms_we_read() -> None:
    for form in masks.MASK_FORMS.split(", "):
        if not form.startswith("@"):
            assert isinstance(parse_mask(form), Mask)


@quick
@given(st.integers(1, 80), lengths)
def test_window_w_holds_w_keys_itself_included(w: int, n: int) -> None:
    mask = parse_mask(f"window:{w}")
    assert mask == window(w - 1, 0)
    assert mask.dense(n).sum(axis=1).tolist() == [min(i + 1, w) for i in range(n)]
    assert mask.dense(n).diagonal().all()


@pytest.mark.parametrize(
    ("text", "meant"),
    [("casual", "causal"), ("wndow:5", "window"), ("lamda:1,2", "lambda"), ("shared_question:4", "shared-question")],
)
def test_an_unknown_mask_names_its_nearest_match(text: str, meant: str) -> None:
    with pytest.raises(ValueError, match=f"unknown mask '{text}': did you mean '{meant}'.*known forms are causal"):
        parse_mask(text)


def test_a_mask_like_no_other_lists_the_known_forms_without_a_guess() -> None:
    with pytest.raises(ValueError, match="unknown mask 'zzzz': known forms are causal, full"):
        parse_mask("zzzz")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("window", r"takes 1 number"),
        ("prefix", r"takes 1 number"),
        ("causal:3", r"takes 0 number"),
        ("full:1", r"takes 0 number"),
        ("window:3,4", r"takes 1 number"),
        ("lambda:1,2,3", r"takes 2 number"),
        ("window:many", "'many' is not a list of numbers"),
        ("lambda:1,", "not a list of numbers"),
        ("window:0", "at least 1 key"),
        ("prefix:-4", "got -4"),
        ("blockwise:0", "block >= 1"),
    ],
)
def test_a_text_form_with_wrong_numbers_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_mask(text)


def write(path: Path, content: Any) -> str:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return f"@{path}"


def test_a_mask_file_gives_one_mask_per_document(tmp_path: Path) -> None:
    content = {"documents": [{"length": 4, "slices": [[0, 4, 0, 4, None, 0]]}, {"length": 2, "slices": []}]}
    found = parse_mask(write(tmp_path / "mask.json", content))
    assert isinstance(found, list)
    assert found == [from_slices(4, [(0, 4, 0, 4, None, 0)]), from_slices(2, [])]
    np.testing.assert_array_equal(found[0].dense(4), causal().dense(4))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is no mask file: not JSON.*must hold"),
        ("[]", "must hold"),
        ({"document": []}, "must hold"),
        ({"documents": 5}, "must hold"),
        ({"documents": [{"length": 4}]}, "must hold"),
        ({"documents": [{"length": "four", "slices": []}]}, "must hold"),
        ({"documents": [{"length": 4, "slices": [[0, 4, 0, 4, 0]]}]}, "a slice is"),
        ({"documents": [{"length": 4, "slices": [[0, 5, 0, 4, None, None]]}]}, "outside its document"),
        ({"documents": [{"length": 4, "slices": [[0, 4, 0, 4, None, 0]] * 2}]}, "share a"),
    ],
)
def test_a_bad_mask_file_is_refused(tmp_path: Path, content: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_mask(write(tmp_path / "mask.json", content))


@pytest.mark.parametrize("slices", [5, [5], [[0, 4, 0, 4, [], None]]])
def test_a_mask_file_whose_slices_are_no_rows_is_refused(tmp_path: Path, slices: Any) -> None:
    with pytest.raises(ValueError, match="slice"):
        parse_mask(write(tmp_path / "mask.json", {"documents": [{"length": 4, "slices": slices}]}))


def test_a_missing_mask_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot read a mask file from .*nowhere\.json: No such file"):
        parse_mask(f"@{tmp_path / 'nowhere.json'}")

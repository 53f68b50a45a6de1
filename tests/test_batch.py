"""Proves the batch: areas and cuts of its masks against dense matrices, positions of documents in the stream, and every
error of make_batch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from flexcp.batch import Batch, make_batch
from flexcp.masks import Mask, causal, causal_blockwise, from_slices, full, lambda_, prefix, shared_question, window

Ints = NDArray[np.int64]
quick = settings(max_examples=50, deadline=None)
lengths = st.lists(st.integers(1, 40), min_size=1, max_size=7)
masks = st.sampled_from(
    [causal(), full(), window(5, 0), window(3, 2), lambda_(4, 6), shared_question(3), causal_blockwise(5, 1), prefix(9)]
)


@st.composite
def batches(draw: st.DrawFn) -> tuple[Batch, list[dict[str, Mask]]]:
    """Draw a batch of two masks, the second one chosen for each document, and each document's masks by name."""
    many = draw(lengths)
    one, layers = draw(masks), (draw(st.integers(1, 9)), draw(st.integers(1, 9)))
    each = [draw(st.one_of(masks, st.just(from_slices(n, [(0, n // 2, 0, n, None, None)])))) for n in many]
    batch = make_batch(many, masks={"one": (one, layers[0]), "each": (each, layers[1])})
    return batch, [{"one": one, "each": m} for m in each]


@st.composite
def queries(draw: st.DrawFn, batch: Batch) -> Ints:
    """Draw columns document, q0, q1, k0, k1 of random ranges, some of them empty or inverted."""
    rows = []
    for _ in range(draw(st.integers(0, 8))):
        d = draw(st.integers(0, batch.documents - 1))
        edge = st.integers(0, int(batch.lengths[d]))
        rows.append([d, *(draw(edge) for _ in range(4))])
    return np.array(rows, np.int64).reshape(-1, 5).T


@quick
@given(st.data())
def test_rows_area_counts_the_pairs_of_those_rows(data: st.DataObject) -> None:
    batch, rules = data.draw(batches())
    document, q0, q1, _, _ = data.draw(queries(batch))
    weighted = np.zeros(len(document), np.int64)
    for mask in batch.masks:
        dense = [rules[d][mask.name].dense(int(batch.lengths[d])) for d in document]
        expected = np.array([m[a:b].sum() for m, a, b in zip(dense, q0, q1, strict=True)], np.int64)
        assert mask.rows_area(document, q0, q1).tolist() == expected.tolist()
        weighted += mask.layers * expected
    assert batch.weighted_rows_area(document, q0, q1).tolist() == weighted.tolist()


@quick
@given(st.data())
def test_cuts_are_the_mask_inside_rows_and_keys(data: st.DataObject) -> None:
    batch, rules = data.draw(batches())
    document, q0, q1, k0, k1 = data.draw(queries(batch))
    for mask in batch.masks:
        index, slices = mask.cuts(document, q0, q1, k0, k1)
        for i, d in enumerate(document):
            n = int(batch.lengths[d])
            inside = np.zeros((n, n), bool)
            inside[q0[i] : q1[i], k0[i] : k1[i]] = True
            mine = [tuple(s) for s in slices[index == i].tolist()]
            times = sum((from_slices(n, [s]).dense(n).astype(int) for s in mine), np.zeros((n, n), int))
            np.testing.assert_array_equal(times, rules[d][mask.name].dense(n) & inside)


@quick
@given(batches())
def test_slices_of_each_document_are_those_of_its_own_mask(drawn: tuple[Batch, list[dict[str, Mask]]]) -> None:
    batch, rules = drawn
    for mask in batch.masks:
        assert len(mask.first) == batch.documents + 1
        for d, n in enumerate(batch.lengths):
            np.testing.assert_array_equal(
                mask.slices[mask.first[d] : mask.first[d + 1]], rules[d][mask.name].slices(int(n))
            )


@quick
@given(lengths, st.lists(st.tuples(st.integers(0, 320), st.integers(0, 320)), max_size=6))
def test_stream_ranges_split_at_document_borders(many: list[int], ranges: list[tuple[int, int]]) -> None:
    batch = make_batch(many, causal())
    token = [(d, row) for d, n in enumerate(many) for row in range(n)]
    found = batch.split_by_document(
        np.array([a for a, _ in ranges], np.int64), np.array([b for _, b in ranges], np.int64)
    )
    rows = [tuple(map(int, r)) for r in zip(*found, strict=True)]
    listed = [(i, d, row) for i, d, q0, q1 in rows for row in range(q0, q1)]
    assert listed == [(i, *at) for i, (a, b) in enumerate(ranges) for at in token[a:b]]
    assert len({(i, d) for i, d, _, _ in rows}) == len(rows), "a document appears once per range"


@quick
@given(lengths)
def test_the_stream_is_the_documents_end_to_end(many: list[int]) -> None:
    batch = make_batch(np.array(many, np.int32), causal())
    assert batch.tokens == sum(many)
    assert batch.documents == len(many)
    assert batch.starts.tolist() == [sum(many[:i]) for i in range(len(many) + 1)]
    owner = [d for d, n in enumerate(many) for _ in range(n)]
    assert batch.document_of(np.arange(batch.tokens)).tolist() == owner


def test_area_sums_stay_exact_beyond_what_a_float_holds() -> None:
    n = 2**30 - 1
    batch = make_batch([3, n, n, 5], full())
    every = np.arange(4)
    assert batch.masks[0].rows_area(every, np.zeros(4, np.int64), batch.lengths).tolist() == [9, n * n, n * n, 25]


def test_one_mask_stands_for_one_layer_under_the_name_mask() -> None:
    batch = make_batch([4], causal())
    assert [(m.name, m.layers, m.rules) for m in batch.masks] == [("mask", 1, (causal(),))]


def test_several_masks_keep_their_order_names_and_layers() -> None:
    batch = make_batch([4, 2], masks={"full": (full(), 8), "window": ([window(1), causal()], 24)})
    assert [(m.name, m.layers) for m in batch.masks] == [("full", 8), ("window", 24)]
    assert batch.mask() is batch.masks[0]
    assert batch.mask("window") is batch.masks[1]
    assert batch.masks[1].rules == (window(1), causal())


def test_an_unknown_mask_name_lists_those_there_are() -> None:
    batch = make_batch([4], masks={"full": (full(), 8), "window": (window(1), 24)})
    with pytest.raises(ValueError, match=r"no mask named 'wide'.*\['full', 'window'\]"):
        batch.mask("wide")


@pytest.mark.parametrize(
    ("given_lengths", "message"),
    [
        ([], "non-empty list"),
        (7, "non-empty list"),
        (None, "non-empty list"),
        ([[1, 2], [3, 4]], "non-empty list"),
        ([4.0, 2.0], "must be integers; document 0 has the length 4.0"),
        ([True], "must be integers; document 0 has the length True"),
        (["3"], "must be integers; document 0 has the length '3'"),
        ([5, "x"], "must be integers; document 1 has the length 'x'"),
        ([5, 3, None], "must be integers; document 2 has the length None"),
        ([5, [3]], "non-empty list"),
        ([4, 0, 2], "document 1 has length 0; drop it"),
        ([4, 2, -3], "document 2 has length -3; drop it"),
        ([0, 4, 9], "document 0 has length 0; for cumulative lengths: .*from_cu_seqlens"),
        ([2**30], r"1073741824 tokens is beyond what flexcp counts exactly \(2\*\*30\)"),
    ],
)
def test_bad_lengths_are_refused(given_lengths: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_batch(given_lengths, causal())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "either mask= or masks="),
        ({"mask": causal(), "masks": {"a": (causal(), 1)}}, "either mask= or masks="),
        ({"masks": {}}, "masks= is empty"),
        ({"masks": {"a": causal()}}, r"masks\['a'\] must be \(mask, number of layers\)"),
        ({"masks": {"a": (causal(), 1, 2)}}, r"masks\['a'\] must be \(mask, number of layers\)"),
        ({"masks": {"a": (causal(), 0)}}, r"masks\['a'\] needs a layer count from 1 to 4,194,304; got 0"),
        ({"masks": {"a": (causal(), 10**30)}}, r"masks\['a'\] needs a layer count from 1 to 4,194,304; got 10+"),
        ({"masks": {"a": (causal(), 1.5)}}, r"masks\['a'\] needs a layer count from 1 to 4,194,304; got 1.5"),
        ({"mask": "causal"}, r"made by flexcp.causal\(\).*got 'causal'"),
        ({"mask": [causal(), "full", full()]}, r"made by flexcp.causal\(\)"),
        ({"mask": [causal(), full()]}, "2 masks for 3 documents"),
        ({"mask": []}, "0 masks for 3 documents"),
        ({"mask": from_slices(4, [])}, "document of 4 tokens but was given one of 5.*one mask per document"),
        ({"mask": [from_slices(4, []), from_slices(6, []), causal()]}, "document of 6 tokens but was given one of 5"),
    ],
)
def test_bad_masks_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_batch([4, 5, 6], **arguments)


@pytest.mark.parametrize("arguments", [{"mask": 5}, {"masks": {"a": (None, 2)}}, {"masks": [(causal(), 2)]}])
def test_what_is_no_mask_at_all_is_refused_by_name(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="mask"):
        make_batch([4], **arguments)

"""Proves that a list of slices which is reported as a simple form (documents end to end under one window) is exactly
what FlashAttention-4 would compute for these documents and this window, and when that kernel is used.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

import flexcp
from flexcp import masks
from flexcp.executor.kernels.fa4_lists import Form, cheaper, form_of


def seen_by(slices: NDArray[np.int64], rows: int, keys: int) -> NDArray[np.bool_]:
    q, k = np.arange(rows)[:, None], np.arange(keys)[None, :]
    out = np.zeros((rows, keys), bool)
    for q0, q1, k0, k1, lo, hi in slices.tolist():
        out |= (q >= q0) & (q < q1) & (k >= k0) & (k < k1) & (k - q >= lo) & (k - q <= hi)
    return out


def seen_in(form: Form) -> NDArray[np.bool_]:
    """Return the pairs by FlashAttention's documentation: windows are counted from the diagonal through the last row
    and key.
    """
    out = np.zeros((int(form.rows_at[-1]), int(form.keys_at[-1])), bool)
    borders = zip(form.rows_at[:-1], form.rows_at[1:], form.keys_at[:-1], form.keys_at[1:], strict=True)
    for q0, q1, k0, k1 in borders:
        i, j = np.arange(q1 - q0)[:, None], np.arange(k1 - k0)[None, :]
        apart = j - i - ((k1 - k0) - (q1 - q0))
        seen = np.ones((q1 - q0, k1 - k0), bool)
        if form.left is not None:
            seen &= apart >= -form.left
        if form.right is not None:
            seen &= apart <= form.right
        out[q0:q1, k0:k1] = seen
    return out


SIMPLE = (masks.causal(), masks.full(), masks.window(3, 0), masks.window(5, 2), masks.window(0, 0))
MASKS = (*SIMPLE, masks.lambda_(2, 4))


@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=5),
    which=st.lists(st.sampled_from(MASKS), min_size=1, max_size=2),
)
def test_a_simple_list_is_the_same_pairs(lengths: list[int], which: list[masks.Mask]) -> None:
    """Documents under one window are always simple; those under two may be, if they are short."""
    used = [which[i % len(which)] for i in range(len(lengths))]
    slices = flexcp.packed_slices(lengths, used).numpy()
    form = form_of(slices)
    tokens = sum(lengths)
    if len({str(mask) for mask in used}) == 1 and used[0] in SIMPLE:
        assert form is not None
    if form is not None:
        assert np.array_equal(seen_in(form), seen_by(slices, tokens, tokens))


@pytest.mark.parametrize("mask", [masks.causal(), masks.full(), masks.window(3, 0), masks.window(5, 2)])
def test_documents_of_one_mask_are_simple(mask: masks.Mask) -> None:
    form = form_of(flexcp.packed_slices([9, 1, 20], mask).numpy())
    assert form is not None
    assert form.rows_at.tolist() == form.keys_at.tolist() == [0, 9, 10, 30]
    assert form.window["causal"] == (mask == masks.causal())


def test_other_lists_are_not() -> None:
    of_two = flexcp.packed_slices([9, 30], [masks.window(3, 0), masks.window(4, 0)])
    gap = np.array([[0, 4, 0, 4, -9, 0], [6, 9, 6, 9, -9, 0]])
    shared = flexcp.packed_slices([40], masks.shared_question(3, 0.3))
    for slices in (of_two.numpy(), gap, shared.numpy(), np.zeros((0, 6), np.int64)):
        assert form_of(slices) is None


def test_rows_and_keys_of_other_lengths_end_together() -> None:
    """Four queries follow a prefix of six keys: causality is counted from the last key, not from the first."""
    slices = np.array([[0, 4, 0, 10, -(1 << 40), 6]])
    form = form_of(slices)
    assert form is not None and form.window == {"causal": True}
    assert np.array_equal(seen_in(form), seen_by(slices, 4, 10))


def test_long_documents_go_to_flash_attention_where_it_is_faster() -> None:
    # At 4,096 tokens the GPU would finish before the host has launched the call.
    expected_of = (
        ([16_384], masks.full(), (True, True)),
        ([16_384], masks.causal(), (True, True)),
        ([65_536], masks.causal(), (False, True)),
        ([16_384], masks.window(4_095), (False, True)),
        ([4_096] * 16, masks.causal(), (True, False)),
        ([4_096], masks.causal(), (False, False)),
        ([256] * 64, masks.causal(), (False, False)),
    )
    for lengths, mask, expected in expected_of:
        slices = flexcp.packed_slices(lengths, mask).numpy()
        form = form_of(slices)
        assert form is not None and cheaper(form, int(masks.area(slices).sum()), 32) == expected

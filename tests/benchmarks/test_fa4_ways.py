"""Proves how work lists become calls of FlashAttention-4, without calling it: ranges of keys, blocks, causal and full
items are those of the mask.
"""

from __future__ import annotations

import numpy as np
import pytest

import fa4_ways
from flexcp import masks
from flexcp.masks import Mask

TOKENS = 400
MASKS = [masks.causal(), masks.window(60, 0), masks.lambda_(16, 64), masks.full(), masks.prefix(100)]


def dense(slices: np.ndarray) -> np.ndarray:
    """Return which pairs of ``TOKENS`` rows and keys slices contain."""
    row, key = np.arange(TOKENS)[:, None], np.arange(TOKENS)[None]
    found = np.zeros((TOKENS, TOKENS), bool)
    for q0, q1, k0, k1, lo, hi in slices.tolist():
        found |= (row >= q0) & (row < q1) & (key >= k0) & (key < k1) & (key - row >= lo) & (key - row <= hi)
    return found


@pytest.mark.parametrize("mask", MASKS, ids=lambda mask: mask.name)
def test_ranges_and_blocks_have_the_pairs_of_the_mask(mask: Mask) -> None:
    slices = mask.slices(TOKENS)
    ranges = fa4_ways.key_ranges(slices, TOKENS)
    key, found = np.arange(TOKENS), np.zeros((TOKENS, TOKENS), np.int64)
    for low, high in ranges.reshape(TOKENS, -1, 2).transpose(1, 2, 0):
        found += (key >= low[:, None]) & (key < high[:, None])
    assert np.array_equal(found, dense(slices))  # each pair once
    size = -(-TOKENS // fa4_ways.BLOCK) * fa4_ways.BLOCK
    padded = np.zeros((size, size))
    padded[:TOKENS, :TOKENS] = dense(slices)
    blocks = padded.reshape(size // fa4_ways.BLOCK, fa4_ways.BLOCK, -1, fa4_ways.BLOCK).mean(axis=(1, 3))
    assert np.array_equal(fa4_ways.block_counts(ranges, TOKENS, TOKENS), blocks)


@pytest.mark.parametrize("mask", [masks.causal(), masks.full(), masks.prefix(100)], ids=lambda mask: mask.name)
def test_items_have_the_pairs_of_the_mask(mask: Mask) -> None:
    slices = mask.slices(TOKENS)
    found = np.zeros((TOKENS, TOKENS), np.int64)
    for causal, (q0, q1, k0, k1) in fa4_ways._items(slices):
        row, key = np.arange(q0, q1)[:, None], np.arange(k0, k1)[None]
        found[q0:q1, k0:k1] += (key - k1 <= row - q1) if causal else np.ones((q1 - q0, k1 - k0), bool)
    assert np.array_equal(found, dense(slices))


def test_work_that_the_calls_cannot_express_is_refused() -> None:
    with pytest.raises(ValueError, match="neither causal nor full"):
        fa4_ways._items(masks.window(60, 0).slices(TOKENS))
    apart = np.array([[0, TOKENS, 40 * i, 40 * i + 20, -TOKENS, TOKENS] for i in range(5)])
    with pytest.raises(ValueError, match="5 ranges of keys"):
        fa4_ways.key_ranges(apart, TOKENS)

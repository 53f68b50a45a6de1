"""Proves that masks are right for numbers of any size: every named mask and conversion against a definition in plain
Python integers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import flexcp
from flexcp.masks import UNBOUNDED, Mask, overlapping_pair, parse_mask

Sees = Callable[[int, int, int], bool]
"""Whether query q of a document of n tokens sees key k."""

EDGES = [0, 1, 2, 3, 7, *(2**e + d for e in (30, 31, 32, 40, 61, 62, 63, 64, 70) for d in (-1, 0, 1)), 10**20, 10**40]
COUNTS = st.one_of(st.sampled_from(EDGES), st.integers(0, 30))
OFFSETS = st.one_of(COUNTS, COUNTS.map(lambda x: -x))
LENGTHS = st.integers(1, 18)


def matrix(sees: Sees, n: int) -> list[list[bool]]:
    return [[sees(q, k, n) for k in range(n)] for q in range(n)]


def agrees(mask: Mask, sees: Sees, n: int) -> None:
    """Check that a mask equals its definition, survives being saved with a plan, and that its plan
    computes every pair.
    """
    wanted = matrix(sees, n)
    assert mask.dense(n).tolist() == wanted
    plan = flexcp.Planner(2, 1, 8, cluster=flexcp.cluster("cpu", 1, 2), strategy="ring")([n], mask)
    assert int(plan.work().sum()) == 2 * sum(map(sum, wanted))
    again = flexcp.load_plan(flexcp.save_plan(plan))
    assert again == plan and again.batch.masks[0].slices.tolist() == plan.batch.masks[0].slices.tolist()


@settings(max_examples=60, deadline=None)
@given(n=LENGTHS, left=COUNTS, right=COUNTS)
@example(n=9, left=sys.maxsize, right=0)
@example(n=9, left=sys.maxsize - 1, right=sys.maxsize)
def test_window(n: int, left: int, right: int) -> None:
    agrees(flexcp.window(left, right), lambda q, k, _: -left <= k - q <= right, n)


@settings(max_examples=60, deadline=None)
@given(n=LENGTHS, sink=COUNTS, width=COUNTS.filter(lambda x: x > 0))
@example(n=9, sink=0, width=sys.maxsize)
@example(n=9, sink=1, width=10**20)
def test_lambda(n: int, sink: int, width: int) -> None:
    agrees(flexcp.masks.lambda_(sink, width), lambda q, k, _: k <= q and (k < sink or q - k < width), n)


@settings(max_examples=60, deadline=None)
@given(n=LENGTHS, block=COUNTS.filter(lambda x: x > 0), local=COUNTS)
@example(n=12, block=4, local=2**62)
@example(n=12, block=2**62, local=4)
@example(n=12, block=3, local=2**61)
def test_causal_blockwise(n: int, block: int, local: int) -> None:
    def sees(q: int, k: int, n: int) -> bool:
        last = (n - 1) // block
        ends = q // block in (0, last) or k // block == 0
        return k <= q and (ends or q - k <= local * block)

    agrees(flexcp.masks.causal_blockwise(block, local), sees, n)


@settings(max_examples=40, deadline=None)
@given(n=LENGTHS, tokens=COUNTS)
def test_prefix(n: int, tokens: int) -> None:
    agrees(flexcp.masks.prefix(tokens), lambda q, k, _: k < tokens or k <= q, n)


@settings(max_examples=40, deadline=None)
@given(n=LENGTHS, answers=st.one_of(st.integers(1, 30), st.just(2**14)), share=st.floats(0, 1))
@example(n=40, answers=2**14, share=0.2)
def test_shared_question(n: int, answers: int, share: float) -> None:
    question = int(share * n)
    each = (n - question) // answers

    def answer(token: int) -> int:
        return answers - 1 if each == 0 else min((token - question) // each, answers - 1)

    def sees(q: int, k: int, _: int) -> bool:
        return k <= q and (k < question or answer(q) == answer(k))

    agrees(flexcp.masks.shared_question(answers, share), sees, n)


@settings(max_examples=100, deadline=None)
@given(n=LENGTHS, row=st.tuples(*[st.integers(0, 18)] * 4), band=st.tuples(OFFSETS, OFFSETS).map(sorted))
@example(n=9, row=(0, 9, 0, 9), band=[-(2**63), 2**63])
@example(n=9, row=(0, 9, 0, 9), band=[2**63, 2**64])
@example(n=9, row=(0, 9, 0, 9), band=[-(2**64), -(2**63)])
def test_from_slices(n: int, row: tuple[int, ...], band: list[int]) -> None:
    q0, q1, k0, k1 = (min(x, n) for x in (*sorted(row[:2]), *sorted(row[2:])))
    lo, hi = band
    mask = flexcp.from_slices(n, [(q0, q1, k0, k1, lo, hi)])
    assert all(abs(x) <= UNBOUNDED for r in mask.table for x in r)
    agrees(mask, lambda q, k, _: q0 <= q < q1 and k0 <= k < k1 and lo <= k - q <= hi, n)


@pytest.mark.parametrize("huge", [sys.maxsize, 2**63, 10**20])
def test_a_number_that_means_no_limit_is_no_limit(huge: int) -> None:
    """Numbers that configurations use for "no limit" give the mask without a limit, not just an equivalent one."""
    assert flexcp.window(huge) == flexcp.window(None)
    assert flexcp.window(0, huge) == flexcp.window(0, None)
    assert flexcp.masks.lambda_(0, huge).dense(9).tolist() == flexcp.causal().dense(9).tolist()


def test_a_large_window_keeps_its_number() -> None:
    """A large finite window keeps its number, so that the hashes of its plans stay the same."""
    assert flexcp.window(10**15).params == (10**15, 0)
    assert flexcp.masks.lambda_(5, 2**61).params == (5, 2**61)


def test_layers_find_a_window_without_a_limit() -> None:
    """A layer gives its window as its configuration does, as a number that no torch operator can hold."""
    import torch

    planner = flexcp.Planner(1, 1, 4, dtype="float64", cluster=flexcp.cluster("cpu", 1, 1))
    q, k, v = torch.randn(3, 9, 1, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    wanted = flexcp.attention(q, k, v, flexcp.bind(planner([9])))
    for keys in (sys.maxsize, 2**63, 10**20):
        step = flexcp.bind(planner([9], flexcp.window(keys - 1)))
        torch.testing.assert_close(flexcp.attention(q, k, v, step, window=keys), wanted, rtol=0, atol=0)


@pytest.mark.parametrize(
    "text", ["prefix:99999999999999999999", "window:99999999999999999999", "lambda:1,99999999999999999999"]
)
def test_text_forms(text: str) -> None:
    mask = parse_mask(text)
    assert isinstance(mask, Mask)
    wanted = flexcp.full() if text.startswith("prefix") else flexcp.causal()
    assert mask.dense(9).tolist() == wanted.dense(9).tolist()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: flexcp.masks.shared_question(100_000_000, 0.2), "at most 16384 answers; got 100000000"),
        (lambda: parse_mask("shared-question:99999999999999999999,0.2"), "at most 16384 answers"),
        (lambda: flexcp.masks.shared_question([10**20, 1], 5), "a document of 100000000000000000006 tokens"),
        (lambda: flexcp.masks.shared_question([4], 10**20), "a document of 100000000000000000004 tokens"),
        (lambda: flexcp.masks.shared_question(6, [4, 4, 4]), r"answers first.*got answers 6 and question \[4, 4, 4\]"),
        (lambda: flexcp.masks.shared_question(6.0, 0.5), "answers first"),
        (lambda: flexcp.masks.shared_question([4], float("inf")), "must be integers >= 0"),
        (lambda: flexcp.masks.shared_question([4], float("nan")), "must be integers >= 0"),
        (lambda: flexcp.masks.modality([(0, 10**20)]), "a document of 100000000000000000000 tokens"),
        (lambda: flexcp.masks.modality([(-(10**20), 3)]), "ascending"),
        (lambda: flexcp.from_slices(10**20, []), "a document of 100000000000000000000 tokens"),
        (lambda: flexcp.from_slices(5, [(0, 10**20, 0, 5, None, None)]), "outside its document of 5 tokens"),
        (lambda: flexcp.from_slices(5, [(-(10**20), 5, 0, 5, None, None)]), "outside its document of 5 tokens"),
        (lambda: flexcp.masks.from_key_ranges([[(0, 10**20)]]), "integers of at most 64 bits"),
        (lambda: flexcp.masks.from_key_ranges([[(0, 2**63)]]), "integers of at most 64 bits"),
        (lambda: flexcp.masks.from_key_ranges([[(0, 2**62)]]), r"within 0\.\.1"),
        (lambda: flexcp.masks.from_key_ranges([[(0.0, 0.7)]]), "integers of at most 64 bits"),
        (lambda: flexcp.masks.from_cu_seqlens([0, 2**63]), "integers of at most 64 bits"),
        (lambda: flexcp.masks.from_cu_seqlens([0, 10**20]), "integers of at most 64 bits"),
        (lambda: flexcp.masks.from_cu_seqlens(np.array([0, 2**63], np.uint64)), "integers of at most 64 bits"),
        (lambda: flexcp.masks.from_cu_seqlens([0, 5, -(2**63)]), "must ascend"),
        (
            lambda: flexcp.masks.from_mask_mod(lambda b, h, q, k: k <= q, 10**20),
            "a document of 100000000000000000000 tokens",
        ),
        (lambda: flexcp.Planner(1)([2**63]), "a document of 9223372036854775808 tokens"),
        (lambda: flexcp.Planner(1)([5, 10**20]), "a document of 100000000000000000000 tokens"),
        (lambda: flexcp.Planner(1)([-(10**20)]), "has length -100000000000000000000"),
    ],
)
def test_absurd_numbers_are_refused_in_one_line(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(ValueError, match=words) as raised:
        make()
    assert "\n" not in str(raised.value)


def test_more_answers_than_tokens_make_no_slices() -> None:
    """A document of 40 tokens that is to have thousands of answers has at most a question and one answer."""
    slices = flexcp.masks.shared_question(2**14, 0.2).slices(40)
    assert slices[:, :4].tolist() == [[0, 40, 0, 8], [8, 40, 8, 40]]


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_overlaps_are_found_as_by_hand(data: st.DataObject) -> None:
    edge = st.integers(0, 8)
    rows = data.draw(st.lists(st.tuples(edge, edge, edge, edge, st.integers(-8, 8), st.integers(-8, 8)), max_size=6))
    table = np.array([(*sorted(r[:2]), *sorted(r[2:4]), *sorted(r[4:])) for r in rows], np.int64).reshape(-1, 6)
    pairs = [
        {(q, k) for q in range(q0, q1) for k in range(k0, k1) if lo <= k - q <= hi}
        for q0, q1, k0, k1, lo, hi in table.tolist()
    ]
    clash = overlapping_pair(table)
    if clash is None:
        assert not any(a & b for i, a in enumerate(pairs) for b in pairs[i + 1 :])
    else:
        assert pairs[clash[0]] & pairs[clash[1]]

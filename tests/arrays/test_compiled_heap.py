"""Proves the compiled heap: whatever is put on it comes off smallest first, also while more is put on."""

from __future__ import annotations

import heapq

from hypothesis import given
from hypothesis import strategies as st

from flexcp.arrays.compiled_heap import empty_heap, pop, push


@given(st.lists(st.one_of(st.integers(0, 1 << 60), st.none()), max_size=60))
def test_the_smallest_comes_first(orders: list[int | None]) -> None:
    heap, expected = empty_heap(len(orders)), []
    for order in orders:
        if order is not None:
            push(heap, order)
            heapq.heappush(expected, order)
        elif expected:
            assert pop(heap) == heapq.heappop(expected)
    assert heap[0] == len(expected)
    assert [pop(heap) for _ in range(len(expected))] == sorted(expected)

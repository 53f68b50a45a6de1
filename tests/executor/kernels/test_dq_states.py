"""Proves that the states of dq say of every row and head whether lists add to it, or another result is laid there."""

from __future__ import annotations

import numpy as np

from flexcp import masks
from flexcp.executor.kernels.dq_states import ADDED, EMPTY, OTHERS, dq_states
from flexcp.executor.run.laid_rows import NO_AREAS


def test_states_are_those_of_the_lists_and_laid_areas() -> None:
    first = masks.shift(masks.causal().slices(10), 5, 0)
    second = np.array([[0, 30, 0, 8, -20, 0]])  # only rows up to 27 see a key
    states = dq_states(40, 6, [(first, slice(0, 6)), (second, slice(2, 4))], np.array([[4, 6, 16, 40], [0, 1, 30, 40]]))
    expected = np.full((40, 6), EMPTY)
    expected[16:40, 4:6] = OTHERS
    expected[30:40, 0:1] = OTHERS
    expected[5:15] = ADDED
    expected[0:28, 2:4] = ADDED
    assert states.dtype == np.uint8
    assert np.array_equal(states, expected)


def test_without_lists_and_laid_areas_nothing_adds_to_dq() -> None:
    assert (dq_states(3, 2, [], NO_AREAS) == EMPTY).all()

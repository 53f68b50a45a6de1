"""Proves that distinct values, found by sorting or by marking, are those of ``np.unique``."""

from __future__ import annotations

import numpy as np
import pytest

from flexcp.arrays.distinct import MARKED, distinct


@pytest.mark.parametrize("count", [0, 1, 2, 1000])
@pytest.mark.parametrize("below", [1, 7, 500, 10**6, MARKED + 1, 10**12])
def test_as_numpy_finds_them(count: int, below: int) -> None:
    values = np.random.default_rng(count + below).integers(0, below, count)
    for found in (distinct(values), distinct(values, below)):
        assert found.dtype == np.int64
        np.testing.assert_array_equal(found, np.unique(values))

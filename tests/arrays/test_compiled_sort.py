"""Proves the compiled sort: it gives the order of NumPy's stable sort."""

from __future__ import annotations

import numpy as np
import pytest

from flexcp.arrays.compiled_sort import SHORT_RUN, stable_order


@pytest.mark.parametrize("count", [0, 1, 2, SHORT_RUN, SHORT_RUN + 1, 5 * SHORT_RUN - 1, 1000])
@pytest.mark.parametrize("values", [1, 7, 10**9])
def test_stable_order(count: int, values: int) -> None:
    keys = np.random.default_rng(count).integers(-values, values, count)
    assert stable_order(keys).tolist() == np.argsort(keys, kind="stable").tolist()

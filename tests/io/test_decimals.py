"""Tests of numbers that are rounded beside a limit."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexcp.io.decimals import beside


@pytest.mark.parametrize(
    ("limit", "number", "shown"),
    [
        (1.08, 1.078, "1.078"),
        (1.08, 1.082, "1.082"),
        (1.08, 1.0796, "1.0796"),
        (1.08, 1.08, "1.08"),
        (1.08, 1.09, "1.09"),
        (1.08, 1.3456, "1.35"),
        (1.085, 1.0849, "1.08"),
        (1 + 0.08, 108 / 100, "1.08"),
    ],
)
def test_a_number_close_to_a_limit_has_more_digits(limit: float, number: float, shown: str) -> None:
    assert beside(limit, number, 2) == shown


@given(st.integers(0, 300), st.integers(500_000, 2_000_000))
def test_what_is_shown_is_on_the_side_of_the_number(permille: int, millionths: int) -> None:
    """Limits of whole per mille and ratios of six digits: some digits always tell them apart, except if equal."""
    limit, number = 1 + permille / 1000, millionths / 1_000_000
    shown = round(1_000_000 * float(beside(limit, number, 2)))
    edge = 1_000_000 + 1000 * permille
    assert (shown > edge, shown < edge) == (millionths > edge, millionths < edge)

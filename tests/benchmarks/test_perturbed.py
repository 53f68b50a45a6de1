"""Wrong prices: each changes what it says and nothing else."""

from __future__ import annotations

from dataclasses import asdict
from itertools import islice

import pytest

from flexcp.cost import CostModel
from perturbed import PRICES, WRONG_PERCENT, cells, perturbed

CHANGED = {
    "links": {"link_efficiency"},
    "contention": {"contention", "contention_across"},
    "kernels": {"forward_efficiency", "backward_efficiency", "row_tile_pairs"},
}


@pytest.mark.parametrize("price", PRICES)
@pytest.mark.parametrize("percent", WRONG_PERCENT)
def test_one_price_is_wrong(price: str, percent: int) -> None:
    right, wrong = asdict(CostModel()), asdict(perturbed(CostModel(), price, percent))
    assert {name for name in right if right[name] != wrong[name]} == CHANGED[price]


def test_more_contention_is_slower_and_less_is_faster() -> None:
    right = CostModel().contention[3]
    less, more = (perturbed(CostModel(), "contention", percent).contention[3] for percent in WRONG_PERCENT)
    assert less.forward < right.forward < more.forward and less.link > right.link > more.link


def test_cells_have_all_prices_both_ways() -> None:
    found = {(price, percent) for _, price, percent in islice(cells(), 24)}
    assert found == {(price, percent) for price in PRICES for percent in WRONG_PERCENT}

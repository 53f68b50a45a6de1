"""Tests of ``benchmarks/perturbed.py``, which makes one price of the cost model wrong at a time: only the fields of
that price change.
"""

from __future__ import annotations

from dataclasses import asdict
from itertools import islice, product

import pytest

from flexcp.cost import CostModel
from gap import TOKENS
from perturbed import PRICES, SETTINGS, WRONG_PERCENT, cells, perturbed

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


def test_every_setting_has_all_prices_both_ways_and_all_sizes() -> None:
    found = {(cell[:3], price, percent) for cell, price, percent in islice(cells(), 72)}
    assert found == set(product([(*each, tokens) for each in SETTINGS for tokens in TOKENS], PRICES, WRONG_PERCENT))

"""Proves how static methods deal documents to groups, by tokens or by load: examples by hand, caps on tokens, and plans
of both kinds that pass the check.
"""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import flexcp
from flexcp.arrays.totals import imbalance
from flexcp.batch import make_batch
from flexcp.cost import CostModel, Model
from flexcp.planners.request import Request
from flexcp.planners.static.dealing import deal, dealt
from flexcp.planners.static.static import STATIC
from flexcp.planners.strategies import find_strategy
from flexcp.shape import Shape

SHAPE = Shape(8, 4, 64, 64)
FREE = CostModel(model=Model("attention only", hidden=1, layers=1, feed_forward=1), row_tile_pairs=0)
"""A cost model in which a token costs next to nothing besides its pairs."""


def request(lengths: list[int], ranks: int, cap: int | None = None, argument: str = "1@load") -> Request:
    batch = make_batch(lengths, flexcp.causal())
    return Request(batch, SHAPE, flexcp.cluster("h100", 1, ranks), FREE, argument, max_tokens_per_rank=cap)


def groups(found: list[np.ndarray]) -> list[list[int]]:
    return [documents.tolist() for documents in found]


def test_by_hand() -> None:
    lengths = [30, 100, 30, 30, 30, 30, 30]
    # By tokens four short documents outweigh the long one: 130 and 150 in the end.
    assert groups(deal(np.array(lengths), 2)) == [[1, 5], [0, 2, 3, 4, 6]]
    # By load the long document has 5,050 pairs and each short one 465, so all six together weigh less.
    assert groups(dealt(request(lengths, 2), 2, 1)) == [[1], [0, 2, 3, 4, 5, 6]]
    # Where a group holds at most 150 tokens, one of the six must join the long document.
    assert groups(dealt(request(lengths, 2, cap=150), 2, 1)) == [[1, 6], [0, 2, 3, 4, 5]]
    # With room for one token less, only four short documents fit together, and the last one fits nowhere.
    assert groups(dealt(request(lengths, 2, cap=149), 2, 1)) == [[1, 5], [0, 2, 3, 4, 6]]
    # Cut into 8 parts, 30 tokens may take up 32: four documents fit, and the last goes where there is more room.
    assert groups(dealt(request(lengths, 2, cap=150), 2, 8)) == [[1, 5], [0, 2, 3, 4, 6]]
    # Six times 32 are 192 tokens, which fit exactly.
    assert groups(dealt(request(lengths, 2, cap=192), 2, 8)) == [[1], [0, 2, 3, 4, 5, 6]]


def test_tiles_and_the_rest_of_each_layer_are_part_of_a_load() -> None:
    """Eight documents of 40 tokens have 6,560 pairs, one of 120 has 7,260."""
    lengths = [120, *([40] * 8)]
    alone = request(lengths, 2)
    assert groups(dealt(alone, 2, 1)) == [[0], [1, 2, 3, 4, 5, 6, 7, 8]]
    # With a tile of 32,768 pairs for each, nine documents cost nearly the same each.
    tiles = replace(alone, cost=replace(FREE, row_tile_pairs=32_768))
    assert sorted(len(documents) for documents in dealt(tiles, 2, 1)) == [4, 5]
    long = request([600, *([40] * 8)], 2)
    tiles = replace(long, cost=replace(FREE, row_tile_pairs=32_768))
    # 5 tiles and 180,300 pairs are more than 8 tiles, but less than the 4 x 8 tiles of documents cut into 4 parts.
    assert groups(dealt(tiles, 2, 1)) == [[0], [1, 2, 3, 4, 5, 6, 7, 8]]
    assert len(dealt(tiles, 2, 4)[0]) > 1
    # Where the rest of each layer costs over 1,000 pairs a token, tokens decide: 120 + 2 x 40 and 6 x 40.
    linear = replace(alone, cost=CostModel(row_tile_pairs=0))
    assert linear.cost.pairs_per_token(SHAPE) > 1000
    assert [sum(lengths[d] for d in documents) for documents in groups(dealt(linear, 2, 1))] == [200, 240]


def test_one_group_has_everything() -> None:
    assert groups(dealt(request([5, 9, 1], 2), 1, 1)) == [[0, 1, 2]]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 400), min_size=1, max_size=40), st.sampled_from([2, 3, 4]), st.booleans())
def test_every_document_is_dealt_once(lengths: list[int], count: int, tight: bool) -> None:
    cap = -(-sum(lengths) // count) if tight else None
    found = dealt(request(lengths, count, cap), count, 4)
    assert sorted(d for documents in groups(found) for d in documents) == list(range(len(lengths)))


def test_work_is_even_by_load_and_tokens_are_by_tokens() -> None:
    """Three long documents over four groups: the fourth group gets as many tokens, or as much work."""
    lengths = [*([3000] * 3), *([200] * 400)]
    plans = {}
    for strategy in ("zigzag:4", "zigzag:4@load"):
        plan = flexcp.Planner(8, 4, 64, cluster=flexcp.cluster("h100", 4, 4), cost=FREE, strategy=strategy)(lengths)
        work, tokens = (per_rank.reshape(4, 4).sum(axis=1) for per_rank in (plan.work(), plan.placement.tokens))
        plans[strategy] = imbalance(work), imbalance(tokens)
    assert plans["zigzag:4@load"][0] < 1.01 < 1.15 < plans["zigzag:4"][0]
    assert plans["zigzag:4"][1] < 1.01 < 1.15 < plans["zigzag:4@load"][1]


@pytest.mark.parametrize(
    "strategy", [f"{name}@load" for name in STATIC] + ["zigzag:2@load", "ulysses:2@load", "usp:2,2@load", "ring:4@load"]
)
def test_plans_are_right(strategy: str) -> None:
    where = flexcp.cluster("h100", 2, 4)
    plan = flexcp.Planner(8, 4, 64, cluster=where, strategy=strategy)(
        [900, 400, 7, 300, 300, 1, 60], flexcp.window(200)
    )
    plan.check()
    assert plan.strategy == plan.requested == strategy
    assert flexcp.load_plan(flexcp.save_plan(plan)).hash == plan.hash


@pytest.mark.parametrize("strategy", ["ring:4", "zigzag:4", "allgather:4", "ulysses:4", "usp:2,2"])
def test_the_cap_has_room_for_rounding(strategy: str) -> None:
    """Thousands of short documents whose parts are all rounded in the same direction still fit, because groups are not
    filled completely.
    """
    lengths = [20_000, *([5] * 4000)]
    planner = flexcp.Planner(
        8, 4, 64, cluster=flexcp.cluster("h100", 2, 4), strategy=f"{strategy}@load", max_tokens_per_rank=8000
    )
    assert planner(lengths).placement.tokens.max() <= 8000


def test_other_words_are_refused() -> None:
    with pytest.raises(
        ValueError, match=re.escape("'auto@load': only static methods (dp, ring, zigzag, allgather, ulysses, usp)")
    ):
        find_strategy("auto@load")
    with pytest.raises(
        ValueError, match=re.escape("'zigzag:4@work': documents are dealt by tokens, or with 'zigzag:4@load' by load")
    ):
        find_strategy("zigzag:4@work")
    with pytest.raises(ValueError, match="dp takes no degree"):
        flexcp.Planner(8, strategy="dp:3@load")([10])
    with pytest.raises(ValueError, match="zigzag takes a degree"):
        flexcp.Planner(8, strategy="zigzag:x@load")([10])

"""Proves levelling: the exact work of ranks becomes even, every document stays complete, and speeds count."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexcp.batch import make_batch
from flexcp.clusters import Cluster, cluster
from flexcp.cost import CostModel, Model
from flexcp.masks import causal, window
from flexcp.planners.groups.groups import all_groupings, groups
from flexcp.planners.groups.levelling import Bridge, _bridges, _cut_again, _forest, _level, _loads, level
from flexcp.planners.groups.priced_documents import price_documents
from flexcp.planners.groups.rows import Pieces, place_pieces
from flexcp.planners.request import Request
from flexcp.shape import Shape

ALONE = CostModel(model=Model("none", 1, 1, 1))
SHAPE = Shape(32, 8, 128, 128)


def asked(lengths: list[int], where: Cluster, cost: CostModel = ALONE, argument: str = "") -> Request:
    return Request(make_batch(lengths, causal()), SHAPE, where, cost, argument=argument)


def pieces_of(rows: list[tuple[int, int, int, int, int]]) -> Pieces:
    """Return pieces from (first rank, ranks, document, from, to)."""
    return Pieces(*np.array(rows, np.int64).T)


def spread_of(request: Request, pieces: Pieces) -> float:
    """Return by how much the busiest rank is above the mean, counted exactly."""
    load = _loads(request, place_pieces(request, price_documents(request, []), pieces))
    return float(load.max() / load.mean()) - 1


def test_ranks_of_a_cut_document_get_the_same_work() -> None:
    """The first rank has a whole document besides its piece; the last piece is on a rank with nothing else."""
    request = asked([20_000, 60_000], cluster("h100", 1, 4))
    rows = [(0, 1, 0, 0, 20_000), (0, 1, 1, 0, 15_000), (1, 1, 1, 15_000, 30_000), (2, 1, 1, 30_000, 45_000)]
    pieces = pieces_of([*rows, (3, 1, 1, 45_000, 60_000)])
    priced = price_documents(request, [])
    spreads = [spread_of(request, pieces)]
    for _ in range(2):
        pieces = level(request, priced, pieces, place_pieces(request, priced, pieces))
        spreads.append(spread_of(request, pieces))
    assert spreads[0] > 0.2 and spreads[2] < 0.002
    assert pieces.document.tolist() == [0, 1, 1, 1, 1] and pieces.hi[-1] == 60_000
    assert np.all(pieces.lo[2:] == pieces.hi[1:-1])


def test_single_ranks_are_levelled_after_their_teams() -> None:
    """Two teams of two ranks share document 0, most of which is on the first. Single ranks of both share document 2.
    What the teams exchange counts when their ranks are levelled.
    """
    request = asked([60_000, 20_000, 30_000], cluster("h100", 2, 2), replace(ALONE, row_tile_pairs=0))
    rows = [(0, 2, 0, 0, 50_000), (2, 2, 0, 50_000, 60_000), (0, 1, 1, 0, 10_000), (1, 1, 1, 10_000, 20_000)]
    rows += [(0, 1, 2, 0, 2_000), (2, 1, 2, 2_000, 12_000), (3, 1, 2, 12_000, 30_000)]
    priced = price_documents(request, [2])
    pieces = pieces_of(rows)
    pieces = level(request, priced, pieces, place_pieces(request, priced, pieces))
    load = _loads(request, place_pieces(request, priced, pieces))
    assert load.max() < 1.005 * load.mean()


def test_loads_are_counted_over_all_layers() -> None:
    """One layer is causal and three have a window."""
    masks = {"causal": (causal(), 1), "window": (window(99, 0), 3)}
    request = replace(asked([900, 400], cluster("h100", 1, 2)), cost=replace(ALONE, row_tile_pairs=0))
    request = replace(request, batch=make_batch([900, 400], masks=masks))
    pieces = pieces_of([(0, 1, 0, 0, 900), (1, 1, 1, 0, 400)])
    placement = place_pieces(request, price_documents(request, []), pieces)
    token = 4 * ALONE.pairs_per_token(SHAPE)
    expected = [900 * token + 900 * 901 // 2 + 3 * (100 * 101 // 2 + 800 * 100)]
    expected.append(400 * token + 400 * 401 // 2 + 3 * (100 * 101 // 2 + 300 * 100))
    assert _loads(request, placement).tolist() == expected


def test_the_largest_piece_of_a_document_has_a_bridge_to_all_others() -> None:
    """Rank 1 has the largest piece of document 0, and two pieces of document 1."""
    rows = [
        (0, 1, 0, 0, 10),
        (1, 1, 0, 10, 40),
        (2, 1, 0, 40, 60),
        (1, 1, 1, 0, 5),
        (3, 1, 1, 5, 12),
        (1, 1, 1, 12, 15),
    ]
    pieces = pieces_of([*rows, (2, 1, 2, 0, 99)])
    bridges = _bridges(pieces, pieces.hi - pieces.lo, 1)
    assert bridges == [Bridge(1, 2, 1, 2), Bridge(1, 0, 1, 0), Bridge(3, 1, 4, 3)]


def test_pieces_without_tokens_are_left_out() -> None:
    pieces = pieces_of([(0, 1, 0, 0, 10), (1, 1, 0, 10, 40), (2, 1, 0, 40, 60), (2, 1, 1, 0, 7)])
    found = _cut_again(pieces, np.array([35, 0, 25, 7])).matrix().T.tolist()
    assert found == [[0, 1, 0, 0, 35], [2, 1, 0, 35, 60], [2, 1, 1, 0, 7]]


def test_slower_ranks_get_less() -> None:
    where = replace(cluster("h100", 1, 2), speeds=(1000, 500))
    request = asked([30_000], where)
    pieces = pieces_of([(0, 1, 0, 0, 15_000), (1, 1, 0, 15_000, 30_000)])
    priced = price_documents(request, [])
    for _ in range(2):
        pieces = level(request, priced, pieces, place_pieces(request, priced, pieces))
    load = _loads(request, place_pieces(request, priced, pieces))
    assert load[0] / load[1] == pytest.approx(2, rel=0.02)


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_every_document_stays_complete_and_no_rank_gets_busier_than_the_busiest(data: st.DataObject) -> None:
    """A token has the load 1."""
    ranks = data.draw(st.integers(2, 7))
    rows, tokens = [], []
    for document in range(data.draw(st.integers(1, 6))):
        parts = data.draw(st.lists(st.integers(1, 500), min_size=1, max_size=5))
        tokens.append(sum(parts))
        stop = np.cumsum(parts)
        owners = [data.draw(st.integers(0, ranks - 1)) for _ in parts]
        begins = (stop - parts).tolist()
        rows += [(o, 1, document, b, e) for o, b, e in zip(owners, begins, stop.tolist(), strict=True)]
    pieces = pieces_of(rows)
    count, each = pieces.hi - pieces.lo, np.ones(len(pieces), np.int64)
    load = np.zeros(ranks, np.int64)
    np.add.at(load, pieces.first, count)
    bridges = _forest(_bridges(pieces, count, 1), ranks)
    assert len({bridge.other for bridge in bridges}) == len(bridges), (
        "a unit gives and takes over one bridge to its root"
    )
    before = int(load.max())
    _level(load, np.ones(ranks, np.int64), bridges, count, each)
    assert load.max() <= before
    again = np.zeros(ranks, np.int64)
    np.add.at(again, pieces.first, count)
    assert np.array_equal(again, load) and count.min() >= 0
    assert np.bincount(pieces.document, count).tolist() == tokens


def test_bridges_without_cycles_prefer_those_over_which_most_can_move() -> None:
    """Units 0, 1 and 2 are in a cycle. The first two bridges that are given are used, leaves first."""
    offered = [Bridge(0, 1, 0, 1), Bridge(1, 2, 2, 3), Bridge(2, 0, 4, 5)]
    assert _forest(offered, 4) == [Bridge(1, 2, 2, 3), Bridge(0, 1, 0, 1)]


def test_groups_are_level() -> None:
    """Without levelling, ranks are dealt even loads, but not even work."""
    request = asked([26_000, 31_000, 44_000, 12_000, 54_000, 9_000, 17_000, 40_000], cluster("h100", 2, 8))
    most = []
    for argument in ("team=1+slack=1+long=poured+level=yes", "team=1+slack=1+long=poured+level=no"):
        load = _loads(request, groups(replace(request, argument=argument)))
        most.append(load.max() / load.mean())
    assert most[0] < 1.003 < 1.006 < most[1]


def test_loads_of_very_long_documents_are_shifted_alike() -> None:
    """The loads of these documents need more bits than loops allow, so they are counted in larger units."""
    lengths = [40_000_000, 30_000_000, 50_000_000]
    request = asked(lengths, cluster("h100", 2, 8), argument="team=8+slack=0+split=shared+long=poured")
    assert price_documents(request, []).shift > 0
    for placement in all_groupings(request):
        load = _loads(request, placement)
        assert load.max() < 1.01 * load.mean()

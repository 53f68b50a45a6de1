"""Proves how pieces are found: what the compiled loops estimate for a team, and which weight of attention is taken."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

import flexcp
from flexcp.batch import make_batch
from flexcp.clusters import cluster
from flexcp.cost import CostModel
from flexcp.data.lengths import draw_lengths
from flexcp.models.find import find_model
from flexcp.plan.placement import Placement
from flexcp.planners.groups import search
from flexcp.planners.groups.compiled_dealing import ATTENTION, COLUMNS, HI, LO, LOAD
from flexcp.planners.groups.compiled_search import deal_to_ranks
from flexcp.planners.groups.groups import LEVELLINGS, Settings, _worth_placing, all_groupings, groups
from flexcp.planners.groups.priced_documents import PricedDocuments, price_documents
from flexcp.planners.groups.rows import Pieces, place_pieces
from flexcp.planners.groups.search import Found, _small_parts_last, find_pieces, forward_share
from flexcp.planners.request import Request
from flexcp.schedule.transfers import make_plan
from flexcp.simulator.step_parts import Training
from flexcp.simulator.training import simulate

MODEL = find_model("llama3-8b")
STEP = Training(MODEL)
HALF = [262_144, *draw_lengths("web", 262_144, 0)]
"""One document of half the tokens: of 8 nodes it needs most for its attention, and the others have most tokens."""


def asked(lengths: list[int], nodes: int = 8, training: Training | None = STEP, ranks: int = 8) -> Request:
    batch = make_batch(lengths, masks={"causal": (flexcp.causal(), 32)})
    cost = CostModel(model=MODEL.model)
    return Request(batch, MODEL.shape, cluster("h100", nodes, ranks), cost, training=training)


def test_a_team_takes_its_latest_attention_and_its_most_tokens() -> None:
    """Two nodes of two ranks. Items: (attention, tokens); ranks of node 1 have half the speed."""
    items = np.zeros((3, COLUMNS), np.int64)
    items[:, ATTENTION], items[:, HI] = [600, 400, 100], [60, 40, 10]
    items[:, LOAD] = items[:, ATTENTION] + items[:, HI]
    speeds = np.array([1000, 1000, 500, 500])
    # Node, team, slack, poured, all split, room, linear, exchange.
    table, where, times, short = deal_to_ranks(items, speeds, np.array([2, 2, 2, 0, 1, 0, 3, 7]))
    assert not short and (where[:, 1] == 2).all() and set(where[:, 0].tolist()) <= {0, 2}
    for node, speed in ((0, 1000), (1, 500)):
        mine = table[where[:, 0] == 2 * node]
        attention, tokens = int(mine[:, ATTENTION].sum()), int((mine[:, HI] - mine[:, 1]).sum())
        usual = 750 / speed  # the mean speed over that of the node
        expected = (attention / 2 * usual, (3 * tokens / 2 + 7 * tokens) * usual)
        assert np.allclose(times[node], expected, atol=8)


def test_there_is_room_for_the_parts_of_documents_that_a_team_cuts_by_rows() -> None:
    """One document on a node of 32 ranks. Compiled loops would not notice what they write past the end of a table."""
    items = np.zeros((1, COLUMNS), np.int64)
    items[0, [ATTENTION, LOAD, HI]] = 64_000
    settings = np.array([32, 32, 400, 0, 2, 0, 3, 7])
    table, where, _, _ = deal_to_ranks.py_func(items, np.full(32, 1000), settings)
    assert sorted(where[:, 0].tolist()) == list(range(32)) and (table[:, HI] - table[:, LO] == 2_000).all()


def test_units_are_short_if_long_documents_need_more_than_there_are() -> None:
    priced = price_documents(asked([300_000, 300_000, 1000], 2), [8])
    assert find_pieces(asked([300_000, 300_000, 1000], 2), priced, 8, 2, False, "few").pours is False
    priced = price_documents(asked([300_000] * 3, 4), [8])  # each needs two of the four nodes
    assert find_pieces(asked([300_000] * 3, 4), priced, 8, 2, False, "few").pours is True


def test_ranks_are_short_if_documents_that_a_team_cuts_by_rows_need_more_than_it_has() -> None:
    """Six documents for the eight ranks of a node need two ranks each."""
    request = asked([30_000] * 12, 2, None)
    priced = price_documents(request, [8])
    assert find_pieces(request, priced, 8, 0, False, "shared").pours is True
    assert find_pieces(request, priced, 8, 0, False, "few").pours is False
    notes = [found.note for found in all_groupings(replace(request, argument="team=8+slack=0+split=shared"))]
    assert ["poured" in note for note in notes] == [False, True]


def test_nodes_that_share_a_document_are_dealt_less_of_the_others() -> None:
    """The long document is on two of three nodes. With ``split=shared``, each of its tokens counts three passes of its
    rows more than one of another document.
    """
    request = asked([160_000, *[8_000] * 60], 3, None)
    priced = price_documents(request, [8])
    pieces = find_pieces(request, priced, 8, 0, False, "shared").pieces
    tokens = pieces.hi - pieces.lo
    load = tokens * (priced.load / request.batch.lengths)[pieces.document]
    node = pieces.first // 8
    assert set(node[pieces.document == 0].tolist()) == {0, 1}
    shared = np.bincount(node, tokens * (pieces.document == 0), minlength=3)
    counted = np.bincount(node, load) + 3 * priced.cut * shared
    assert counted.max() < 1.002 * counted.min() and np.bincount(node, load)[0] < 0.995 * np.bincount(node, load)[2]


@pytest.mark.parametrize("training", [None, STEP], ids=["alone", "coupled"])
@pytest.mark.parametrize("slack", [0, 2])
def test_cuts_are_priced_and_work_is_levelled_unless_ranks_wait_in_every_layer(
    slack: int, training: Training | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With slack, a placement that is not levelled is a candidate too."""
    request = asked([*[30_000] * 12, *[4000] * 100], 2, training)
    priced = price_documents(request, [])
    dear = replace(priced, cut=10 * int(priced.load[0]) // 30_000)
    found = [find_pieces(request, each, 1, slack, True, "few").pieces for each in (priced, dear)]
    assert np.array_equal(found[0].matrix(), found[1].matrix()) == (training is not None)
    calls: list[Pieces] = []

    def level(request: Request, priced: PricedDocuments, pieces: Pieces, placement: Placement) -> Pieces:
        calls.append(pieces)
        return replace(pieces, hi=pieces.hi.copy())

    monkeypatch.setattr(import_module("flexcp.planners.groups.groups"), "level", level)
    placements = all_groupings(replace(request, argument=f"team=1+slack={slack}+long=poured"))
    assert len(calls) == (0 if training else LEVELLINGS) and len(placements) == 1  # levelling changed nothing
    calls.clear()
    assert "level=no" in groups(replace(request, argument=f"team=1+slack={slack}+long=poured+level=no")).note
    assert not calls
    assert "level=yes" in groups(replace(request, argument=f"team=1+slack={slack}+long=poured+level=yes")).note
    assert len(calls) == LEVELLINGS


def test_nodes_know_what_the_documents_that_their_ranks_must_cut_cost_more() -> None:
    """Nodes have two ranks. The long document is more than a rank should take, but not more than a node. If cutting it
    costs something, its node gets fewer tokens of others.
    """
    request = asked([40_000, *[5_000] * 26], 2, None, ranks=2)
    priced = price_documents(request, [])
    dear = replace(priced, cut=int(priced.load[0]) // 40_000 // 4)
    kept = []
    for each in (replace(priced, cut=0), dear):
        pieces = find_pieces(request, each, 1, 2, False, "few").pieces
        node = pieces.first[pieces.document == 0][0] // 2
        kept.append(int(((pieces.hi - pieces.lo) * (pieces.first // 2 == node)).sum()))
    assert kept[1] < kept[0]


def test_nodes_and_ranks_that_have_little_of_a_document_get_its_last_pieces() -> None:
    """Document 0 has 300 tokens on node 0, 1,000 on node 1 and 995, which is as good as equal, on node 2."""
    rows = [(0, 100), (1, 200), (2, 400), (3, 600), (4, 500), (5, 495)]
    stop = np.cumsum([tokens for _, tokens in rows]).tolist()
    table = [(rank, 1, 0, end - tokens, end) for (rank, tokens), end in zip(rows, stop, strict=True)]
    pieces = Pieces(*np.array([*table, (1, 1, 1, 0, 50), (0, 1, 1, 50, 90)], np.int64).T)
    found = _small_parts_last(pieces, 2)
    assert found.first.tolist() == [3, 2, 4, 5, 1, 0, 1, 0]
    assert (found.hi - found.lo).tolist() == [600, 400, 500, 495, 200, 100, 50, 40]
    assert found.lo.tolist() == [0, 600, 1000, 1500, 1995, 2195, 0, 50]


def test_ranks_that_compute_little_of_a_document_receive_little_of_it() -> None:
    """Four ranks of node 0 and one of node 1 share a document. If that one had the first rows, it had the last too."""
    request = asked([30_000], 2, None, ranks=4)
    table = [(rank, 1, 0, 6000 * at, 6000 * (at + 1)) for at, rank in enumerate((4, 0, 1, 2, 3))]
    pieces = Pieces(*np.array(table, np.int64).T)
    received = []
    for each in (pieces, _small_parts_last(pieces, 4)):
        placement = place_pieces(request, price_documents(request, []), each)
        plan = make_plan(placement, request.shape, request.cluster, request.cost, "groups")
        received.append(int(plan.bytes(False)[:, 4].sum()))
    assert received[1] < 0.6 * received[0]


def test_the_forward_has_two_of_seven_products_at_equal_efficiency() -> None:
    request = asked(HALF)
    even = replace(request, cost=CostModel(forward_efficiency=500, backward_efficiency=500))
    assert forward_share(even) == 1000 * 2 // 7 and forward_share(request) < 1000 * 2 // 7


def test_ranks_that_wait_in_every_layer_are_dealt_more_weights() -> None:
    forward = forward_share(asked(HALF))
    weights = search._weights(asked(HALF), 8, forward)
    assert weights[0] == 1000 and sorted(weights, reverse=True) == weights and len(weights) == search.LIGHTER + 1
    assert weights[-1] == forward * 1000 // search.TOKENS_FORWARD
    for other in (asked(HALF, training=None), asked(HALF, training=replace(STEP, sync="allreduce")), asked(HALF, 1)):
        assert search._weights(other, 8, forward) == [1000]


def test_a_step_is_the_slowest_forward_and_the_slowest_backward() -> None:
    """Attention alone takes a quarter of its time in the forward, everything else a third; 10 layers."""
    times = np.array([[4000, 0], [0, 3900]])
    forward = [1000, 3900 * search.TOKENS_FORWARD // 1000]
    backward = [3000, 3900 - forward[1]]
    assert search._step_time(times, 250, 10) == max(forward) * 9 // 10 + max(backward)
    assert search._step_time(times, 250, 1) == 4000  # the sum of one team


def test_weights_make_a_step_with_one_long_document_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    def simulated() -> int:
        request = asked(HALF)
        placement = groups(replace(request, argument="team=8+slack=2+long=whole"))
        how = (request.shape, request.cluster, request.cost)
        step = simulate(make_plan(placement, *how, "groups"), training=STEP).step
        assert step is not None
        return step.total_ns

    weighed = simulated()
    monkeypatch.setattr(search, "_weights", lambda *_: [1000])
    assert weighed < 0.98 * simulated()


@pytest.mark.parametrize(
    ("times", "kept"),
    [
        ({1: 1000, 2: 1100, 12: 1040}, [1, 12]),  # the usual slack takes clearly longer
        ({1: 1000, 2: 1001, 12: 1100}, [2]),  # the smallest gains too little, the largest takes clearly longer
        ({1: 1000, 2: 1005, 12: 1005}, [1, 2, 12]),
    ],
)
def test_settings_are_left_out_by_their_estimate(
    times: dict[int, int], kept: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces: Any = object()
    module = all_groupings.__globals__
    monkeypatch.setitem(
        module, "find_pieces", lambda request, priced, team, slack, *_: Found(pieces, times[slack], False)
    )
    monkeypatch.setitem(module, "_same", lambda a, b: False)
    tried = [Settings(8, slack) for slack in times]
    found = [each.slack for each, _ in _worth_placing(asked(HALF), price_documents(asked(HALF), [8]), tried)]
    assert found == kept
    alone = asked(HALF, training=None)  # estimates decide only if ranks wait for each other in every layer
    assert [each.slack for each, _ in _worth_placing(alone, price_documents(alone, [8]), tried)] == list(times)


def test_documents_of_a_team_are_laid_end_to_end_and_shared_ones_spread() -> None:
    """On one node a rank keeps neighbouring rows of few documents; rows of a document on two nodes are on all ranks."""

    def owners(lengths: list[int], nodes: int) -> list[set[int]]:
        runs = groups(replace(asked(lengths, nodes), argument="team=8+split=all")).runs
        ends = np.cumsum([0, *lengths])
        return [set(runs.rank[(runs.start < stop) & (runs.stop > start)].tolist()) for start, stop in pairwise(ends)]

    assert owners([8192] * 8, 1) == [{rank} for rank in range(8)]
    assert owners([12_288, 4096, 40_960, 8192], 1) == [{0, 1}, {1}, {2, 3, 4, 5, 6}, {7}]
    long, *others = owners([200_000, *[3000] * 20], 2)
    assert long == set(range(16)) and all(len(few) <= 2 for few in others)

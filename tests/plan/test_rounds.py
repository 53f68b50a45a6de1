"""Proves rounds, into which the messages of a stage are cut: there are as many as the busiest rank has chunks to send
or to receive, no rank has two peers in one round, every byte is in exactly one chunk, and little time is lost.

Counted by hand from the transfers, over random multigraphs and over plans of every strategy with several masks and
machines.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import flexcp
from flexcp.clusters import Cluster, cluster
from flexcp.plan.compiled_rounds import colour_edges
from flexcp.plan.execution import one_call_ahead
from flexcp.plan.program import Program, Transfers
from flexcp.plan.rounds import MOST_CHUNKS, WORTH_PERMILLE, plan_rounds
from flexcp.planners.strategies import SLOW, STRATEGIES
from flexcp.shape import Kind, Shape
from judged_rounds import judge

SHAPE = Shape(4, 4, 1, 1, "float32")
EACH = int(SHAPE.bytes_per_token_head()[Kind.Q, 0])
MASKS = {
    "causal": flexcp.causal(),
    "lambda": flexcp.masks.lambda_(16, 200),
    "shared question": flexcp.masks.shared_question(),
    "blockwise": flexcp.masks.causal_blockwise(64, 2),
    "window": flexcp.window(100, 50),
}
LENGTHS = [3000, 17, 900, 1, 450, 1200, 64, 2100, 333]


def program_of(moves: list[tuple[int, int, int, int]]) -> Program:
    """Return a program with transfers (stage, source, target, tokens) of queries of one head."""
    stage, source, target, tokens = np.array(moves, np.int64).reshape(-1, 4).T
    table = Transfers.make(
        len(moves),
        stage=stage,
        source=source,
        target=target,
        kind=int(Kind.Q),
        owner=source,
        start=0,
        stop=tokens,
        h0=0,
        h1=1,
        partial=0,
    )
    return Program(table.sorted_by("stage", "source", "target"), 0, 9, execution=one_call_ahead(9))


@st.composite
def multigraphs(draw: st.DrawFn) -> tuple[Program, Cluster]:
    machine = cluster("h100", draw(st.integers(1, 3)), draw(st.integers(1, 4)))
    rank = st.integers(0, machine.ranks - 1)
    tokens = draw(st.sampled_from([st.just(4), st.integers(1, 9), st.sampled_from([1, 40, 41, 200])]))
    return program_of(draw(st.lists(st.tuples(st.integers(1, 3), rank, rank, tokens), max_size=80))), machine


@settings(max_examples=80, deadline=None)
@given(multigraphs(), st.one_of(st.none(), st.integers(1, 50 * EACH)))
def test_rounds_of_any_traffic(case: tuple[Program, Cluster], chunk_bytes: int | None) -> None:
    program, machine = case
    judge(plan_rounds(program, SHAPE, machine, chunk_bytes), program, SHAPE, machine)


@pytest.mark.parametrize("strategy", [s for s in STRATEGIES if s not in SLOW])
@pytest.mark.parametrize("machine", [cluster("h100", 1, 4), cluster("a100", 2, 4), cluster("cpu", 3, 2)], ids=str)
def test_rounds_of_real_plans(strategy: str, machine: Cluster) -> None:
    for mask in MASKS.values():
        plan = flexcp.Planner(24, 24, 16, cluster=machine, strategy=strategy)(LENGTHS, mask)
        for program in plan.programs[0]:
            for chunk_bytes in (None, 40_000):
                judge(plan_rounds(program, plan.shape, machine, chunk_bytes), program, plan.shape, machine)


@settings(max_examples=80, deadline=None)
@given(st.integers(1, 9), st.data())
def test_any_multigraph_has_a_colouring_in_its_largest_degree(ranks: int, data: st.DataObject) -> None:
    vertex = st.integers(0, ranks - 1)
    edges = data.draw(st.lists(st.tuples(vertex, vertex), min_size=1, max_size=120))
    source, target = np.array(edges, np.int64).T.copy()
    colour, count = colour_edges(source, target, ranks)
    assert count == max(np.bincount(source).max(), np.bincount(target).max())
    assert sorted(set(colour.tolist())) == list(range(count))
    for end in (source, target):
        assert len({*zip(end.tolist(), colour.tolist(), strict=True)}) == len(edges)


def test_an_exchange_of_all_with_all_loses_nothing() -> None:
    machine = cluster("h100", 1, 7)
    pairs = [(1, s, t, 100) for s in range(7) for t in range(7) if s != t]
    ex = plan_rounds(program_of(pairs), SHAPE, machine).exchanges
    assert (ex.rounds.tolist(), ex.efficiency.tolist()) == ([6], [1.0])


def test_a_round_holds_messages_of_similar_size() -> None:
    # Two ranks each send 90 and 10 tokens to the same two ranks; rounds should take 90 + 10, not 90 + 90.
    machine = cluster("h100", 1, 4)
    moves = [(1, 0, 2, 10), (1, 0, 3, 90), (1, 1, 2, 90), (1, 1, 3, 10)]
    rounds = plan_rounds(program_of(moves), SHAPE, machine, chunk_bytes=10**6)
    assert rounds.exchanges.spent.tolist() == [100 * EACH]
    assert (rounds.chunks.stop[rounds.chunks.round == 0] == 90 * EACH).all()


def test_rounds_last_little_longer_than_they_must() -> None:
    # For any size, at least as many rounds have a message of that size or more as the busiest rank has such messages.
    machine = cluster("h100", 1, 24)
    for seed in range(40):
        rng = np.random.default_rng(seed)
        pairs = [(s, t) for s in range(24) for t in range(24) if s != t and rng.random() < 0.5]
        moves = [(1, *pair, int(size) + 1) for pair, size in zip(pairs, rng.lognormal(7, 1, len(pairs)), strict=True)]
        degree: Counter[tuple[int, int]] = Counter()
        needed, least = 0, 0
        for _, source, target, tokens in sorted(moves, key=lambda move: -move[3]):
            degree.update([(0, source), (1, target)])
            if max(degree.values()) > needed:
                needed, least = needed + 1, least + tokens * EACH
        rounds = plan_rounds(program_of(moves), SHAPE, machine, chunk_bytes=10**9)
        assert least <= rounds.exchanges.spent[0] <= 1.1 * least


def test_chunks_are_halved_only_while_that_pays() -> None:
    # Whole messages take 900 + 500 + 100 where the busiest rank has 1,000: ranks 0 and 1 wait for each other's large
    # message.
    moves = [(1, 0, 2, 900_000), (1, 0, 3, 100_000), (1, 1, 2, 100_000), (1, 1, 3, 500_000), (1, 4, 3, 500_000)]
    slow, fast = cluster("cpu", 1, 5), cluster("gb200", 1, 5)
    whole = plan_rounds(program_of(moves), SHAPE, slow, chunk_bytes=10**9).exchanges
    halved = plan_rounds(program_of(moves), SHAPE, slow).exchanges
    assert whole.spent[0] * 1000 > whole.port[0] * WORTH_PERMILLE >= halved.spent[0] * 1000
    assert 900_000 * EACH // MOST_CHUNKS <= halved.chunk_bytes[0] < 900_000 * EACH
    # Where sending a chunk would take no longer than starting it, messages stay whole.
    assert plan_rounds(program_of(moves), SHAPE, fast).exchanges.chunk_bytes[0] == 900_000 * EACH


def test_a_call_is_a_few_consecutive_rounds() -> None:
    machine = cluster("h100", 1, 7)
    program = program_of([(1, s, t, 100) for s in range(7) for t in range(7) if s != t])
    rounds = plan_rounds(program, SHAPE, machine, rounds_per_call=4)
    assert Counter(zip(rounds.chunks.round.tolist(), rounds.call.tolist(), strict=True)) == {
        (r, r // 4): 7 for r in range(6)
    }


def test_the_same_program_gives_the_same_rounds_in_any_order_of_transfers() -> None:
    machine = cluster("h100", 2, 4)
    plan = flexcp.Planner(8, 2, 16, cluster=machine, strategy="blocks")(LENGTHS)
    program = plan.programs[0][1]
    found = plan_rounds(program, plan.shape, machine)
    order = np.random.default_rng(0).permutation(len(program.transfers))
    again = plan_rounds(replace(program, transfers=program.transfers.take(order)), plan.shape, machine)
    for one, other in ((found.exchanges, again.exchanges), (found.chunks, again.chunks)):
        assert one.matrix().tolist() == other.matrix().tolist()


def test_nothing_to_move_is_no_round() -> None:
    machine = cluster("h100", 1, 2)
    rounds = plan_rounds(program_of([(0, 1, 1, 50)]), SHAPE, machine)
    assert len(rounds.exchanges) == len(rounds.chunks) == 0


@pytest.mark.parametrize("name", ["chunk_bytes", "rounds_per_call"])
@pytest.mark.parametrize("value", [0, -1, 2.5, True])
def test_sizes_that_are_none_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"{name} is a whole number of at least 1; got {value}"):
        plan_rounds(program_of([(1, 0, 1, 5)]), SHAPE, cluster("h100", 1, 2), **{name: value})

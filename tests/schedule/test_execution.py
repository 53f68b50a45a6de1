"""Proves how the execution of stages is chosen: the fastest number of multiprocessors left free, posting early where
that is faster, and rounds where many messages at once slow a port down.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import flexcp
from flexcp.clusters import Cluster
from flexcp.cost import H200_CONTENTION, H200_CONTENTION_ACROSS, NO_CONTENTION, Contention, CostModel
from flexcp.measure.calibrate.calibrate import contention_rows
from flexcp.plan.execution import Execution, margins, one_call_ahead
from flexcp.plan.program import Program, Transfers
from flexcp.plan.rounds import find_messages
from flexcp.schedule.execution import crosses_only, overlapped_ns, transfers_ns, with_execution
from flexcp.shape import Kind, Shape

SHAPE = Shape(2, 2, 64, 64)
KEY_BYTES = int(SHAPE.bytes_per_token_head()[Kind.KV, 0]) * 2
MACHINE = Cluster("two", 1, 2, gflops=1000, intra_mbps=1000, inter_mbps=1000, latency_ns=0)
COST = CostModel(link_efficiency=1000, message_ns=0)


def ints(*rows: list[int]) -> np.ndarray:
    return np.array(rows, np.int64)


def keys(*stages: tuple[int, int], stages_of: int) -> Program:
    """Return a program in which rank 0 sends keys to rank 1 for so many microseconds in each (stage, microseconds)."""
    size = 1000 * 1000 // 1000  # bytes in a microsecond at 1,000 MB/s
    each = {"source": 0, "target": 1, "kind": int(Kind.KV), "owner": 0, "start": 0, "h0": 0, "h1": 2, "partial": 0}
    t = Transfers.join([Transfers.make(1, stage=s, stop=us * size // KEY_BYTES, **each) for s, us in stages])
    return Program(t, 0, stages_of, execution=one_call_ahead(stages_of))


def by_steps(work: int, beside: int, row: Contention, backward: bool) -> float:
    """Return the time of work beside a transfer, in exact fractions; a transfer that begins beside work stays slow."""
    if not beside or not work:
        return beside or work
    slow, alone = row.compute(backward)
    end = beside * 1000 / row.link
    done = min(work, end * 1000 / slow)
    return max(end, min(end, work * slow / 1000) + (work - done) * alone / 1000)


@given(st.integers(0, 10**7), st.integers(0, 10**7), st.sampled_from(H200_CONTENTION + NO_CONTENTION), st.booleans())
def test_work_beside_a_transfer(work: int, beside: int, row: Contention, backward: bool) -> None:
    found = overlapped_ns(ints([work]), ints([beside]), *row.compute(backward), row.link)[0, 0]
    assert found == pytest.approx(by_steps(work, beside, row, backward), abs=4, rel=1e-6)


def test_the_margin_is_the_one_under_which_the_slowest_rank_is_done_first() -> None:
    program = keys((1, 10), (2, 300), (3, 900), stages_of=5)
    work = ints([1000_000] * 5, [1000_000] * 5)
    for backward in (False, True):
        how = with_execution(program, work, SHAPE, MACHINE, COST, backward).execution
        beside = transfers_ns(program, find_messages(program, SHAPE, MACHINE), MACHINE, COST)
        for slot in range(4):
            times = {
                row.margin: int(
                    overlapped_ns(
                        work[:, slot : slot + 1], beside[:, slot + 1 : slot + 2], *row.compute(backward), row.link
                    ).max()
                )
                for row in H200_CONTENTION
            }
            assert times[how.margin[slot]] == min(times.values())
        assert how.margin[0] < how.margin[2] == 16 and how.margin[3:].tolist() == [0, 0]  # no transfers, no margin
        assert how.ahead.tolist() == [1] * 5 and not how.rounds_per_call.any()
    assert not with_execution(
        program, work, SHAPE, MACHINE, replace(COST, contention=NO_CONTENTION), False
    ).execution.margin.any()


def test_slots_after_all_work_keep_the_margin_of_the_last_slot_with_work() -> None:
    """Copies are still made in them while transfers are on their way."""
    program = keys((1, 10), (2, 900), stages_of=5)
    work = ints([1000_000, 1000_000, 0, 0, 0], [1000_000, 1000_000, 0, 0, 0])
    margin = with_execution(program, work, SHAPE, MACHINE, COST, False).execution.margin
    assert margin[0] < margin[1] == 16 and margin[1:].tolist() == [16] * 4


def test_transfers_that_only_cross_nodes_are_left_fewer_multiprocessors() -> None:
    """The same message is sent between the same ranks, once inside a node and once between two nodes."""
    program = keys((2, 300), stages_of=4)
    work = ints([1000_000] * 4, [1000_000] * 4)
    apart = replace(MACHINE, nodes=2, ranks_per_node=1, inter_mbps=MACHINE.intra_mbps)
    inside, across = (
        with_execution(program, work, SHAPE, machine, COST, False, 1).execution.margin for machine in (MACHINE, apart)
    )
    assert inside[1] == 16 and across[1] == 4
    sent = [find_messages(program, SHAPE, machine) for machine in (apart, MACHINE)]
    assert crosses_only(program, sent[0], apart)[:, 2].all() and not crosses_only(program, sent[1], MACHINE)[:, 2].any()
    alike = replace(COST, contention_across=H200_CONTENTION)
    assert with_execution(program, work, SHAPE, apart, alike, False, 1).execution.margin[1] == 16


def test_only_ranks_whose_transfers_are_under_way_leave_something_free() -> None:
    program = keys((2, 300), stages_of=4)
    for ahead, slots in ((1, [1]), (2, [0, 1]), (0, [])):
        how = Execution.make(4, rounds_per_call=0, ahead=ahead, margin=8)
        found = margins(replace(program, execution=how), 3)
        assert found[2].tolist() == [0] * 4  # a third rank has no transfers
        assert [np.flatnonzero(row).tolist() for row in found[:2]] == [slots] * 2 and found.max(initial=0) in (0, 8)


def test_a_stage_is_posted_two_ahead_where_the_slot_before_has_time_to_spare() -> None:
    cost = replace(COST, contention=NO_CONTENTION)
    program = keys((1, 100), (2, 900), stages_of=4)
    spare = ints([1000_000, 100_000, 0, 0], [1000_000, 100_000, 0, 0])
    assert with_execution(program, spare, SHAPE, MACHINE, cost, False).execution.ahead.tolist() == [1, 1, 2, 1]
    none = ints([100_000, 1000_000, 0, 0], [100_000, 1000_000, 0, 0])
    for work, most, moving in (
        (none, 2, program),
        (spare, 1, program),
        (spare, 2, replace(program, transfers=replace(program.transfers, owner=np.array([0, 1])))),  # forwarded keys
        (
            spare,
            2,
            replace(program, transfers=replace(program.transfers, kind=np.array([int(Kind.KV), int(Kind.DKV)]))),
        ),
    ):
        assert with_execution(moving, work, SHAPE, MACHINE, cost, False, most).execution.ahead.tolist() == [1] * 4


def test_rounds_are_taken_where_crowds_cost_more_than_calls() -> None:
    plan = flexcp.Planner(8, 8, 64, cluster=flexcp.cluster("h100", 1, 8), strategy="allgather")([65536])
    assert not plan.programs[0][0].execution.rounds_per_call.any()
    crowded = flexcp.Planner(
        8, 8, 64, cluster=flexcp.cluster("h100", 1, 8), strategy="allgather", cost=CostModel(crowding=50)
    )([65536])
    assert 0 < crowded.programs[0][0].execution.rounds_per_call[1] < 7  # of seven rounds
    slow_calls = replace(flexcp.cluster("h100", 1, 8), latency_ns=10**7)
    few = flexcp.Planner(8, 8, 64, cluster=slow_calls, strategy="allgather", cost=CostModel(crowding=50))([65536])
    assert not few.programs[0][0].execution.rounds_per_call.any()


def test_with_latents_nothing_travels_beside_work() -> None:
    planner = flexcp.Planner(8, 1, 64, cluster=flexcp.cluster("h100", 1, 4), latent=96, strategy="blocks")
    how = planner([9000, 700]).programs[0][0].execution
    assert not how.ahead.any() and not how.margin.any()


def test_a_cap_on_memory_keeps_posts_one_ahead() -> None:
    planner = flexcp.Planner(
        8, 8, 64, cluster=flexcp.cluster("h100", 1, 4), strategy="blocks", max_memory_per_rank=10**12
    )
    assert (planner([9000, 700]).programs[0][0].execution.ahead == 1).all()


def test_the_default_rows_are_those_that_were_measured() -> None:
    text = (Path(__file__).parents[2] / "docs" / "results" / "kernels.md").read_text()
    row = r"^\| (inside|across), \d+ blocks \| (forward|backward) \| (\d+) \|" + r" ([\d.]+) \|" * 5
    names = ("alone", "with short copy", "with copy")
    table = [
        {"where": where, "way": way, "margin": int(margin)}
        | {f"attention {name} ms": float(x) for name, x in zip(names, numbers, strict=False)}
        | {"copy alone ms": float(numbers[3]), "copy with attention ms": float(numbers[4])}
        for where, way, margin, *numbers in re.findall(row, text, re.M)
    ]
    assert len(table) == 20
    for where, rows in (("inside", H200_CONTENTION), ("across", H200_CONTENTION_ACROSS)):
        assert contention_rows([x for x in table if x["where"] == where]) == rows

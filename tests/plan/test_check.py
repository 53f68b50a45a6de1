"""Proves the symbolic check of plans: valid plans pass it and broken ones do not, forward and backward.

There are three kinds of tests. Single things are broken in valid plans of many kinds, and each must be caught. Random
cells of plans are overwritten, and whatever the check still accepts must compute the right numbers in :func:`executed`,
which executes a plan token by token with integer sums and shares no code with the check. Last, unusual but correct
plans (relays, reductions on the way) must be accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from flexcp.arrays.tables import Table
from flexcp.batch import MaskLike, make_batch
from flexcp.clusters import cluster
from flexcp.cost import CostModel
from flexcp.masks import causal, full, lambda_, window
from flexcp.masks import cut as slices_cut
from flexcp.plan.check import PlanError, check_plan
from flexcp.plan.execution import one_call_ahead
from flexcp.plan.placement import Placement, Regions, Runs
from flexcp.plan.plan import Plan
from flexcp.plan.program import Transfers
from flexcp.planner import Planner
from flexcp.schedule.transfers import make_plan
from flexcp.shape import OUTPUTS, QUERY_SIDED, Kind, Shape

Ints = NDArray[np.int64]
AnyTable = TypeVar("AnyTable", bound=Table)
LENGTHS = [26, 16, 8]
TOKENS = sum(LENGTHS)
NEVER = 10**6


# --- valid plans to start from: all with full masks, so that everything that moves is needed --------------------------


def planned(
    strategy: str, ranks: int = 4, lengths: list[int] = LENGTHS, tolerance: float | None = None, **call: Any
) -> Plan:
    call.setdefault("mask", None if "masks" in call else full())
    planner = Planner(8, 2, 16, cluster=cluster("h100", 1, ranks), strategy=strategy, compute_tolerance=tolerance)
    return planner(lengths, **call)


def scattered_map(ranks: int) -> list[list[int]]:
    return [list(range(r, TOKENS, ranks)) for r in range(ranks)]


def keys_split() -> Plan:
    """Return a plan with one rank for each third of a document's keys, and heads split inside a KV group.

    So outputs and key gradients are partial sums.
    """
    batch = make_batch([60, 9], full())
    runs = Runs(*np.array([(0, 0, 30), (1, 30, 50), (2, 50, 69)]).T)
    grid = [(j, 0, i * 30, i * 30 + 30, j * 20, j * 20 + 20, 0, 8) for i in range(2) for j in range(3)]
    regions = Regions(*np.array([*grid, (1, 1, 0, 9, 0, 9, 0, 3), (2, 1, 0, 9, 0, 9, 3, 8)]).T)
    return make_plan(
        Placement(batch, 3, 0, runs, (regions,)), Shape(8, 2, 16, 16), cluster("h100", 1, 3), CostModel(), "by hand"
    )


MAKERS: dict[str, Callable[[], Plan]] = {
    "ring": lambda: planned("ring"),
    "ring of three": lambda: planned("ring", ranks=3),
    "zigzag:2": lambda: planned("zigzag:2"),
    "allgather": lambda: planned("allgather", lengths=[60]),
    "ulysses:2": lambda: planned("ulysses:2"),
    "ulysses beyond kv heads": lambda: planned("ulysses"),
    "usp": lambda: planned("usp:2,2"),
    "blocks": lambda: planned("blocks"),
    "blocks, equal tokens": lambda: planned("blocks", tokens="equal", pad_to=8),
    "blocks on a contiguous layout": lambda: planned("blocks", layout="contiguous", tolerance=0.0),
    "blocks, assembled": lambda: planned("blocks", layout=scattered_map(4)),
    "keys split": keys_split,
}


@cache
def valid(name: str) -> Plan:
    return MAKERS[name]()


def with_program(plan: Plan, backward: bool, mask: int = 0, **changes: Any) -> Plan:
    """Return the plan with fields of one program replaced."""
    pairs = [list(p) for p in plan.programs]
    pairs[mask][backward] = replace(pairs[mask][backward], **changes)
    return replace(plan, programs=tuple((a, b) for a, b in pairs))


def with_transfers(plan: Plan, backward: bool, table: Transfers, mask: int = 0) -> Plan:
    return with_program(plan, backward, mask, transfers=table)


def with_placement(plan: Plan, **changes: Any) -> Plan:
    return replace(plan, placement=replace(plan.placement, **changes))


def edited(table: AnyTable, row: int, **values: int) -> AnyTable:
    """Return the table with cells of one row overwritten."""
    columns = {n: getattr(table, n).copy() for n in table.names()}
    for name, value in values.items():
        columns[name][row] = value
    return type(table)(**columns)


def without(table: AnyTable, row: int) -> AnyTable:
    return table.take(np.arange(len(table)) != row)


def doubled(table: AnyTable, row: int) -> AnyTable:
    return table.take(np.sort(np.append(np.arange(len(table)), row)))


def sample(plan: Plan, backward: bool) -> list[int]:
    """Return the first and last transfer of each group of :func:`sorts`."""
    return sorted({row for rows in sorts(plan.programs[0][backward].transfers) for row in (rows[0], rows[-1])})


def sorts(t: Transfers) -> list[list[int]]:
    """Return the rows of transfers grouped by kind, by dtype (final or partial), and by whether they stay on their
    rank.
    """
    label = (t.kind * 2 + t.partial) * 2 + (t.source == t.target)
    return [np.flatnonzero(label == value).tolist() for value in np.unique(label)]


# --- token-by-token execution -----------------------------------------------------------------------------------------


class WrongError(AssertionError):
    """The execution computed something wrong."""


def demand(condition: Any, message: str) -> None:
    if not condition:
        raise WrongError(message)


def executed(plan: Plan, backward: bool, mask: int = 0) -> None:
    """Run a pass with integers instead of tensors and compare the owners' results with the dense mask; raises
    WrongError.

    Outputs are weighted sums over the pairs: o and dq of a row sum the weights of its keys, dkv of a key those of its
    rows and heads. In slot s the transfers of stage s arrive, the data of stage s + 1 is read for sending, then work
    runs; sending erases nothing.
    """
    program, placement, shape = plan.programs[mask][backward], plan.placement, plan.shape
    stream, ranks, share = placement.stream, plan.ranks, plan.shape.queries_per_key
    weight = np.random.default_rng(7).integers(1, 10**6, stream)
    owner = np.zeros(stream, np.int64)
    for rank, start, stop in zip(placement.runs.rank, placement.runs.start, placement.runs.stop, strict=True):
        owner[start:stop] = rank
    kept = [np.flatnonzero(owner == r) for r in range(ranks)]
    counts = {True: shape.heads, False: shape.kv_heads}
    arrived = {side: np.full((ranks, stream, n), NEVER) for side, n in counts.items()}
    # Results on each rank, separately for tokens it owns and for pieces that arrived (or own ones that were assembled).
    result = {side: np.zeros((2, ranks, stream, n), np.int64) for side, n in counts.items()}
    expected = {side: np.zeros((stream, n), np.int64) for side, n in counts.items()}
    if not placement.assemble_own:
        for side in counts:
            arrived[side][owner, np.arange(stream)] = program.own_stage
    work = list(_work(plan, mask))
    for _, q, k, h0, h1 in work:
        np.add.at(expected[True], (q[:, None], np.arange(h0, h1)), weight[k][:, None])
        for h in range(h0, h1):
            np.add.at(expected[False], (k, h // share), weight[q] * (h + 1))
    rows = program.transfers.matrix().T.tolist()
    carried: list[Any] = []
    done = 0
    for slot in range(program.stages):
        for side, target, tokens, heads, kind, value in carried:
            if kind in OUTPUTS:
                home = int(owner[tokens[0]] != target)
                result[side][home, target][tokens[:, None], heads] += value
            elif kind != Kind.DO:
                place = arrived[side][target]
                demand((place[tokens[:, None], heads] == NEVER).all(), f"rank {target} receives {kind.name} twice")
                place[tokens[:, None], heads] = slot
        carried = []
        for _, source, target, number, of, start, stop, h0, h1, partial in (r for r in rows if r[0] == slot + 1):
            kind, side = Kind(number), number in QUERY_SIDED
            tokens, heads = kept[of][start:stop], np.arange(h0, h1)
            value = None
            if kind in OUTPUTS:
                away = int(source == target or of != source)
                value = result[side][away, source][tokens[:, None], heads].copy()
                final = partial or (value == expected[side][tokens[:, None], heads]).all()
                demand(final, f"rank {source} sends an unfinished {kind.name} as final")
            elif source != of:
                demand(
                    (arrived[side][source][tokens[:, None], heads] <= slot).all(), f"rank {source} has no {kind.name}"
                )
            carried.append((side, target, tokens, heads, kind, value))
        for rank, q, k, h0, h1 in work:
            for h in range(h0, h1):
                now = np.maximum(arrived[True][rank, q, h], arrived[False][rank, k, h // share]) == slot
                done += int(now.sum())
                for side, at, head, amount in ((True, q, h, weight[k]), (False, k, h // share, weight[q] * (h + 1))):
                    if side or backward:
                        away = (owner[at] != rank) | placement.assemble_own
                        np.add.at(result[side], (away.astype(int)[now], rank, at[now], head), amount[now])
    demand(not carried, "something is still on its way after the last slot")
    demand(done == sum(len(q) * (h1 - h0) for _, q, _, h0, h1 in work), "some work never finds its tokens")
    for side in (True, False) if backward else (True,):
        home = result[side][0, owner, np.arange(stream)]
        demand((home == expected[side]).all(), f"{'rows' if side else 'keys'} come home wrong")


def _work(plan: Plan, mask: int) -> Iterator[tuple[int, Ints, Ints, int, int]]:
    """Yield (rank, queries, keys, h0, h1) with the stream's pairs of every region.

    Every allowed pair must be in exactly one region.
    """
    rule, regions = plan.batch.masks[mask], plan.placement.regions[mask]
    times = [np.zeros((plan.shape.heads, n, n), int) for n in plan.batch.lengths]
    dense = [
        (rule.rules[0] if len(rule.rules) == 1 else rule.rules[d]).dense(int(n))
        for d, n in enumerate(plan.batch.lengths)
    ]
    for rank, d, q0, q1, k0, k1, h0, h1 in regions.matrix().T.tolist():
        q, k = np.nonzero(dense[d][q0:q1, k0:k1])
        times[d][h0:h1, q0:q1, k0:k1] += dense[d][q0:q1, k0:k1]
        begin = int(plan.batch.starts[d])
        yield rank, begin + q0 + q, begin + k0 + k, h0, h1
    for found, allowed in zip(times, dense, strict=True):
        demand((found == allowed).all(), "a pair is computed not at all or twice")


# --- valid plans pass the check and the execution ---------------------------------------------------------------------


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("name", MAKERS)
def test_valid_plans_pass_and_compute_the_right_numbers(name: str, backward: bool) -> None:
    check_plan(valid(name))
    executed(valid(name), backward)


def cut_randomly(draw: st.DrawFn, size: int, most: int) -> list[tuple[int, int]]:
    edges = sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=most))})
    return list(pairwise(edges))


@st.composite
def placements(draw: st.DrawFn) -> tuple[Placement, Shape]:
    """Draw any token runs, any grid of regions over rows, keys and query heads (also inside KV groups),
    and any ranks.
    """
    ranks = draw(st.integers(1, 4))
    shape = Shape(*draw(st.sampled_from([(4, 2, 8, 8), (3, 3, 8, 4), (6, 1, 4, 8)])))
    lengths = draw(st.lists(st.integers(1, 14), min_size=1, max_size=3))
    rule = draw(st.sampled_from([causal(), full(), window(3, 1), lambda_(2, 3)]))
    batch, pads = make_batch(lengths, rule), draw(st.integers(0, 3))
    who = st.integers(0, ranks - 1)
    runs = sorted((draw(who), a, b) for a, b in cut_randomly(draw, sum(lengths) + pads, 8))
    regions = [
        (draw(who), d, *q, *k, *h)
        for d, n in enumerate(lengths)
        for q in cut_randomly(draw, n, 3)
        for k in cut_randomly(draw, n, 2)
        for h in cut_randomly(draw, shape.heads, 1)
    ]
    return (
        Placement(
            batch,
            ranks,
            pads,
            Runs(*np.array(runs).T),
            (Regions(*np.array(regions).T),),
            assemble_own=draw(st.booleans()),
        ),
        shape,
    )


@settings(max_examples=60, deadline=None)
@given(placements())
def test_any_placement_becomes_a_plan_that_passes_and_computes_the_right_numbers(
    drawn: tuple[Placement, Shape],
) -> None:
    placement, shape = drawn
    plan = make_plan(placement, shape, cluster("h100", 1, placement.ranks), CostModel(), "random")
    check_plan(plan)
    for backward in (False, True):
        executed(plan, backward)


# --- one broken transfer ----------------------------------------------------------------------------------------------

Break = Callable[[Plan, Transfers, int], Transfers | None]


def earlier(plan: Plan, t: Transfers, row: int) -> Transfers | None:
    """Send a stage too early, when the source has not received or computed the piece yet.

    Left out where it would be valid: an owner may send its own inputs a stage earlier.
    """
    harmless = t.source[row] == t.owner[row] and t.stage[row] > 1
    return None if harmless else edited(t, row, stage=int(t.stage[row]) - 1)


def after_the_end(plan: Plan, t: Transfers, row: int) -> Transfers | None:
    return edited(t, row, stage=int(t.stage.max()) + 1)


def too_late_for_its_output(plan: Plan, t: Transfers, row: int) -> Transfers | None:
    """Rows whose outputs return in the last stage cannot themselves arrive in it."""
    return edited(t, row, stage=int(t.stage.max())) if t.kind[row] in (Kind.Q, Kind.DO) else None


def one_token_short(plan: Plan, t: Transfers, row: int) -> Transfers | None:
    return edited(t, row, stop=int(t.stop[row]) - 1)


def one_token_later(plan: Plan, t: Transfers, row: int) -> Transfers | None:
    return edited(t, row, start=int(t.start[row]) + 1) if t.stop[row] - t.start[row] > 1 else None


def past_the_owners_tokens(plan: Plan, t: Transfers, row: int) -> Transfers | None:
    return edited(t, row, stop=int(plan.placement.tokens[t.owner[row]]) + 1)


def one_head_short(plan: Plan, t: Transfers, row: int) -> Transfers | None:
    return edited(t, row, h1=int(t.h1[row]) - 1)


def other_owner(plan: Plan, t: Transfers, row: int) -> Transfers | None:
    return edited(t, row, owner=(int(t.owner[row]) + 1) % plan.ranks)


def back_to_its_source(plan: Plan, t: Transfers, row: int) -> Transfers | None:
    return edited(t, row, target=int(t.source[row])) if t.source[row] != t.target[row] else None


def from_a_rank_that_has_it_not(plan: Plan, t: Transfers, row: int) -> Transfers | None:
    """Send from the target, which has neither the input nor a result of its own for it."""
    return edited(t, row, source=int(t.target[row])) if t.source[row] != t.target[row] else None


def from_a_third_rank(plan: Plan, t: Transfers, row: int) -> Transfers | None:
    """Send from a third rank; in the first stage only the owner can send an input."""
    third = [r for r in range(plan.ranks) if r not in (t.source[row], t.target[row])]
    return edited(t, row, source=third[0]) if t.stage[row] == 1 else None


def partial_as_final(plan: Plan, t: Transfers, row: int) -> Transfers | None:
    return edited(t, row, partial=0) if t.partial[row] else None


def of_the_other_direction(plan: Plan, t: Transfers, row: int) -> Transfers | None:
    backward = bool(np.isin(t.kind, (Kind.DO, Kind.DQ, Kind.DKV)).any())
    return edited(t, row, kind=Kind.O if backward else Kind.DKV)


def of_the_other_side(plan: Plan, t: Transfers, row: int) -> Transfers | None:
    swap = {Kind.Q: Kind.KV, Kind.KV: Kind.Q, Kind.O: Kind.Q, Kind.DO: Kind.KV, Kind.DQ: Kind.DKV, Kind.DKV: Kind.DQ}
    return edited(t, row, kind=swap[Kind(int(t.kind[row]))])


def again_in_the_next_stage(plan: Plan, t: Transfers, row: int) -> Transfers | None:
    """Send again an input that the target already has, or an output that has already been sent."""
    if t.partial[row] or t.stage[row] == t.stage.max():
        return None
    return Transfers.join([t, edited(t, row, stage=int(t.stage[row]) + 1).take([row])])


BREAKS: dict[str, Break] = {
    "dropped": lambda plan, t, row: without(t, row),
    "one stage earlier": earlier,
    "after the last stage": after_the_end,
    "too late for its output": too_late_for_its_output,
    "one token short": one_token_short,
    "one token later": one_token_later,
    "past the owner's tokens": past_the_owners_tokens,
    "one head short": one_head_short,
    "other owner": other_owner,
    "back to its source": back_to_its_source,
    "from its target": from_a_rank_that_has_it_not,
    "from a third rank": from_a_third_rank,
    "partial as final": partial_as_final,
    "kind of the other direction": of_the_other_direction,
    "kind of the other side": of_the_other_side,
    "again in the next stage": again_in_the_next_stage,
}


def survivors(
    change: Break, backward: bool, chosen: Callable[[Transfers, int], bool] = lambda t, row: True
) -> list[str]:
    """Return the broken plans that the check accepts."""
    found, tried = [], 0
    for name in MAKERS:
        plan = valid(name)
        table = plan.programs[0][backward].transfers
        for row in sample(plan, backward):
            broken = change(plan, table, row) if chosen(table, row) else None
            if broken is None:
                continue
            tried += 1
            try:
                check_plan(with_transfers(plan, backward, broken))
            except PlanError:
                continue
            found.append(f"{name}: {dict(zip(table.names(), table.matrix()[:, row].tolist(), strict=True))}")
    assert tried > 0, "this way of breaking applied to nothing"
    return found


def own_output(t: Transfers, row: int) -> bool:
    """Return whether a transfer moves the result of assembled own tokens to where the rank keeps these tokens."""
    return bool(t.is_output[row] and t.source[row] == t.target[row])


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("change", BREAKS)
def test_a_broken_transfer_is_caught(change: str, backward: bool) -> None:
    assert survivors(BREAKS[change], backward, lambda t, row: not own_output(t, row)) == []


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("change", ["dropped", "one token short", "one token later", "one head short"])
def test_a_broken_return_of_assembled_own_tokens_is_caught(change: str, backward: bool) -> None:
    assert survivors(BREAKS[change], backward, own_output) == []


def double(plan: Plan, t: Transfers, row: int) -> Transfers:
    return doubled(t, row)


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_a_final_output_sent_twice_is_caught(backward: bool) -> None:
    assert survivors(double, backward, lambda t, row: bool(t.is_output[row] and not t.partial[row])) == []


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_an_input_sent_twice_in_one_stage_is_caught(backward: bool) -> None:
    assert survivors(double, backward, lambda t, row: int(t.kind[row]) in (Kind.Q, Kind.KV)) == []


def test_do_sent_twice_is_caught() -> None:
    assert survivors(double, True, lambda t, row: t.kind[row] == Kind.DO) == []


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_a_partial_output_sent_twice_is_caught(backward: bool) -> None:
    assert survivors(double, backward, lambda t, row: bool(t.partial[row])) == []


@pytest.mark.parametrize(
    "cells",
    [
        {"source": -1},
        {"source": 99},
        {"target": -1},
        {"target": 99},
        {"owner": 99},
        {"start": -1},
        {"stop": 10**6},
        {"h0": -1},
        {"h1": 9},
        {"partial": 2},
    ],
    ids=str,
)
def test_a_cell_outside_every_range_is_caught(cells: dict[str, int]) -> None:
    for backward in (False, True):
        for name in ("ring", "usp", "blocks, assembled", "keys split"):
            plan = valid(name)
            table = plan.programs[0][backward].transfers
            for row in sample(plan, backward):
                with pytest.raises(PlanError):
                    check_plan(with_transfers(plan, backward, edited(table, row, **cells)))


def test_swapped_hops_of_a_ring_are_caught() -> None:
    plan = valid("ring")
    for backward in (False, True):
        table = plan.programs[0][backward].transfers
        for kind in (Kind.KV, Kind.DKV) if backward else (Kind.KV,):
            first, second = np.flatnonzero((table.kind == kind) & (table.owner == 0))[:2].tolist()
            stages = int(table.stage[first]), int(table.stage[second])
            broken = edited(edited(table, first, stage=stages[1]), second, stage=stages[0])
            with pytest.raises(PlanError):
                check_plan(with_transfers(plan, backward, broken))


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_a_piece_nobody_reads_is_caught_where_only_needed_ones_may_move(backward: bool) -> None:
    planner = Planner(8, 2, 16, cluster=cluster("h100", 1, 3), strategy="blocks", compute_tolerance=1.0)
    plan = planner([90], causal(), layout="contiguous")
    table = plan.programs[0][backward].transfers
    tokens = int(plan.placement.tokens[2])
    useless = Transfers.make(
        1, stage=1, source=2, target=0, kind=Kind.KV, owner=2, start=0, stop=tokens, h0=0, h1=2, partial=0
    )
    check_plan(plan)
    with pytest.raises(PlanError, match="received and never used"):
        check_plan(with_transfers(plan, backward, Transfers.join([table, useless])))


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("name", ["ring", "usp", "ulysses:2", "allgather", "blocks, assembled", "keys split"])
def test_too_few_stages_are_caught(name: str, backward: bool) -> None:
    plan = valid(name)
    with pytest.raises(PlanError, match="stage that does not exist"):
        check_plan(with_program(plan, backward, stages=plan.programs[0][backward].stages - 1))


@pytest.mark.parametrize("name", ["ring", "usp", "ulysses:2", "blocks", "keys split"])
def test_own_tokens_that_come_too_late_are_caught(name: str) -> None:
    plan = valid(name)
    with pytest.raises(PlanError, match="before it is computed"):
        check_plan(with_program(plan, True, own_stage=plan.programs[0][1].stages - 1))


def test_programs_in_the_wrong_order_are_caught() -> None:
    plan = valid("usp")
    forward, backward = plan.programs[0]
    with pytest.raises(PlanError, match="forward: a kind of piece that does not belong"):
        check_plan(replace(plan, programs=((backward, forward),)))


@pytest.mark.parametrize("broken", ["own stage beyond the last", "no stage at all", "no programs", "too many programs"])
def test_a_plan_without_room_for_its_work_is_caught(broken: str) -> None:
    plan = planned("dp")
    changed = {
        "own stage beyond the last": with_program(plan, False, own_stage=5),
        "no stage at all": with_program(plan, False, stages=0),
        "no programs": replace(plan, programs=()),
        "too many programs": replace(plan, programs=plan.programs * 2),
    }[broken]
    with pytest.raises(PlanError):
        check_plan(changed)


def test_an_output_that_no_rank_could_find_is_caught() -> None:
    plan = valid("ulysses:2")
    table = plan.programs[0][0].transfers
    row = int(np.flatnonzero(table.kind == Kind.O)[0])
    middle = int(table.start[row] + table.stop[row]) // 2
    halves = Transfers.join([edited(table, row, stop=middle), edited(table, row, start=middle).take([row])])
    with pytest.raises(PlanError):
        check_plan(with_transfers(plan, False, halves))


def test_a_relay_of_half_a_piece_is_caught() -> None:
    plan = valid("ring")
    table = plan.programs[0][0].transfers
    row = int(np.flatnonzero((table.source != table.owner) & (table.stage == table.stage.max()))[0])
    middle = int(table.start[row] + table.stop[row]) // 2
    halves = Transfers.join([edited(table, row, stop=middle), edited(table, row, start=middle).take([row])])
    with pytest.raises(PlanError):
        check_plan(with_transfers(plan, False, halves))


def test_the_message_names_mask_and_direction() -> None:
    masks: dict[str, tuple[MaskLike, int]] = {"full": (full(), 2), "window": (window(20, 0), 5)}
    plan = planned("blocks", masks=masks, layout="contiguous", tolerance=0.0)
    check_plan(plan)
    for number, name in enumerate(masks):
        for backward, direction in enumerate(("forward", "backward")):
            table = plan.programs[number][backward].transfers
            with pytest.raises(PlanError, match=f"mask '{name}', {direction}: "):
                check_plan(with_transfers(plan, bool(backward), without(table, 0), number))


# --- broken work ------------------------------------------------------------------------------------------------------


def regions_broken(plan: Plan, row: int) -> dict[str, Regions]:
    regions = plan.placement.regions[0]
    cells = dict(zip(regions.names(), regions.matrix()[:, row].tolist(), strict=True))
    length = int(plan.batch.lengths[cells["document"]])
    found = {
        "dropped": without(regions, row),
        "doubled": doubled(regions, row),
        "a row short": edited(regions, row, q1=cells["q1"] - 1),
        "a key short": edited(regions, row, k1=cells["k1"] - 1),
        "a head short": edited(regions, row, h1=cells["h1"] - 1),
        "begins a row late": edited(regions, row, q0=cells["q0"] + 1),
        "begins a key late": edited(regions, row, k0=cells["k0"] + 1),
        "begins a head late": edited(regions, row, h0=cells["h0"] + 1),
        "on another rank": edited(regions, row, rank=(cells["rank"] + 1) % plan.ranks),
        "on no rank": edited(regions, row, rank=plan.ranks),
        "on a negative rank": edited(regions, row, rank=-1),
        "with heads that do not exist": edited(regions, row, h1=plan.shape.heads + 1),
        "with negative heads": edited(regions, row, h0=-1),
    }
    if plan.batch.documents > 1:
        other = (cells["document"] + 1) % plan.batch.documents
        found["of another document"] = edited(regions, row, document=other)
    if cells["q0"] > 0:
        found["takes its neighbour's row"] = edited(regions, row, q0=cells["q0"] - 1)
    if cells["q1"] < length:
        found["takes the next row"] = edited(regions, row, q1=cells["q1"] + 1)
    if cells["h0"] > 0:
        found["takes its neighbour's head"] = edited(regions, row, h0=cells["h0"] - 1)
    return found


def computes_right(plan: Plan) -> bool:
    """Return whether the plan still computes the right numbers, since another rank may happen to have all the data it
    needs.
    """
    try:
        executed(plan, False)
        executed(plan, True)
    except WrongError:
        return False
    return True


@pytest.mark.parametrize("name", MAKERS)
def test_broken_work_is_caught(name: str) -> None:
    plan = valid(name)
    accepted = []
    for row in range(0, len(plan.placement.regions[0]), 2):
        for how, regions in regions_broken(plan, row).items():
            try:
                check_plan(with_placement(plan, regions=(regions,)))
            except PlanError:
                continue
            if how != "on another rank" or not computes_right(with_placement(plan, regions=(regions,))):
                accepted.append(f"{how}: region {row}")
    assert accepted == []


def test_work_where_the_mask_is_empty_may_be_missing_or_double() -> None:
    plan = Planner(4, 2, 16, cluster=cluster("h100", 1, 1), strategy="dp")([40], causal())
    above = Regions(*np.array([(0, 0, 0, 20, 0, 20, 0, 4), (0, 0, 20, 40, 0, 40, 0, 4), (0, 0, 0, 20, 20, 40, 0, 4)]).T)
    for regions in (above, above.take([0, 1]), doubled(above, 2)):
        check_plan(with_placement(plan, regions=(regions,)))
    with pytest.raises(PlanError, match=r"rows 0\.\.20, keys 0\.\.20 are computed \[0\] times"):
        check_plan(with_placement(plan, regions=(above.take([1, 2]),)))


@pytest.mark.parametrize("cells", [1, 100])
def test_broken_work_is_caught_in_any_band_of_rows(cells: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is so low that the cells of a document are counted in several bands of rows."""
    monkeypatch.setattr("flexcp.plan.check.MOST_CELLS", cells)
    check_plan(valid("usp"))
    test_broken_work_is_caught("usp")


def test_a_document_in_thousands_of_parts_is_checked_range_by_range(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cells where the mask allows nothing, half of all here, are looked up a row at a time, not one by one."""
    plan = Planner(1, 1, 8, cluster=cluster("h100", 1, 4), strategy="minheap:4")([2000], causal())
    assert len(plan.placement.regions[0]) > 100
    asked: list[int] = []

    def counted(slices: NDArray[np.int64], *ranges: Any) -> NDArray[np.int64]:
        asked.append(len(slices))
        return slices_cut(slices, *ranges)

    monkeypatch.setattr("flexcp.masks.cut", counted)
    check_plan(plan)
    assert len(asked) < 10
    assert max(asked) <= 2 * len(plan.placement.regions[0])


# --- broken ownership -------------------------------------------------------------------------------------------------


def runs_broken(plan: Plan, row: int) -> dict[str, Runs]:
    runs = plan.placement.runs
    rank, start, stop = (int(c[row]) for c in (runs.rank, runs.start, runs.stop))
    return {
        "dropped": without(runs, row),
        "doubled": doubled(runs, row),
        "a token short": edited(runs, row, stop=stop - 1),
        "begins a token late": edited(runs, row, start=start + 1),
        "a token long": edited(runs, row, stop=stop + 1),
        "begins a token early": edited(runs, row, start=start - 1),
        "on no rank": edited(runs, row, rank=plan.ranks),
        "on a negative rank": edited(runs, row, rank=-1),
        "on another rank": edited(runs, row, rank=(rank + 1) % plan.ranks).sorted_by("rank"),
        "empty one added": Runs.join([runs, Runs.make(1, rank=plan.ranks - 1, start=5, stop=5)]),
    }


@pytest.mark.parametrize("name", MAKERS)
def test_broken_ownership_is_caught(name: str) -> None:
    plan = valid(name)
    documents = np.flatnonzero(plan.placement.runs.start < plan.batch.tokens)  # pads may move: nobody reads them
    accepted = []
    for row in documents[:: max(1, len(documents) // 6)].tolist():
        for how, runs in runs_broken(plan, row).items():
            try:
                check_plan(with_placement(plan, runs=runs))
            except PlanError:
                continue
            accepted.append(f"{how}: run {row}")
    assert accepted == []


def test_runs_must_be_listed_rank_by_rank() -> None:
    plan = valid("ring")
    runs = plan.placement.runs
    with pytest.raises(PlanError, match="rank by rank"):
        check_plan(with_placement(plan, runs=runs.take(np.arange(len(runs))[::-1])))


def test_a_wrong_count_of_pads_is_caught() -> None:
    plan = valid("blocks, equal tokens")
    assert plan.placement.pads > 0
    with pytest.raises(PlanError, match="the stream at"):
        check_plan(with_placement(plan, pads=plan.placement.pads - 1))


# --- unusual but right ------------------------------------------------------------------------------------------------


def row_of(table: Transfers, **cells: int) -> int:
    found = np.flatnonzero(np.all([getattr(table, n) == v for n, v in cells.items()], axis=0))
    assert len(found) == 1
    return int(found[0])


def test_a_relay_is_accepted_one_stage_after_arrival_and_not_before() -> None:
    plan = valid("allgather")
    table = plan.programs[0][0].transfers
    row = row_of(table, owner=0, target=3)
    for stage, right in ((1, False), (2, True), (3, True)):
        relayed = edited(table, row, source=1, stage=stage)
        changed = with_program(plan, False, transfers=relayed, stages=5, execution=one_call_ahead(5))
        if right:
            check_plan(changed)
            executed(changed, False)
        else:
            with pytest.raises(PlanError, match="rank 1 forwards in stage 1 what it has not received"):
                check_plan(changed)


def test_a_reduction_on_the_way_is_accepted_one_stage_after_arrival_and_not_before() -> None:
    plan = valid("allgather")
    table = plan.programs[0][1].transfers
    far, near = (row_of(table, kind=Kind.DKV, owner=0, source=r) for r in (3, 1))
    through = edited(table, far, target=1)
    for stage, right in ((3, False), (4, True), (5, True)):
        changed = with_program(
            plan, True, transfers=edited(through, near, stage=stage), stages=7, execution=one_call_ahead(7)
        )
        if right:
            check_plan(changed)
            executed(changed, True)
        else:
            with pytest.raises(PlanError, match="DKV does not come home whole and once"):
                check_plan(changed)


# --- any cell of any table --------------------------------------------------------------------------------------------


def overwrite(plan: Plan, backward: bool, data: st.DataObject) -> Plan:
    """Return the plan with one or two cells of its transfers set to other values in range."""
    program = plan.programs[0][backward]
    table = program.transfers
    for _ in range(data.draw(st.integers(1, 2), "cells")):
        row = data.draw(st.sampled_from(data.draw(st.sampled_from(sorts(table)), "rows")), "row")
        name = data.draw(st.sampled_from(table.names()), "column")
        heads = plan.shape.heads if int(table.kind[row]) in QUERY_SIDED else plan.shape.kv_heads
        tokens = int(plan.placement.tokens[table.owner[row]])
        most = {
            "stage": program.stages,
            "kind": 5,
            "start": tokens,
            "stop": tokens,
            "h0": heads,
            "h1": heads,
            "partial": 1,
        }
        table = edited(table, row, **{name: data.draw(st.integers(0, most.get(name, plan.ranks - 1)), "value")})
    return with_transfers(plan, backward, table)


@pytest.mark.parametrize("name", list(MAKERS))
@settings(max_examples=25, deadline=None, derandomize=True)
@given(data=st.data(), backward=st.booleans())
def test_what_the_check_accepts_computes_the_right_numbers(name: str, data: st.DataObject, backward: bool) -> None:
    plan = overwrite(valid(name), backward, data)
    try:
        check_plan(plan)
    except PlanError:
        return
    executed(plan, backward)

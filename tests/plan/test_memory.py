"""Proves what a plan says about memory: examples counted by hand, and arena layouts in which no two buffers that are in
use at the same time share a byte.

When a buffer is in use is derived here from a rank's program (what each slot packs, unpacks and computes with), not by
the rule that laid out the arena. tests/executor/exchange/test_arena.py tests that a real pass allocates and uses
exactly these bytes.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import flexcp
from flexcp.executor.run.rank_program import RankProgram, rank_program
from flexcp.plan.check import PlanError
from flexcp.plan.memory import KEYS, QUERIES, aligned, arena_layout, field_sizes, first_fit
from flexcp.plan.plan import Plan
from flexcp.plan.program import Transfers
from flexcp.schedule.predict import predict
from flexcp.shape import FIELDS, OUTPUTS, Kind, Shape

Life = tuple[int, int, int, int]
"""First byte, end, first and last half slot in which a buffer is used."""


def planned(
    strategy: str, nodes: int, ranks: int, lengths: list[int], mask: flexcp.Mask, layout: str = "free", **more: object
) -> Plan:
    where = flexcp.cluster("h100", nodes, ranks)
    options = {"heads": 8, "kv_heads": 4, "head_dim": 16, "v_head_dim": 8, **more}
    planner = flexcp.Planner(cluster=where, strategy=strategy, **options)  # type: ignore[arg-type]
    total = sum(lengths)
    order = np.random.default_rng(total).permutation(total)
    maps = [part.tolist() for part in np.array_split(order, nodes * ranks)] if layout == "scattered" else layout
    return planner(lengths, mask, layout=maps)


# --- lifetimes of buffers, from a program -----------------------------------------------------------------------------


def lives(program: RankProgram, shape: Shape, backward: bool) -> dict[tuple[str | int, ...], Life]:
    """Return every buffer in the arena of a pass: where it lies, and when it is first and last used."""
    used: dict[tuple[str | int, ...], list[int]] = {}
    sizes: dict[tuple[str | int, ...], int] = {}
    each = shape.bytes_per_token_head()

    def use(number: int, results: bool, half: int) -> None:
        shelf = program.shelves[number]
        if number <= KEYS or (number in program.kept and not results):
            return
        amount = shelf.rows * (shelf.h1 - shelf.h0)
        key = ("results" if results else "inputs", *shelf.key)
        sizes[key] = sum(aligned(size) for size in field_sizes(shelf.side, backward, results, amount, shape))
        used.setdefault(key, []).append(half)

    def message(what: str, stage: int, blocks_of: list[tuple[object, ...]], halves: list[int]) -> None:
        if blocks_of:
            sizes[what, stage] = sum(aligned(size) for (size,) in blocks_of)  # type: ignore[arg-type]
            used[what, stage] = halves

    for slot, stage in enumerate(program.slots):
        for number in range(2, len(program.shelves)):
            if program.shelves[number].stage == slot:  # cleared when its slot begins
                use(number, False, 2 * slot)
                if program.shelves[number].side == QUERIES or backward:
                    use(number, True, 2 * slot)
        for work in stage.work:
            for number in (work.q_shelf, work.kv_shelf):
                use(number, False, 2 * slot + 1)
                if program.shelves[number].side == QUERIES or backward:
                    use(number, True, 2 * slot + 1)
        for block in (b for m in stage.receive for b in m.blocks):
            use(block.shelf, block.kind in OUTPUTS, 2 * slot)
        for block in (b for pair in stage.own for b in pair):
            use(block.shelf, block.kind in OUTPUTS, 2 * slot)
        for block in (b for m in stage.send for b in m.blocks):
            use(block.shelf, block.kind in OUTPUTS, 2 * slot - 1)
        counted = [
            [(sum(int(each[b.kind, int(b.partial)]) * b.count * (b.h1 - b.h0) for b in m.blocks),) for m in messages]
            for messages in (stage.receive, stage.send)
        ]
        posted = next((s for s, posts in enumerate(program.posts) if slot in posts[0] + posts[1]), slot)
        first = 2 * min(posted, slot - 1) + 1
        message("receives", slot, counted[0], [first, 2 * slot])
        # A stage's messages have been sent by the time the next stage is waited for.
        message("sends", slot, counted[1], [first, 2 * slot + 1])
    offsets = program.layout.offsets
    assert set(offsets) == {key for key, size in sizes.items() if size}
    return {
        key: (offsets[key], offsets[key] + sizes[key], min(halves), max(halves))
        for key, halves in used.items()
        if sizes[key]
    }


def check_layout(plan: Plan, rank: int, mask: int, backward: bool) -> None:
    program = rank_program(plan, rank, mask, backward)
    found = lives(program, plan.shape, backward)
    for (one, a), (two, b) in itertools.combinations(found.items(), 2):
        apart = a[1] <= b[0] or b[1] <= a[0] or a[3] < b[2] or b[3] < a[2]
        assert apart, f"rank {rank}: {one} {a} and {two} {b} share bytes while both are alive"
    assert all(first % 128 == 0 for first, *_ in found.values())
    assert program.layout.size == max((stop for _, stop, _, _ in found.values()), default=0)
    halves = range(2 * len(program.slots) + 2)
    needed = max(sum(b - a for a, b, first, last in found.values() if first <= t <= last) for t in halves)
    # First fit is not always optimal, but it must not waste much memory over what is in use at once.
    assert needed <= program.layout.size <= 1.6 * needed


CASES = st.tuples(
    st.sampled_from(["ring", "zigzag", "allgather", "ulysses", "usp", "blocks", "groups", "minheap"]),
    st.sampled_from([(1, 2), (1, 4), (2, 2), (2, 4)]),
    st.lists(st.integers(1, 400), min_size=1, max_size=6),
    st.sampled_from([flexcp.causal(), flexcp.full(), flexcp.window(40, 9), flexcp.masks.causal_blockwise(32, 1)]),
    st.sampled_from(["bfloat16", "float32", "float64"]),
    st.sampled_from(["free", "zigzag", "scattered"]),
)


@settings(max_examples=25, deadline=None)
@given(CASES)
def test_nothing_alive_shares_a_byte(case: tuple[str, tuple[int, int], list[int], flexcp.Mask, str, str]) -> None:
    strategy, where, lengths, mask, dtype, layout = case
    if strategy in ("groups", "minheap") or (layout == "scattered" and strategy != "blocks"):
        layout = "free"
    plan = planned(strategy, *where, lengths, mask, layout, dtype=dtype)
    for rank in range(plan.ranks):
        for backward in (False, True):
            check_layout(plan, rank, 0, backward)
        memory = plan.memory(rank)
        assert memory.forward == rank_program(plan, rank, 0, False).layout.size
        assert memory.backward == rank_program(plan, rank, 0, True).layout.size


def test_relays_and_several_stages_share_no_byte() -> None:
    plan = planned("groups:team=1", 2, 4, [16_000, 900], flexcp.causal(), heads=32, kv_heads=8, head_dim=128)
    stages = [program.stages for program in plan.programs[0]]
    relayed = [(t.source != t.owner) & (t.kind == 1) for t in (p.transfers for p in plan.programs[0])]
    assert min(stages) >= 3, "the example must be staged"
    assert all(r.any() for r in relayed), "the example must relay"
    for rank in range(plan.ranks):
        for backward in (False, True):
            check_layout(plan, rank, 0, backward)


# --- by hand ----------------------------------------------------------------------------------------------------------


def test_a_ring_of_two_by_hand() -> None:
    """Memory of a ring of two ranks with 64 tokens each.

    With 4 KV heads of 16 + 8 numbers in bfloat16, keys are 64 * 4 * 24 * 2 = 12,288 bytes and gradients twice that.
    """
    plan = planned("ring", 1, 2, [128], flexcp.full())
    keys, grads = 12_288, 24_576
    found = plan.memory(1)
    # Forward, slot 1: the received message, its unpacked keys, and the sent message, which may not have left yet.
    assert found.forward == 3 * keys
    # Backward, slot 2: gradients in their accumulator, in the message sent, and in the message received.
    assert found.backward == 3 * grads
    assert found.saved == 64 * ((8 + 4) * 24 * 2 + 8 * 8)
    assert found.results == 64 * ((8 * 16 + 4 * 24) * 4 + 8 * 8)
    assert found.scratch == 8 * 64 * 8 + 4096
    assert found.kept_keys == 0
    assert found.arena == found.backward
    assert found.gradients == 64 * (8 * 8 * 2 + 8 * 16 * 2)
    assert found.tables == 16 * 64 + 48 * (64 + 64)  # own rows, and the other rank's keys forward and backward
    assert found.total == found.arena + found.saved + found.in_a_pass


def test_a_rank_that_needs_nobody_needs_no_arena() -> None:
    found = planned("dp", 1, 2, [50, 50], flexcp.causal()).memory(0)
    assert (found.forward, found.backward) == (0, 0)


def test_layers_share_an_arena_and_keep_their_own() -> None:
    where = flexcp.cluster("h100", 1, 2)
    planner = flexcp.Planner(8, 4, 16, 8, cluster=where, strategy="ring")
    masks = {"full": (flexcp.full(), 3), "window": (flexcp.window(9), 5)}
    both, one = planner([128], masks=masks).memory(0), planner([128], flexcp.full()).memory(0)
    assert (both.arena, both.saved, both.layers) == (one.arena, one.saved, 8)
    assert both.total - one.total == 7 * one.saved + both.tables - one.tables


def test_tokens_out_of_stream_order_are_copied() -> None:
    planner = flexcp.Planner(8, 4, 16, 8, cluster=flexcp.cluster("h100", 1, 2), strategy="blocks")
    straight = planner([64], layout=[list(range(32)), list(range(32, 64))]).memory(0)
    turned = planner([64], layout=[list(range(31, -1, -1)), list(range(32, 64))]).memory(0)
    assert turned.results - straight.results == 32 * ((8 + 4) * 24 * 2 + 2 * 8 * 8)


@pytest.mark.parametrize("rank", [2, -1, True, 0.5, "0", None])
def test_a_rank_that_does_not_exist_is_named(rank: Any) -> None:
    with pytest.raises(ValueError, match=rf"rank {rank!r} does not exist: the plan has ranks 0\.\.1"):
        planned("ring", 1, 2, [10], flexcp.full()).memory(rank)


# --- a cap on memory --------------------------------------------------------------------------------------------------

LENGTHS = [2000, 700, 300, 90, 31]
WHERE = flexcp.cluster("h100", 1, 4)


def most(plan: Plan) -> int:
    return max(plan.memory(rank).total for rank in range(plan.ranks))


@pytest.mark.parametrize("strategy", ["ring", "allgather", "blocks", "groups", "minheap"])
def test_a_cap_is_honoured_or_refused(strategy: str) -> None:
    options = {"cluster": WHERE, "strategy": strategy}
    # Under any cap, messages do not wait in memory, so a plan under a generous cap may differ from one without a cap.
    roomy = flexcp.Planner(8, 4, 64, **options, max_memory_per_rank=1 << 50)(LENGTHS)  # type: ignore[arg-type]
    total = most(roomy)
    allowed = flexcp.Planner(8, 4, 64, **options, max_memory_per_rank=total)(LENGTHS)  # type: ignore[arg-type]
    assert allowed == roomy
    words = rf"needs {total} bytes on rank \d .*max_memory_per_rank={total - 1}; raise the cap, use more ranks"
    with pytest.raises(ValueError, match=words):
        flexcp.Planner(8, 4, 64, **options, max_memory_per_rank=total - 1)(LENGTHS)  # type: ignore[arg-type]


def test_auto_goes_round_candidates_over_the_cap() -> None:
    free = flexcp.Planner(8, 2, 64, cluster=WHERE)([8000])
    needs = {}
    for strategy in ("allgather", "ring", "zigzag", "ulysses", "usp", "blocks", "groups"):
        needs[strategy] = most(flexcp.Planner(8, 2, 64, cluster=WHERE, strategy=strategy)([8000]))
    least = min(needs.values())
    assert least < most(free), "the example must have a leaner plan than the fastest"
    capped = flexcp.Planner(8, 2, 64, cluster=WHERE, max_memory_per_rank=least)([8000])
    assert most(capped) <= least
    with pytest.raises(ValueError, match=r"no strategy can place this batch: .*max_memory_per_rank=1000"):
        flexcp.Planner(8, 2, 64, cluster=WHERE, max_memory_per_rank=1000)([8000])


def test_layers_count_in_the_cap() -> None:
    masks = {"full": (flexcp.causal(), 10)}
    planner = flexcp.Planner(8, 4, 64, cluster=WHERE, strategy="blocks")
    one, ten = most(planner(LENGTHS)), most(planner(LENGTHS, masks=masks))
    capped = flexcp.Planner(8, 4, 64, cluster=WHERE, strategy="blocks", max_memory_per_rank=(one + ten) // 2)
    capped(LENGTHS)
    with pytest.raises(ValueError, match="10 layers x"):
        capped(LENGTHS, masks=masks)


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "80GB"])
def test_a_cap_is_a_count_of_bytes(value: object) -> None:
    with pytest.raises(ValueError, match="max_memory_per_rank is bytes of attention, an integer of at least 1; got"):
        flexcp.Planner(8, max_memory_per_rank=value)  # type: ignore[arg-type]


# --- keys kept for the backward pass ----------------------------------------------------------------------------------

NEEDED = st.tuples(
    st.sampled_from(["blocks", "groups", "minheap"]),
    st.sampled_from([(1, 2), (1, 4), (2, 2), (2, 4)]),
    st.lists(st.integers(1, 600), min_size=1, max_size=5),
    st.sampled_from([flexcp.causal(), flexcp.full(), flexcp.window(90, 9)]),
    st.sampled_from(["free", "contiguous", "zigzag"]),
)


@settings(max_examples=20, deadline=None)
@given(NEEDED)
def test_a_backward_without_keys_keeps_every_invariant(
    case: tuple[str, tuple[int, int], list[int], flexcp.Mask, str],
) -> None:
    strategy, where, lengths, mask, layout = case
    given_layout = layout if strategy == "blocks" else "free"
    again, kept = (planned(strategy, *where, lengths, mask, given_layout, keep_kv=n) for n in (0, 1 << 40))
    kept.check()
    keys = again.programs[0][0].transfers
    travels = bool((keys.kind == Kind.KV).any())
    assert kept.programs[0][1].keys_kept == travels and not kept.programs[0][0].keys_kept
    assert (kept == again) != travels
    assert kept.bytes().tolist() == again.bytes().tolist()
    less = keys.take(keys.kind == Kind.KV)
    assert int((again.bytes(True) - kept.bytes(True)).sum()) == int(less.bytes(kept.shape).sum())
    found = predict(kept.placement, kept.shape, kept.cluster, kept.cost, 1 << 40)
    for backward in (False, True):
        assert found.sent[0, int(backward)].sum(axis=0).tolist() == kept.bytes(backward).sum(axis=1).tolist()
    for rank in range(kept.ranks):
        check_layout(kept, rank, 0, False)
        check_layout(kept, rank, 0, True)


def test_kept_keys_are_worked_on_from_the_start_and_own_work_ends_it() -> None:
    plan = planned("blocks", 1, 4, [30_000], flexcp.causal(), heads=32, kv_heads=8, head_dim=128, keep_kv=1 << 40)
    assert any(plan.programs[0][1].held), "the example must hold work"
    seen = 0
    for rank in range(plan.ranks):
        program = rank_program(plan, rank, 0, True)
        received = dict(enumerate(program.shelves[2:], start=2))
        if not received or any(shelf.side == QUERIES for shelf in received.values()):
            continue
        assert [shelf.stage for shelf in received.values()] == list(range(len(received)))
        work = [(slot, w) for slot, s in enumerate(program.slots) for w in s.work]
        others = [slot for slot, w in work if w.kv_shelf in received]
        own = [slot for slot, w in work if w.kv_shelf == KEYS]
        assert min(others) == 0
        assert max(own) == max(others) + 1
        seen += 1
    assert seen


def test_relayed_keys_may_be_kept() -> None:
    plan = planned(
        "groups:team=1", 2, 4, [16_000, 900], flexcp.causal(), heads=32, kv_heads=8, head_dim=128, keep_kv=1 << 40
    )
    t = plan.programs[0][0].transfers
    assert plan.programs[0][1].keys_kept and ((t.source != t.owner) & (t.kind == Kind.KV)).any()
    plan.check()
    for rank in range(plan.ranks):
        check_layout(plan, rank, 0, True)


def test_a_backward_without_keys_is_refused_when_keys_travel_or_gradients_leave_early() -> None:
    plan = planned("blocks", 1, 4, [900, 50], flexcp.causal(), keep_kv=1 << 40)
    forward, backward = plan.programs[0]
    keys = forward.transfers.take(forward.transfers.kind == Kind.KV)
    both = replace(backward, transfers=Transfers.join([keys, backward.transfers]), stages=backward.stages)
    t = backward.transfers
    soon = replace(backward, transfers=replace(t, stage=np.where(t.kind == Kind.DKV, 1, t.stage)).sorted_by("stage"))
    for program, words in ((both, "keys travel that every rank has kept"), (soon, "before it is computed")):
        with pytest.raises(PlanError, match=words):
            replace(plan, programs=((forward, program),)).check()
    with pytest.raises(PlanError, match="a forward has no keys that were kept"):
        replace(plan, programs=((replace(forward, keys_kept=True), backward),)).check()


def test_the_budget_is_of_a_rank_and_all_its_layers() -> None:
    masks = {"full": (flexcp.causal(), 10), "window": (flexcp.window(300), 20)}

    def kept(budget: int) -> tuple[list[bool], int]:
        planner = flexcp.Planner(8, 4, 64, cluster=WHERE, strategy="blocks", keep_kv=budget)
        plan = planner([6000, 700], masks=masks)
        return [b.keys_kept for _, b in plan.programs], max(plan.memory(r).kept_keys for r in range(4))

    both, most_bytes = kept(1 << 40)
    assert both == [True, True]
    first = kept(most_bytes - 1)
    assert first[0] in ([True, False], [False, True]) and first[1] <= most_bytes - 1
    assert kept(0) == ([False, False], 0)
    for budget in np.linspace(0, 2 * most_bytes, 9).astype(int).tolist():
        assert kept(budget)[1] <= budget


@pytest.mark.parametrize("strategy", ["ring", "allgather", "usp"])
def test_static_methods_fetch_again(strategy: str) -> None:
    again, asked = (planned(strategy, 1, 4, [900], flexcp.full(), keep_kv=n) for n in (0, 1 << 40))
    assert again == asked


def test_scattered_tokens_are_fetched_again() -> None:
    plan = planned("blocks", 1, 4, [900], flexcp.full(), "scattered", keep_kv=1 << 40)
    assert plan.placement.assemble_own and not plan.programs[0][1].keys_kept


def test_a_cap_says_that_kept_keys_count() -> None:
    plan = planned("blocks", 1, 4, [900], flexcp.full(), keep_kv=1 << 40)
    with pytest.raises(ValueError, match=r"of kept keys .*lower keep_kv"):
        planned("blocks", 1, 4, [900], flexcp.full(), keep_kv=1 << 40, max_memory_per_rank=most(plan) - 1)


@pytest.mark.parametrize("value", [-1, 0.5, True, "all"])
def test_keep_kv_is_a_count_of_bytes(value: object) -> None:
    with pytest.raises(
        ValueError, match="keep_kv is bytes a rank may keep received keys in, an integer of at least 0; got"
    ):
        flexcp.Planner(8, keep_kv=value)  # type: ignore[arg-type]


# --- gradients and statistics -----------------------------------------------------------------------------------------


def test_received_keys_have_one_accumulator_however_many_pairs_read_them() -> None:
    plan = planned("blocks", 1, 4, [3000], flexcp.causal())
    t = plan.programs[0][1].transfers
    for rank in range(plan.ranks):
        program = rank_program(plan, rank, 0, True)
        shelves = [shelf for shelf in program.shelves[2:] if shelf.side == KEYS]
        mine = t.take((t.kind == Kind.KV) & (t.target == rank))
        received = int(((mine.stop - mine.start) * (mine.h1 - mine.h0)).sum())
        assert sum(shelf.rows * (shelf.h1 - shelf.h0) for shelf in shelves) == received
    readers = [w.kv_shelf for slot in rank_program(plan, 3, 0, True).slots for w in slot.work for _ in w.slices]
    assert len(readers) > len(set(readers)), "the example must read a shelf more than once"


def test_the_backward_sends_delta_and_not_the_output() -> None:
    shape = Shape(8, 4, 16, 8, "bfloat16")
    assert [field.name for field in FIELDS[Kind.DO]] == ["do", "lse", "delta"]
    assert shape.bytes_per_token_head()[Kind.DO].tolist() == [8 * 2 + 4 + 4] * 2
    assert field_sizes(QUERIES, True, False, 10, shape) == [10 * 16 * 2, 10 * 8 * 2, 10 * 4, 10 * 4]


# --- first fit --------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(0, 9), st.integers(0, 4)), max_size=12))
def test_first_fit_never_overlaps(tenants: list[tuple[int, int, int]]) -> None:
    placed = [(size, first, first + more) for size, first, more in tenants]
    offsets, total = first_fit(placed)
    ends = [offset + size for offset, (size, _, _) in zip(offsets, placed, strict=True)]
    assert total == max(ends, default=0)
    for i, j in itertools.combinations(range(len(placed)), 2):
        meet = placed[i][1] <= placed[j][2] and placed[j][1] <= placed[i][2]
        assert not meet or ends[i] <= offsets[j] or ends[j] <= offsets[i]


def test_first_fit_uses_bytes_again() -> None:
    assert first_fit([(10, 0, 1), (10, 2, 3), (4, 1, 2)]) == ([0, 0, 10], 14)


def test_the_layout_is_the_same_every_time() -> None:
    plan = planned("usp", 2, 2, [77, 300], flexcp.causal())
    assert arena_layout(plan, 1, 0, True) == arena_layout(plan, 1, 0, True)


def test_one_mask_is_that_of_every_layer_of_the_model() -> None:
    model = flexcp.Model("m", 512, 6, 1024)
    options: Any = {"cluster": WHERE, "strategy": "zigzag"}
    alone, whole = flexcp.Planner(8, 2, 64, **options), flexcp.Planner(8, 2, 64, **options, model=model)
    assert [mask.layers for mask in alone(LENGTHS).batch.masks] == [1]
    assert [mask.layers for mask in whole(LENGTHS).batch.masks] == [6]
    named = whole(LENGTHS, masks={"mask": (flexcp.causal(), 6)})
    assert named.hash == whole(LENGTHS).hash and named.memory(0).total == whole(LENGTHS).memory(0).total
    assert whole(LENGTHS).memory(0).total > alone(LENGTHS).memory(0).total

"""Proves that plan, executor and simulator agree: a rank does, and the simulator assumes, what the plan says of a
stage.

Follows the table in docs/communication.md field by field and value by value. One rank's pass runs alone, with an
exchange that records what is posted and waited for and a kernel that records how many multiprocessors it leaves free;
the results are compared with the simulator's inputs for the same plan.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from datetime import timedelta
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

import flexcp
from flexcp.clusters import Cluster
from flexcp.cost import row_for
from flexcp.executor.exchange.arena import Arena, Buffers
from flexcp.executor.exchange.rank_calls import CallSettings, rank_calls
from flexcp.executor.exchange.transports import Exchange, PassLabel, Wire
from flexcp.executor.kernels import Settings
from flexcp.executor.kernels.sinks_and_delta import OutputGradient
from flexcp.executor.run.executor import Runtime, run_backward, run_forward
from flexcp.executor.run.finished_rows import finished_rows
from flexcp.executor.run.message_layout import new_results, types_of
from flexcp.executor.run.pass_recipe import pass_recipe
from flexcp.executor.run.prepared import prepare
from flexcp.executor.run.rank_program import Block, Slot, rank_program
from flexcp.executor.run.rank_rows import local_stream
from flexcp.plan.check import PlanError
from flexcp.plan.issue import issued_parts
from flexcp.plan.plan import Plan
from flexcp.shape import FIELDS, OUTPUTS
from flexcp.simulator.copies import find_copies
from flexcp.simulator.passes import Rules, pass_model, run_pass

MACHINE = Cluster("slow", 2, 2, gflops=50_000, intra_mbps=2000, inter_mbps=300, latency_ns=700)
ONE_NODE = replace(MACHINE, nodes=1, ranks_per_node=4, intra_mbps=1000)
FORWARD, BACKWARD = False, True


def planned(strategy: str = "blocks", **columns: int) -> Plan:
    """Return a plan of several stages with these values in every row of its execution table, where possible."""
    # Inside one node nothing is relayed, so the inputs of later stages are available from the beginning.
    machine = ONE_NODE if columns.get("ahead", 0) > 1 else MACHINE
    plan = flexcp.Planner(4, 4, 16, dtype="float32", cluster=machine, strategy=strategy)([5000, 900, 31])
    if columns:
        plan = replace(plan, programs=tuple(tuple(_with(p, columns) for p in pair) for pair in plan.programs))
    return plan


def _with(program: Any, columns: dict[str, int]) -> Any:
    how, stages = program.execution, np.arange(program.stages)
    for name, value in columns.items():
        column = np.full_like(stages, value)
        if name == "ahead" and value > 1:  # only data sent by its owners can be posted earlier
            t = program.transfers
            bound = np.isin(stages, t.stage[t.is_output | (t.source != t.owner)]) | (stages < value)
            column = np.where(bound, 1, value)
        how = replace(how, **{name: column})
    return replace(program, execution=how)


class Recorder:
    """What one rank did in a pass: ("post" or "wait", stage) and ("work", multiprocessors left free), in order."""

    FRESH = False

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []

    def forward(self, *arguments: Any) -> None:
        self.events.append(("work", next(a for a in arguments if isinstance(a, Settings)).sm_margin))

    backward = forward


class SilentExchange(Exchange):
    """An exchange that delivers zeros and records calls."""

    recorder: Recorder

    def post(self, stage: int, sends: Buffers, receives: Buffers) -> None:
        self.recorder.events.append(("post", stage))
        self._arriving[stage] = receives
        for _, message in receives.messages:
            message.zero_()

    def arrived(self, stage: int) -> Buffers | None:
        self.recorder.events.append(("wait", stage))
        return self._arriving.pop(stage, None)

    def finish(self) -> None:
        assert not self._arriving


def executed(plan: Plan, rank: int, backward: bool, margin: int | None = None) -> list[tuple[str, int]]:
    """Return what ``rank`` does in a pass of the plan."""
    shape, recorder, tokens = plan.shape, Recorder(), int(plan.placement.tokens[rank])
    q, k, v = (torch.zeros(tokens, heads, shape.head_dim) for heads in (shape.heads, shape.kv_heads, shape.kv_heads))
    types = types_of(q)
    program = rank_program(plan, rank, 0, backward)
    prepared = replace(prepare(pass_recipe(program, backward, shape), shape, "cpu", types, {}), kernel=recorder)
    wire = Wire(None, [0] * plan.ranks, timedelta(seconds=1), None, lambda reason: None)
    exchange = SilentExchange(wire, PassLabel(0, 0, 0, "", backward, len(program.slots)), ())
    exchange.recorder = recorder
    runtime = Runtime(shape, types, Settings(1.0), exchange, Arena(), margin=margin)
    if not backward:
        run_forward(prepared, runtime, q, k, v, rounded=True)
        return recorder.events
    lse = torch.zeros(tokens, shape.heads, dtype=types.statistics)
    kept = torch.empty(0, dtype=torch.uint8)
    run_backward(prepared, runtime, kept, q, k, v, lse, OutputGradient(q, q, None, types.statistics))
    return recorder.events


def moving(plan: Plan, rank: int, backward: bool) -> set[int]:
    """Return the stages in which a rank sends or receives; it posts no others."""
    t = plan.programs[0][backward].transfers
    return set(t.stage[((t.source == rank) | (t.target == rank)) & (t.source != t.target)].tolist())


def moves_beside(plan: Plan, rank: int, backward: bool, slot: int) -> bool:
    """Return whether a stage in which the rank sends or receives has been posted by ``slot`` but not yet waited for."""
    ahead = plan.programs[0][backward].execution.ahead
    return any(stage - ahead[stage] <= slot < stage for stage in moving(plan, rank, backward))


def expected(plan: Plan, rank: int, backward: bool) -> list[tuple[str, int]]:
    """Return the events that the plan's columns prescribe, slot by slot; the number of launches is taken from the
    program.
    """
    program = plan.programs[0][backward]
    ahead, margin = program.execution.ahead.tolist(), program.execution.margin.tolist()
    slots, stages = rank_program(plan, rank, 0, backward).slots, sorted(moving(plan, rank, backward))
    found: list[tuple[str, int]] = []
    for slot in range(program.stages):
        found += [("post", slot)] * (slot in stages and ahead[slot] == 0) + [("wait", slot)]
        found += [("post", s) for s in stages if ahead[s] > 0 and s - ahead[s] == slot]
        left = margin[slot] if moves_beside(plan, rank, backward, slot) else 0
        found += [("work", left)] * len(slots[slot].work)
    return found


CASES = [("ahead", 0), ("ahead", 1), ("ahead", 2), ("margin", 0), ("margin", 8), ("margin", 16)]


@pytest.mark.parametrize("backward", [FORWARD, BACKWARD], ids=["forward", "backward"])
@pytest.mark.parametrize(("column", "value"), CASES)
def test_a_rank_posts_and_leaves_free_what_the_plan_says_and_the_simulator_reads(
    column: str, value: int, backward: bool
) -> None:
    plan = planned(**{column: value})
    plan.check()
    program = plan.programs[0][backward]
    assert program.stages > 3 and value in getattr(program.execution, column)
    model = pass_model(plan, 0, backward, plan.cost, Rules())
    calm = pass_model(plan, 0, backward, plan.cost, Rules(contention=False))
    ran = run_pass(calm, np.zeros(plan.ranks, np.int64))
    for rank in range(plan.ranks):
        events = executed(plan, rank, backward)
        assert events == expected(plan, rank, backward)
        slot, posted = -1, {}
        for what, number in events:
            slot = number if what == "wait" else slot
            if what == "post":
                posted[number] = slot
            if what == "work":
                beside = (calm.chunks.stage == slot + 1) & ((calm.chunks.source == rank) | (calm.chunks.target == rank))
                row = row_for(plan.cost.rows_beside(not (beside & (calm.chunks.across == 0)).any()), number)
                slow, alone = row.compute(backward)
                assert model.link[rank, slot] == row.link
                assert model.slow[rank, slot] == -(-slow * 1000 // alone)
                assert model.ns[rank, slot] == -(-calm.ns[rank, slot] * alone // 1000)
        # A chunk of a message never starts before both of its ranks have posted its stage: at the beginning of the slot
        # that posts it, or after that slot's work.
        chunks = calm.chunks
        for i in np.flatnonzero(chunks.source == rank):
            stage = int(chunks.stage[i])
            at = posted[stage]
            late = program.execution.ahead[stage] == 0
            begin = ran.end[rank, at] if late else ran.begin[rank, at]
            assert ran.chunk_begin[i] >= begin + calm.latency_ns
    stage, source = calm.chunks.stage, calm.chunks.source
    early = (ran.chunk_begin < ran.begin[source, stage - 1] + calm.latency_ns) & (program.execution.ahead[stage] > 1)
    assert early.any() == (column == "ahead" and value > 1)  # early posts start earlier


@pytest.mark.parametrize("rounds", [0, 1, 2])
def test_a_stage_is_issued_as_the_plan_says_and_timed_so(rounds: int) -> None:
    plan = planned("allgather", rounds_per_call=rounds)
    asked = CallSettings(rounds)
    for backward in (FORWARD, BACKWARD):
        sent: Counter[tuple[int, int, int]] = Counter()
        most = 0
        for rank in range(plan.ranks):
            calls = rank_calls(plan, rank, 0, backward)
            assert calls == rank_calls(planned("allgather"), rank, 0, backward, asked)
            most = max(most, *(len(stage) for stage in calls))
            for stage, of_stage in enumerate(calls):
                for call in of_stage:
                    sent[stage, call.number, rank] += sum(part.stop - part.start for part in call.sends)
        number = plan.rounds(0, backward).exchanges.rounds.max()
        assert most == (1 if rounds == 0 else -(-number // rounds)) and number > 1
        chunks = pass_model(plan, 0, backward, plan.cost, Rules()).chunks
        parts = issued_parts(plan, 0, backward)
        timed: Counter[tuple[int, int, int]] = Counter()
        for stage, call, source, size in zip(parts.stage, parts.call, parts.source, chunks.size, strict=True):
            timed[int(stage), int(call), int(source)] += int(size)
        assert timed == +sent
        whole = parts.start == 0
        assert whole.all() or rounds > 0


def copied_bytes(plan: Plan, rank: int, backward: bool) -> tuple[list[int], list[int]]:
    """Return the bytes that a rank reads and writes in copies, by stage: to pack messages, and to unpack them.

    Unpacking includes clearing the memory that results are added to.
    """
    shape, program = plan.shape, rank_program(plan, rank, 0, backward)
    element, precise = shape.element_bytes, shape.accumulator_bytes

    def sizes(block: Block) -> tuple[int, int]:
        """Return a block's bytes in a message, and its bytes in the rank's memory."""
        amount = block.count * (block.h1 - block.h0)
        found = [0, 0]
        for one in FIELDS[block.kind]:
            exact = block.partial if one.precise is None else one.precise
            kept = precise if block.kind in OUTPUTS or one.precise else element
            found[0] += amount * one.numbers(shape) * (precise if exact else element)
            found[1] += amount * one.numbers(shape) * kept
        return found[0], found[1]

    def written(block: Block) -> int:
        """Return the bytes that are read and written when a block is taken in, besides reading its message."""
        if block.laid:
            return sizes(block)[0]
        return sizes(block)[1] * (1 + (block.kind in OUTPUTS))

    def reduced_again(slot: Slot) -> int:
        """Return the bytes of results that are read and written once instead of once for each message."""
        seen: Counter[tuple[int, int, int, int]] = Counter()
        for block in (b for m in slot.receive for b in m.blocks if b.kind in OUTPUTS and not b.laid):
            rows = range(block.rows.start, block.rows.stop) if isinstance(block.rows, slice) else block.rows.tolist()
            seen.update(product([block.kind], [block.shelf], rows, range(block.h0, block.h1)))
        size = {kind: sum(one.numbers(shape) for one in FIELDS[kind]) * precise for kind in OUTPUTS}
        return sum(2 * size[kind] * (times - 1) for (kind, *_), times in seen.items())

    packed, taken = [0] * len(program.slots), [0] * len(program.slots)
    laid, cleared, rounded = 0, 0, 0
    for stage, slot in enumerate(program.slots):
        packed[stage] = sum(sum(sizes(block)) for message in slot.send for block in message.blocks)
        came = [(sizes(block)[0], block) for message in slot.receive for block in message.blocks]
        came += [(sizes(here)[1], there) for here, there in slot.own]
        taken[stage] = sum(read + written(block) for read, block in came) - reduced_again(slot)
        laid += sum(sum(sizes(block)) for _, block in came if block.laid)
    types = types_of(torch.empty(0, dtype=getattr(torch, shape.dtype)))
    types = replace(types, statistics=types.accumulator)  # as on a GPU
    for shelf in program.shelves:
        results = new_results(shelf, backward, shape, types).values()
        size = sum(x.numel() * x.itemsize for x in results)
        if shelf.stage == program.shelves[0].stage:  # the rank's own results, which are rounded at the end
            cleared += size
            rounded += size + (
                size if element == precise else sum(x.numel() * (element if x.ndim > 2 else precise) for x in results)
            )
        else:
            taken[shelf.stage] += size
    if plan.cluster.writes_results_once and not backward and finished_rows(program) is not None:
        rounded = laid
    taken[program.shelves[0].stage] += cleared if rounded > laid else 0
    taken[-1] += rounded - laid
    return packed, taken


@pytest.mark.parametrize("backward", [FORWARD, BACKWARD], ids=["forward", "backward"])
@pytest.mark.parametrize("machine", [MACHINE, replace(MACHINE, name="h100")], ids=["slow", "hopper"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "strategy", ["blocks", "groups:team=2", "hypergraph", "ulysses", "zigzag", "usp:2,2", "allgather"]
)
def test_the_simulator_counts_the_bytes_that_a_rank_copies(
    strategy: str, dtype: str, machine: Cluster, backward: bool
) -> None:
    plan = flexcp.Planner(4, 4, 16, dtype=dtype, cluster=machine, strategy=strategy)([5000, 900, 31])
    assert plan.cluster.writes_results_once == (machine.name == "h100")
    found = find_copies(plan, 0, backward, mbps=1000, launch_ns=0)  # one byte a nanosecond
    for rank in range(plan.ranks):
        packed, taken = copied_bytes(plan, rank, backward)
        assert (found.pack[rank].tolist(), found.take_in[rank].tolist()) == (packed, taken)
    launches = find_copies(plan, 0, backward, mbps=1000, launch_ns=10**9)
    for rank in range(plan.ranks):
        for stage, slot in enumerate(rank_program(plan, rank, 0, backward).slots):
            blocks = [block for message in slot.receive for block in message.blocks]
            copied = any(block.laid or block.kind not in OUTPUTS for block in blocks)
            reduced = any(block.kind in OUTPUTS and not block.laid for block in blocks)
            assert launches.pack[rank, stage] // 10**9 == bool(slot.send)
            assert launches.take_in[rank, stage] // 10**9 == copied + reduced
    messages = find_copies(plan, 0, backward, mbps=1000, launch_ns=0, messages_only=True)
    assert messages.pack.sum(axis=1).tolist() == (2 * plan.bytes(backward).sum(axis=1)).tolist()
    assert messages.take_in.sum(axis=1).tolist() == (2 * plan.bytes(backward).sum(axis=0)).tolist()


def test_outputs_of_a_rank_with_pads_are_cleared_and_rounded() -> None:
    """No kernel writes the rows of pads, so the fast kernel does not write the outputs of such a rank once."""
    machine = replace(MACHINE, name="h100")
    plan = flexcp.Planner(4, 4, 16, cluster=machine, strategy="groups:team=1")([5000, 900, 31], tokens="equal")
    found = find_copies(plan, 0, FORWARD, mbps=1000, launch_ns=0)
    padded = [bool((local_stream(plan.placement, rank) >= plan.batch.tokens).any()) for rank in range(plan.ranks)]
    assert any(padded) and not all(padded)
    for rank, pads in enumerate(padded):
        assert found.take_in[rank].tolist() == copied_bytes(plan, rank, FORWARD)[1]
        assert (finished_rows(rank_program(plan, rank, 0, FORWARD)) is None) == pads


def test_one_margin_for_all_slots_can_be_asked_for() -> None:
    for rank in range(4):
        left = {number for what, number in executed(planned(margin=16), rank, FORWARD, margin=5) if what == "work"}
        assert left == {5}


def test_transfers_are_issued_before_the_work_they_travel_beside() -> None:
    for strategy in ("blocks", "zigzag", "usp:2,2"):
        plan = planned(strategy)
        for backward in (FORWARD, BACKWARD):
            events, stages = executed(plan, 0, backward), moving(plan, 0, backward)
            assert stages
            for stage in stages:
                post, wait, before = (events.index(e) for e in (("post", stage), ("wait", stage), ("wait", stage - 1)))
                assert before < post < wait
                assert not any(what == "work" for what, _ in events[before:post])


def test_what_is_not_there_yet_cannot_be_posted() -> None:
    plan = planned("zigzag")
    for column, message in ((3, "posted before the first slot"), (2, "forwards in stage 2 what it has not received")):
        ahead = np.where(np.arange(plan.programs[0][0].stages) == 2, column, 1)
        forward, backward = plan.programs[0]
        forward = replace(forward, execution=replace(forward.execution, ahead=ahead))
        with pytest.raises(PlanError, match=message):
            replace(plan, programs=((forward, backward),)).check()

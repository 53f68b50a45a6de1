"""Proves the executor's loop over a pass's stages without a network: ranks are threads that leave messages in a shared
box.

Compares every kind of traffic, forward and backward, with one rank alone: sending only what is read, static rings and
all-gathers, split heads, relays inside nodes, and a scattered layout, whose tokens are first sorted on their own rank.
"""

from __future__ import annotations

import queue
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import flexcp
from flexcp.executor.exchange.arena import Arena, Buffers
from flexcp.executor.exchange.transports import Exchange, PassLabel, Wire
from flexcp.executor.kernels import Settings
from flexcp.executor.kernels.sinks_and_delta import OutputGradient
from flexcp.executor.run.executor import WORD, Runtime, _flat, run_backward, run_forward
from flexcp.executor.run.message_layout import types_of
from flexcp.executor.run.pass_recipe import pass_recipe
from flexcp.executor.run.prepared import prepare
from flexcp.executor.run.rank_program import rank_program
from flexcp.plan.plan import Plan

LENGTHS = [37, 1, 22, 4]
HEADS, KV_HEADS, HEAD_DIM, V_HEAD_DIM = 4, 2, 8, 6
CPU = torch.device("cpu")
CASES = [
    ("blocks", 1, 3),
    ("scattered", 1, 3),
    ("zigzag", 1, 3),
    ("usp:2,2", 1, 4),
    ("allgather", 1, 2),
    ("groups", 2, 2),
]


class Box:
    """A queue of messages for each (source, target, stage)."""

    def __init__(self) -> None:
        self._lock, self._queues = threading.Lock(), dict[tuple[int, ...], queue.SimpleQueue[Tensor]]()

    def at(self, *key: int) -> queue.SimpleQueue[Tensor]:
        with self._lock:
            return self._queues.setdefault(key, queue.SimpleQueue())


class BoxExchange(Exchange):
    """Leaves messages in a box and takes them from there.

    ``ended`` records, at each end of a pass, whether the pass still held its lease of the arena.
    """

    rank: int
    box: Box
    arena: Arena
    ended: list[bool]

    def post(self, stage: int, sends: Buffers, receives: Buffers) -> None:
        self._arriving[stage] = receives
        for peer, message in sends.messages:
            self.box.at(self.rank, peer, stage).put(message.clone())

    def arrived(self, stage: int) -> Buffers | None:
        receives = self._arriving.pop(stage, None)
        for peer, message in [] if receives is None else receives.messages:
            message.copy_(self.box.at(peer, self.rank, stage).get(timeout=20))
        return receives

    def finish(self) -> None:
        assert not self._arriving
        size = self.arena.size
        with self.arena.lease(size + 1, CPU):  # an arena grows only when it is not leased
            self.ended.append(self.arena.size == size)


class Marks:
    """Counts the calls that a pass makes to its telemetry."""

    def __init__(self) -> None:
        self.count = 0

    @contextmanager
    def running(self) -> Iterator[None]:
        self.count += 1000
        yield

    def mark(self) -> None:
        self.count += 1


def planned(strategy: str, nodes: int, ranks: int) -> Plan:
    machine = flexcp.cluster("cpu", nodes, ranks)
    named = strategy.replace("scattered", "blocks")
    planner = flexcp.Planner(HEADS, KV_HEADS, HEAD_DIM, V_HEAD_DIM, "float64", machine, strategy=named)
    options: dict[str, Any] = {}
    if strategy == "scattered":
        order = np.random.default_rng(0).permutation(sum(LENGTHS))
        options["layout"] = [order[rank::ranks].tolist() for rank in range(ranks)]
    return planner(LENGTHS, flexcp.window(20, 3), **options)


def streams() -> tuple[Tensor, ...]:
    """Return q, k, v and the output gradient of all tokens."""
    generator = torch.Generator().manual_seed(0)
    sizes = ((HEADS, HEAD_DIM), (KV_HEADS, HEAD_DIM), (KV_HEADS, V_HEAD_DIM), (HEADS, V_HEAD_DIM))
    return tuple(torch.randn(sum(LENGTHS), *size, dtype=torch.float64, generator=generator) for size in sizes)


def alone() -> list[Tensor]:
    """Return output and gradients computed by one rank."""
    q, k, v, do = streams()
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = flexcp.attention(q, k, v, flexcp.bind(planned("dp", 1, 1)))
    assert isinstance(out, Tensor)
    return [out.detach(), *torch.autograd.grad(out, leaves, do)]


def rows_of(plan: Plan, rank: int) -> Tensor:
    """Return the tokens of a rank in the order in which the rank stores them."""
    kept, rows = plan.placement.kept, torch.full((int(plan.placement.tokens[rank]),), -1)
    for start, stop, owner, local in zip(kept.start, kept.stop, kept.rank, kept.local, strict=True):
        if owner == rank:
            rows[local : local + stop - start] = torch.arange(start, stop)
    return rows


def one_rank(plan: Plan, rank: int, boxes: tuple[Box, Box]) -> tuple[list[Tensor], list[int]]:
    """Return output, dq, dk and dv of a rank's rows, and, for each pass, how many of its expected marks are missing.

    A pass that exchanges messages must finish its exchange once, and before it returns the arena that holds the
    messages.
    """
    q, k, v, do = (stream[rows_of(plan, rank)] for stream in streams())
    types, missing, ended = types_of(q), list[int](), list[bool]()

    def ready(backward: bool) -> tuple[Any, Runtime, Marks]:
        program = rank_program(plan, rank, 0, backward)
        wire = Wire(None, [0] * plan.ranks, timedelta(seconds=20), None, lambda reason: None)
        exchange = BoxExchange(wire, PassLabel(0, 0, 0, "", backward, len(program.slots)), ())
        exchange.rank, exchange.box = rank, boxes[backward]
        exchange.arena, exchange.ended = Arena(), ended
        marks = Marks()
        runtime = Runtime(plan.shape, types, Settings(HEAD_DIM**-0.5), exchange, exchange.arena, marks)
        return prepare(pass_recipe(program, backward, plan.shape), plan.shape, "cpu", types, {}), runtime, marks

    prepared, runtime, marks = ready(False)
    out, lse, kept = run_forward(prepared, runtime, q, k, v, rounded=False)
    missing.append(1000 + 3 * len(prepared.program.slots) - marks.count)
    prepared, runtime, marks = ready(True)
    back = OutputGradient(do, out, None, types.statistics)
    grads = run_backward(prepared, runtime, kept, q, k, v, lse, back)
    assert ended == [True] * 2, f"rank {rank} of {plan!r}"
    missing.append(1000 + 3 * len(prepared.program.slots) - marks.count)
    return [out, *grads], missing


@pytest.mark.parametrize(("strategy", "nodes", "ranks"), CASES)
def test_ranks_together_compute_what_one_computes_alone(strategy: str, nodes: int, ranks: int) -> None:
    plan, boxes = planned(strategy, nodes, ranks), (Box(), Box())
    exact = alone()
    with ThreadPoolExecutor(plan.ranks) as pool:
        found = list(pool.map(lambda rank: one_rank(plan, rank, boxes), range(plan.ranks)))
    for rank, (results, missing) in enumerate(found):
        rows = rows_of(plan, rank)
        for name, result, whole in zip(("out", "dq", "dk", "dv"), results, exact, strict=True):
            torch.testing.assert_close(
                result, whole[rows], atol=1e-12, rtol=1e-12, msg=f"{name} of rank {rank}".__add__
            )
        assert missing == [0, 0]


def test_a_scattered_layout_puts_own_tokens_in_order_first() -> None:
    """The rank's program moves as many pieces inside the rank as the plan's table says, each with as many rows."""
    plan = planned("scattered", 1, 3)
    for backward in (False, True):
        t = plan.programs[0][backward].transfers
        stay = t.take(t.source == t.target)
        wanted = Counter(zip(stay.source.tolist(), stay.stage.tolist(), (stay.stop - stay.start).tolist(), strict=True))
        found: Counter[tuple[int, int, int]] = Counter()
        for rank in range(3):
            for stage, slot in enumerate(rank_program(plan, rank, 0, backward).slots):
                assert all(here.count == there.count for here, there in slot.own)
                found.update((rank, stage, here.count) for here, _ in slot.own)
        assert found == wanted and found


def test_tensors_are_copied_only_where_messages_could_not_be_cut_from_them() -> None:
    memory = torch.arange(64, dtype=torch.float64)
    assert _flat(memory).data_ptr() == memory.data_ptr()
    for odd in (memory[1:9], memory.view(8, 8).T):
        found = _flat(odd)
        assert found.data_ptr() != odd.data_ptr() and found.data_ptr() % WORD == 0
        assert found.is_contiguous() and torch.equal(found, odd)

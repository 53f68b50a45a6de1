"""Proves the exchange of messages: delays do not change a bit of the results, and a stage cut into calls of a few
rounds gives the results and bytes of one call.

For the delays, ranks wait at random before they send, receive, unpack and compute, under several strategies and numbers
of ranks, six times each.
"""

from __future__ import annotations

import random
import re
import time
from collections import Counter
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist

import flexcp
from flexcp.executor.exchange import connect as connecting
from flexcp.executor.exchange import transports
from flexcp.executor.exchange.arena import Buffers
from flexcp.executor.exchange.collectives import Occasion
from flexcp.executor.exchange.connect import connect
from flexcp.executor.exchange.failure_notes import within
from flexcp.executor.exchange.grouped_calls import Message
from flexcp.executor.exchange.rank_calls import Call, MessageRange
from flexcp.executor.exchange.transports import (
    DeviceExchange,
    ExchangeError,
    HostExchange,
    PassLabel,
    Wire,
    transport_for,
)
from flexcp.executor.step import Step
from flexcp.measure.ranks import RankPool
from flexcp.plan.file import VERSION
from flexcp.plan.plan import Plan

LENGTHS = [70, 1, 33, 8]
REPEATS = 6
CHUNKS = {"rounds_per_call": 1, "chunk_bytes": 4000}


def plan_for(strategy: str, nodes: int, ranks: int, **options: Any) -> Plan:
    where = flexcp.cluster("cpu", nodes, ranks)
    heads = 2 * nodes * ranks
    return flexcp.Planner(heads, heads // 2, 8, dtype="float32", cluster=where, strategy=strategy)(LENGTHS, **options)


def with_rounds(plan: Plan, rounds_per_call: int = 1, chunk_bytes: int = 4000) -> Plan:
    """Return the plan with its rounds already computed, so that no rank has to load Numba for them."""
    for backward in (False, True):
        plan.rounds(0, backward, chunk_bytes)
        plan.rounds(0, backward)
    return plan


def run(step: Step) -> dict[str, np.ndarray]:
    """One layer, forward and backward, on this rank's rows."""
    shape, tokens = step.plan.shape, step.plan.batch.tokens
    generator = torch.Generator().manual_seed(0)
    sizes = [(shape.heads, shape.head_dim)] + [(shape.kv_heads, shape.head_dim)] * 2 + [(shape.heads, shape.head_dim)]
    q, k, v, do = (step.shard(torch.randn(tokens, *size, generator=generator)) for size in sizes)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = flexcp.attention(leaves[0], leaves[1], leaves[2], step)
    assert isinstance(out, torch.Tensor)
    grads = torch.autograd.grad(out, leaves, do)
    return dict(zip(("out", "dq", "dk", "dv"), (x.detach().numpy() for x in (out, *grads)), strict=True))


def test_the_device_chooses_the_transport() -> None:
    assert transport_for(torch.device("cpu")) is HostExchange
    assert transport_for(torch.device("cuda", 1)) is DeviceExchange


# --- DeviceExchange, over gloo ----------------------------------------------------------------------------------------


def on_device_way(group: dist.ProcessGroup, plans: list[Plan], ahead: int | None) -> list[str]:
    """Return the strategies whose results by :class:`DeviceExchange` over gloo differ from those of the CPU transport.

    Rank ``ahead`` counts one pass more than it makes.
    """
    found = []
    for plan in plans:
        exact = run(flexcp.bind(plan, group))
        step = flexcp.bind(plan, group)
        step.passes.host_exchange = DeviceExchange  # type: ignore[assignment]
        if step.rank == ahead:
            step.passes.count += 1
        try:
            again = run(step)
        except RuntimeError as error:
            return [str(error)]
        found += [plan.strategy for name in exact if not np.array_equal(exact[name], again[name])]
    return found


def test_stamps_go_before_the_first_message_of_a_pass(pool: RankPool) -> None:
    plans = [plan_for(strategy, 1, 3) for strategy in ("ring", "allgather", "blocks")]
    assert pool.run(on_device_way, plans, None, ranks=3) == [[], [], []]


def test_ranks_out_of_step_stop_before_they_use_what_came(pool: RankPool) -> None:
    told = pool.run(on_device_way, [plan_for("allgather", 1, 2)], 1, ranks=2)
    assert all(
        re.search("ranks are out of step: messages of another call arrived in stage 1", "".join(t)) for t in told
    )


def test_stamps_of_passes_and_of_other_calls_differ() -> None:
    passes = [
        PassLabel(step, number, mask, "m", backward, 2).stamp
        for step in (1, 2)
        for number in (1, 2)
        for mask in (0, 1)
        for backward in (False, True)
    ]
    others = [Occasion(place, number, 1).stamp for place in ("step.roll", "step.loss") for number in (1, 2)]
    assert len({*passes, *others}) == len(passes) + len(others)
    assert all(0 <= stamp < 1 << 63 for stamp in passes + others)
    largest = PassLabel((1 << 24) - 1, (1 << 28) - 1, (1 << 9) - 1, "", True, 2).stamp
    assert largest == (1 << 62) - 1  # no part of a stamp overlaps another


def dawdling(rank: int, seed: int) -> type[HostExchange]:
    """Return an exchange class that, one time in three, waits up to 2 ms before each of its operations."""
    chance = random.Random(1000 * rank + seed)

    def dawdle() -> None:
        if chance.random() < 1 / 3:
            time.sleep(chance.random() / 500)

    class Dawdling(HostExchange):
        def post(self, stage: int, sends: Buffers, receives: Buffers) -> None:
            dawdle()
            super().post(stage, sends, receives)
            dawdle()  # the rank computes next

        def send(self, message: torch.Tensor, peer: int, tag: int) -> dist.Work:
            dawdle()
            return super().send(message, peer, tag)

        def receive(self, message: torch.Tensor, peer: int, tag: int) -> dist.Work:
            dawdle()
            return super().receive(message, peer, tag)

        def arrived(self, stage: int) -> Buffers | None:
            dawdle()
            return super().arrived(stage)

    return Dawdling


def on_delays(group: dist.ProcessGroup, plans: list[Plan]) -> list[list[str]]:
    """For each plan, return the results that differ in some repeat from a run without delays."""
    found = []
    for plan in plans:
        exact = run(flexcp.bind(plan, group))
        steps = [flexcp.bind(plan, group), flexcp.bind(plan, group, **CHUNKS)]
        wrong = []
        for repeat in range(REPEATS):
            step = steps[repeat % 2]
            step.passes.host_exchange = dawdling(step.rank, repeat)
            results = run(step)
            wrong += [f"{name} in repeat {repeat}" for name, x in results.items() if not np.array_equal(x, exact[name])]
        found.append(wrong)
    return found


@pytest.mark.parametrize(("nodes", "ranks"), [(1, 2), (2, 2), (1, 5)])
def test_delays_change_no_bit(pool: RankPool, nodes: int, ranks: int) -> None:
    plans = [with_rounds(plan_for(strategy, nodes, ranks)) for strategy in ("blocks", "zigzag", "ulysses")]
    for rank, found in enumerate(pool.run(on_delays, plans, ranks=nodes * ranks)):
        assert found == [[]] * len(plans), f"rank {rank}"


def on_calls(group: dist.ProcessGroup, plan: Plan, calls: dict[str, int]) -> tuple[dict[str, np.ndarray], Any, int]:
    step = flexcp.bind(plan, group, **calls)
    most = max(len(stage) for backward in (False, True) for stage in step.passes.calls(0, backward))
    return run(step), step.sent_bytes, most


@pytest.mark.parametrize("strategy", ["blocks", "ring", "allgather", "ulysses", "groups"])
def test_calls_of_few_rounds_give_the_same_results_and_bytes_as_one_call(pool: RankPool, strategy: str) -> None:
    plan = plan_for(strategy, 2, 2)
    whole = pool.run(on_calls, plan, {}, ranks=4)
    for calls in (
        {"rounds_per_call": 1, "chunk_bytes": 10**6},
        {"rounds_per_call": 1, "chunk_bytes": 300},
        {"rounds_per_call": 3, "chunk_bytes": 999},
    ):
        parts = pool.run(on_calls, with_rounds(plan, **calls), calls, ranks=4)
        for rank, ((exact, _, _), (found, sent, _)) in enumerate(zip(whole, parts, strict=True)):
            assert all(np.array_equal(found[name], x) for name, x in exact.items())
            for backward, direction in enumerate(("forward", "backward")):
                assert sent[direction] == plan.bytes(bool(backward))[rank].tolist()
        if calls["chunk_bytes"] < 1000:
            assert max(most for _, _, most in parts) > 1


def executed_so(plan: Plan, **columns: int) -> Plan:
    """Return the plan with these values in every row of its execution table.

    ``ahead=2`` is set only for stages whose messages are all sent by the owners of the data, since only these can be
    posted that early.
    """

    def changed(program: Any) -> Any:
        stages, t = np.arange(program.stages), program.transfers
        made = {name: np.full_like(stages, value) for name, value in columns.items()}
        if made.get("ahead", stages)[0] == 2:
            bound = np.isin(stages, t.stage[t.is_output | (t.source != t.owner)]) | (stages < 2)
            made["ahead"] = np.where(bound, 1, 2)
        return replace(program, execution=replace(program.execution, **made))

    return replace(plan, programs=tuple(tuple(changed(p) for p in pair) for pair in plan.programs))


def test_however_a_plan_is_executed_results_and_bytes_are_the_same(pool: RankPool) -> None:
    slow = replace(flexcp.cluster("cpu", 1, 3), gflops=1, intra_mbps=1)
    planner = flexcp.Planner(4, 2, 8, dtype="float32", cluster=slow, strategy="blocks")
    plan = planner([900, 40, 300])
    early = executed_so(plan, ahead=2)
    assert any((p.execution.ahead == 2).any() for p in early.programs[0])
    whole = pool.run(on_calls, plan, {}, ranks=3)
    for other in (
        early,
        executed_so(plan, ahead=0),
        executed_so(plan, margin=16),
        with_rounds(executed_so(plan, rounds_per_call=1)),
    ):
        other.check()
        for (exact, bytes_of, _), (found, sent, _) in zip(whole, pool.run(on_calls, other, {}, ranks=3), strict=True):
            assert all(np.array_equal(found[name], x) for name, x in exact.items()) and sent == bytes_of


def test_ranks_with_nothing_to_exchange_and_stages_of_some_ranks(pool: RankPool) -> None:
    lengths = [300, 200, 190]
    shape: dict[str, Any] = {"heads": 4, "head_dim": 8, "dtype": "float32", "strategy": "blocks"}
    one, four = (
        flexcp.Planner(cluster=flexcp.cluster("cpu", 1, ranks), **shape)(lengths, tokens="priced") for ranks in (1, 4)
    )
    assert sorted(len(four.peers(rank)) for rank in range(4)) == [0, 1, 1, 2]
    exact = run(flexcp.bind(one))["out"]
    for calls in ({}, CHUNKS):
        ranks = pool.run(on_calls, with_rounds(four), calls, ranks=4)
        for rank, (found, sent, _) in enumerate(ranks):
            runs = four.placement.runs.take(four.placement.runs.rank == rank)
            rows = np.concatenate([np.arange(a, b) for a, b in zip(runs.start, runs.stop, strict=True)])
            assert np.abs(found["out"] - exact[rows]).max() < 1e-5
            assert bool(any(sent["forward"] + sent["backward"])) == bool(four.peers(rank))


def on_other_calls(group: dist.ProcessGroup, plan: Plan) -> str:
    calls = {"rounds_per_call": 2} if dist.get_rank(group) == 1 else {}
    try:
        flexcp.bind(plan, group, timeout=20, **calls)
    except RuntimeError as error:
        return str(error)
    return "bound"


def test_ranks_that_cut_stages_differently_are_refused_at_bind(pool: RankPool) -> None:
    for message in pool.run(on_other_calls, plan_for("ring", 1, 3), ranks=3):
        assert "ranks disagree on the calls" in message and "bind with the same on every rank" in message


def of_another_version(group: dist.ProcessGroup, plan: Plan) -> str:
    if dist.get_rank(group) == 1:
        with patch("flexcp.executor.exchange.plan_agreement.VERSIONS", "9.9.9 77"):
            return bound(group, plan)
    return bound(group, plan)


def bound(group: dist.ProcessGroup, plan: Plan) -> str:
    try:
        flexcp.bind(plan, group, timeout=20)
    except RuntimeError as error:
        return str(error)
    return "bound"


def test_ranks_of_other_versions_are_refused_at_bind(pool: RankPool) -> None:
    for message in pool.run(of_another_version, plan_for("ring", 1, 3), ranks=3):
        assert "ranks run different flexcp" in message and "9.9.9 with plan format 77" in message
        assert f"{flexcp.__version__} with plan format {VERSION}" in message


@pytest.mark.parametrize("wrong", [{"rounds_per_call": -1}, {"rounds_per_call": 1.5}, {"chunk_bytes": 10}])
def test_calls_that_are_none_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        flexcp.bind(plan_for("dp", 1, 1), **wrong)


def test_tags_of_neighbours_differ() -> None:
    tags: Counter[int] = Counter()
    for step in (1, 2, 63):
        for number in (1, 2, 3, 1000):
            for backward in (False, True):
                for mask in range(3):
                    this = PassLabel(step, number, mask, "", backward, 9)
                    tags.update(this.tag(stage, call) for stage in range(12) for call in range(3))
    assert max(tags.values()) == 1 and min(tags) >= 0 and max(tags) < 1 << 31


def test_every_part_of_a_tag_has_room_of_its_own() -> None:
    """Check that every part of a tag keeps its values apart up to its largest, whatever the other parts are.

    The highest bit stays free.
    """
    largest = {"step": 31, "number": 1023, "backward": 1, "mask": 7, "stage": 127, "call": 15}

    def tag(parts: dict[str, int]) -> int:
        label = PassLabel(parts["step"], parts["number"], parts["mask"], "", bool(parts["backward"]), 9)
        return label.tag(parts["stage"], parts["call"])

    nothing = dict.fromkeys(largest, 0)
    alone = {name: {tag({**nothing, name: value}) for value in range(most + 1)} for name, most in largest.items()}
    assert [len(found) for found in alone.values()] == [most + 1 for most in largest.values()]
    assert sum(max(found) for found in alone.values()) == tag(largest) == (1 << 30) - 1
    assert tag(nothing) == 0 and tag({**nothing, "number": 1024 + 5}) == tag({**nothing, "number": 5})


def test_a_pass_that_breaks_off_says_why_and_leaves_a_note_unless_an_exchange_did() -> None:
    label = PassLabel(1, 2, 0, "full", False, 1)
    for error, reason, left in (
        (ExchangeError("rank 3 is late"), "rank 3 is late", []),
        (ValueError("wrong"), f"{label} ended with ValueError('wrong')", [f"{label} ended with ValueError('wrong')"]),
    ):
        failed: list[str] = []
        said: list[str] = []
        notes: Any = SimpleNamespace(leave=lambda text, blamed, seconds, said=said: said.append(text))
        group: Any = object()
        for wire in (
            Wire(group, [], timedelta(seconds=8), notes, failed.append),
            Wire(group, [], timedelta(seconds=8), None, failed.append),
            Wire(None, [], timedelta(seconds=8), notes, failed.append),
        ):
            with pytest.raises(type(error)), HostExchange(wire, label, ()):
                raise error
        assert failed == [reason] * 2 and said == left


def test_on_a_device_a_stage_waits_for_its_own_calls_and_the_end_for_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the order of operations under NCCL, with calls that are only recorded.

    Receives are posted before sends, and before the messages of each kind one stamp for each peer.
    """
    posted: list[list[tuple[str, int, int]]] = []
    waited: list[int] = []
    label = PassLabel(1, 1, 0, "", False, 2)

    def start(group: None, receives: list[Message], sends: list[Message]) -> list[Any]:
        operations = []
        for kind, messages in (("receive", receives), ("send", sends)):
            for message, peer in messages:
                is_stamp = message.dtype == torch.int64
                if is_stamp:
                    message.fill_(label.stamp)
                operations.append((f"{kind} stamp" if is_stamp else kind, peer, message.numel()))
        posted.append(operations)
        number = len(posted)
        return [SimpleNamespace(wait=lambda: waited.append(number)) for _ in operations]

    monkeypatch.setattr(transports, "start_together", start)
    sent = [0] * 3
    both = Call(0, receives=(MessageRange(1, 0, 3),), sends=(MessageRange(2, 2, 9),))
    calls = ((both, Call(0, receives=(MessageRange(2, 0, 1),), sends=())), (both,))
    exchange = DeviceExchange(Wire(None, sent, timedelta(seconds=9), None, lambda reason: None), label, calls)
    for stage in (0, 1):
        buffers = Buffers.alone([(1, 10), (2, 10)], torch.device("cpu"))
        exchange.post(stage, buffers, buffers)
    assert posted == [
        [("receive stamp", 1, 1), ("receive", 1, 3), ("send stamp", 2, 1), ("send", 2, 7)],
        [("receive stamp", 2, 1), ("receive", 2, 1)],
        [("receive", 1, 3), ("send", 2, 7)],
    ]
    assert sent == [0, 0, 14]
    everything = [1] * 4 + [2] * 2 + [3] * 2
    assert exchange.arrived(0) is not None and exchange.arrived(0) is None and waited == everything[:6]
    exchange.finish()
    assert waited == everything, "only for the stage that was not waited for"
    assert exchange.arrived(1) is buffers and waited == everything


def test_what_was_posted_before_a_call_fails_is_kept_until_it_was_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[int] = []

    def start(group: None, receives: list[Message], sends: list[Message]) -> list[Any]:
        if len(sends) + len(receives) == 1:
            raise RuntimeError("the network is down")
        return [SimpleNamespace(wait=lambda: waited.append(1))]

    monkeypatch.setattr(transports, "start_together", start)
    label = PassLabel(1, 1, 0, "", False, 2)
    calls = ((Call(0, (), (MessageRange(2, 0, 5),)), Call(1, (), (MessageRange(2, 5, 9),))),)
    exchange = DeviceExchange(Wire(None, [0] * 3, timedelta(seconds=9), None, lambda reason: None), label, calls)
    buffers = Buffers.alone([(2, 9)], torch.device("cpu"))
    with pytest.raises(ExchangeError, match=r"stage 0 of 2 of the forward.*the network is down"):
        exchange.post(0, buffers, Buffers.alone([], torch.device("cpu")))
    exchange.finish()
    assert waited == [1], "the first call, with its stamp, is under way"


class Late:
    """A message that is complete at time ``at``; waiting for it moves the clock there, or times out."""

    def __init__(self, clock: list[float], at: float) -> None:
        self.clock, self.at = clock, at

    def wait(self, timeout: timedelta) -> None:
        end = self.clock[0] + timeout.total_seconds()
        self.clock[0] = min(self.at, end)
        if self.at > end:
            raise RuntimeError("Timed out waiting for it")


@pytest.mark.parametrize("way", ["receives", "sends", "receives and sends"])
def test_messages_that_trickle_in_share_one_limit(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    clock = [0.0]
    monkeypatch.setattr("flexcp.executor.exchange.transports.time", SimpleNamespace(monotonic=lambda: clock[0]))

    class Trickling(HostExchange):
        def receive(self, message: torch.Tensor, peer: int, tag: int) -> Any:
            return Late(clock, 5.0 * peer if "receives" in way else 0.0)

        def send(self, message: torch.Tensor, peer: int, tag: int) -> Any:
            return Late(clock, {"receives": 0.0, "sends": 5.0 * peer}.get(way, 10.0))

    wire = Wire(None, [0] * 4, timedelta(seconds=10), None, lambda reason: None)
    parts = {"receives": (1, 2, 3), "sends": (1, 2, 3), "receives and sends": (1,)}[way]
    ranges = tuple(MessageRange(p, 0, 1) for p in parts)
    exchange = Trickling(wire, PassLabel(1, 1, 0, "", False, 1), ((Call(0, ranges, ranges),),))
    buffers = Buffers.alone([(peer, 1) for peer in (1, 2, 3)], torch.device("cpu"))
    exchange.post(0, buffers, buffers)  # messages are sent while others arrive
    with pytest.raises(ExchangeError, match=r"nothing within 8 s \(of 10 s"):
        exchange.arrived(0)
    assert clock[0] == 8.0


def test_a_stage_is_waited_for_until_its_own_messages_have_left() -> None:
    waited: list[str] = []

    class Noting(HostExchange):
        def receive(self, message: torch.Tensor, peer: int, tag: int) -> Any:
            return SimpleNamespace(wait=lambda limit: waited.append(f"from {peer}"))

        def send(self, message: torch.Tensor, peer: int, tag: int) -> Any:
            return SimpleNamespace(wait=lambda limit: waited.append(f"to {peer}"))

    wire = Wire(None, [0] * 3, timedelta(seconds=10), None, lambda reason: None)
    calls = (
        (),
        (Call(0, (MessageRange(1, 0, 1),), (MessageRange(2, 0, 1),)),),
        (Call(0, (), (MessageRange(1, 0, 1),)),),
    )
    exchange = Noting(wire, PassLabel(1, 1, 0, "", False, 3), calls)
    for stage in (1, 2):
        buffers = Buffers.alone([(1, 1), (2, 1)], torch.device("cpu"))
        exchange.post(stage, buffers, buffers)
    exchange.arrived(1)
    assert waited == ["from 1", "to 2"]
    exchange.arrived(2)
    assert waited[2:] == ["to 1"]


def test_a_call_is_posted_when_the_one_before_it_is_done_both_ways() -> None:
    """Calls limit which ranks send at the same time, so a call must not begin while another one is still sending."""
    done: list[str] = []

    class Noting(HostExchange):
        def receive(self, message: torch.Tensor, peer: int, tag: int) -> Any:
            done.append(f"receive {len(message)}")
            return SimpleNamespace(wait=lambda limit: done.append(f"received {len(message)}"))

        def send(self, message: torch.Tensor, peer: int, tag: int) -> Any:
            done.append(f"send {len(message)}")
            return SimpleNamespace(wait=lambda limit: done.append(f"sent {len(message)}"))

    wire = Wire(None, [0] * 3, timedelta(seconds=10), None, lambda reason: None)
    ranges = [(0, 1), (1, 3), (3, 6)]
    calls = (tuple(Call(n, (MessageRange(1, *r),), (MessageRange(2, *r),)) for n, r in enumerate(ranges)),)
    exchange = Noting(wire, PassLabel(1, 1, 0, "", False, 1), calls)
    buffers = Buffers.alone([(1, 6), (2, 6)], torch.device("cpu"))
    exchange.post(0, buffers, buffers)
    assert exchange.arrived(0) is buffers and wire.sent == [0, 0, 6]
    assert done == [f"{what} {size}" for size in (1, 2, 3) for what in ("receive", "send", "received", "sent")]


def test_the_end_of_a_pass_waits_for_what_was_sent_and_never_asked_for() -> None:
    waited: list[str] = []

    class Noting(HostExchange):
        def send(self, message: torch.Tensor, peer: int, tag: int) -> Any:
            return SimpleNamespace(wait=lambda limit: waited.append(f"to {peer}"))

    wire = Wire(None, [0] * 3, timedelta(seconds=10), None, lambda reason: None)
    exchange = Noting(wire, PassLabel(1, 1, 0, "", False, 1), ((Call(0, (), (MessageRange(2, 0, 1),)),),))
    exchange.post(0, *[Buffers.alone([(2, 1)], torch.device("cpu"))] * 2)
    assert not waited
    exchange.finish()
    assert waited == ["to 2"]


def on_connect(group: dist.ProcessGroup, plan: Plan) -> tuple[list[tuple[int, int]], int, int]:
    told: list[tuple[int, int]] = []
    peers = plan.peers(dist.get_rank(group))
    limit = timedelta(seconds=30)
    first = connect(peers, group, torch.device("cpu"), limit, lambda done, everyone: told.append((done, everyone)))
    return told, first, connect(peers, group, torch.device("cpu"), limit)


def test_peers_are_met_once(pool: RankPool) -> None:
    plan = plan_for("zigzag:3", 2, 3)
    for told, first, again in pool.run(on_connect, plan, ranks=6):
        assert (first, again) == (2, 0) and told[0] == (0, 2) and told[-1] == (2, 2)


@pytest.mark.parametrize("way", ["cannot be read", "cannot be written", "stands still"])
def test_a_store_that_cannot_list_the_peers_is_named(way: str) -> None:
    class Store:
        def check(self, keys: list[str]) -> bool:
            if way == "cannot be written":
                return False
            if way == "stands still":
                time.sleep(3)
            raise dist.DistStoreError("connection lost")

        def set(self, key: str, value: str) -> None:
            raise dist.DistStoreError("connection lost")

    group = SimpleNamespace(get_group_store=Store)
    words = "does not answer within 0.1 s" if way == "stands still" else "the group's store failed: connection lost"
    with (
        patch.object(dist, "get_rank", lambda group: 0),
        patch.object(dist, "get_world_size", lambda group: 2),
        patch.object(connecting, "_meet", lambda peers, group, device: None),
        pytest.raises(RuntimeError, match=words),
    ):
        connect([1], group, torch.device("cpu"), timedelta(seconds=0.1))  # type: ignore[arg-type]


def test_a_question_that_is_never_answered_is_left_behind() -> None:
    with pytest.raises(TimeoutError, match=r"no answer within 0\.05 s"):
        within(0.05, lambda: time.sleep(1))
    with pytest.raises(ValueError, match="wrong"):
        within(5, lambda: (_ for _ in ()).throw(ValueError("wrong")))
    assert within(timedelta(seconds=5).total_seconds(), lambda: 3) == 3

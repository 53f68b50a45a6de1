"""Proves simulated training steps: bounds that no plan beats, useful work over time, and steps whose parts add up to
what was counted by hand.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import flexcp
from flexcp.batch import make_batch
from flexcp.clusters import Cluster
from flexcp.cost import CostModel
from flexcp.data.lengths import draw_lengths
from flexcp.models.find import PRESETS, find_model
from flexcp.plan.plan import Plan
from flexcp.schedule.predict import predict
from flexcp.simulator.bounds import pass_bounds, unavoidable_bytes
from flexcp.simulator.passes import Rules
from flexcp.simulator.step_parts import Sync, Training
from flexcp.simulator.training import Simulation, simulate

CALM = Rules(contention=False)
LLAMA = find_model("llama3-8b")


def planned(strategy: str, lengths: list[int], machine: Cluster, layers: int = 1, **more: object) -> Plan:
    planner = flexcp.Planner(8, 4, 64, cluster=machine, strategy=strategy, model=LLAMA.model)
    return planner(lengths, masks={"all": (flexcp.causal(), layers)}, **more)  # type: ignore[arg-type]


@settings(max_examples=40)
@given(
    st.lists(st.one_of(st.integers(1, 6000), st.integers(1, 50)), min_size=1, max_size=4),
    st.sampled_from(["blocks", "zigzag", "allgather", "ulysses:2", "usp:2,2", "minheap:512", "dp"]),
    st.sampled_from([20, 500, 100_000]),
)
def test_no_plan_beats_the_bounds(lengths: list[int], strategy: str, mbps: int) -> None:
    machine = Cluster("any", 2, 2, gflops=100_000, intra_mbps=2 * mbps, inter_mbps=mbps, latency_ns=100)
    found = simulate(planned(strategy, lengths, machine), rules=CALM)
    for backward in (False, True):
        bounds = found.bounds(backward)
        assert bounds.floor == max(bounds.compute, bounds.link, bounds.granularity) > 0
    assert found.optimality >= 1 and found.pass_optimality(False) >= 1 and found.pass_optimality(True) >= 1
    assert 0 < found.mfu() < found.plan.cost.backward_efficiency / 1000 * 1.13


@pytest.mark.parametrize("strategy", ["blocks", "zigzag", "ulysses", "usp", "minheap:512", "hdp"])
@pytest.mark.parametrize("lengths", [[16_384], [9000, 7000], [16_000, *[300] * 5]], ids=len)
def test_every_plan_moves_what_is_unavoidable_and_it_is_no_small_share(strategy: str, lengths: list[int]) -> None:
    machine = flexcp.cluster("h100", 4, 8)
    shape = flexcp.Planner(64, 32, 128).shape
    plan = flexcp.Planner(64, 32, 128, cluster=machine, strategy=strategy)(lengths)
    areas, tokens = np.array([n * (n + 1) / 2 * 64 for n in lengths]), np.array(lengths, float)
    key, row = 512.0, 256 + 256 + 4.0
    least = unavoidable_bytes(areas, tokens, float(plan.work().max()), key, row, shape)
    assert least <= plan.bytes().sum()
    nodes = plan.work().reshape(4, 8).sum(axis=1).max()
    across = unavoidable_bytes(areas, tokens, float(nodes), key, row, shape)
    assert across <= plan.inter_node_bytes()
    if lengths == [16_384] and strategy in ("blocks", "ulysses"):
        assert least > plan.bytes().sum() / 8


def test_a_document_that_nobody_can_do_alone_must_move() -> None:
    batch = make_batch([1_000_000], flexcp.causal())
    shape = flexcp.Planner(64, 8, 128).shape
    found = [
        pass_bounds(batch, 0, shape, flexcp.cluster("h100", nodes, 8), CostModel(), backward)
        for nodes in (8, 32)
        for backward in (False, True)
    ]
    assert all(b.link > 0 for b in found)
    assert found[0].compute == pytest.approx(4 * found[2].compute, rel=1e-6)
    assert found[0].link < found[1].link  # backward also moves gradients
    # Documents that one rank can compute alone need no link.
    alone = pass_bounds(
        make_batch([4096] * 64, flexcp.causal()), 0, shape, flexcp.cluster("h100", 8, 8), CostModel(), False
    )
    assert alone.link < alone.compute == alone.floor
    # Slower links raise the bound past compute.
    slow = replace(flexcp.cluster("h100", 32, 8), inter_mbps=10, intra_mbps=10)
    assert pass_bounds(batch, 0, shape, slow, CostModel(), False).floor > found[2].compute


def test_the_least_work_there_is_is_a_bound() -> None:
    """A little work takes at least the start of a kernel, and a plan that divides the tiles of a long window must not
    appear to beat the bounds.
    """
    tiny = simulate(planned("dp", [100, 50], flexcp.cluster("h100", 1, 2)), rules=CALM)
    assert tiny.bounds(False).floor == tiny.bounds(False).granularity > tiny.plan.cost.kernel_ns
    assert 1 <= tiny.pass_optimality(False) < 1.2 and 1 <= tiny.optimality < 1.2
    fast = replace(flexcp.cluster("h100", 1, 2), speeds=(2000, 2000))
    assert 1 <= simulate(planned("dp", [1], fast), rules=CALM).optimality < 1.2
    planner = flexcp.Planner(8, 1, 128, cluster=flexcp.cluster("h100", 1, 8), strategy="blocks")
    window = simulate(planner([200_000], flexcp.window(128)), rules=CALM)
    bounds = window.bounds(False)
    assert window.pass_optimality(False) >= 1 and bounds.granularity < bounds.compute


def test_attention_alone_is_its_passes() -> None:
    machine = flexcp.cluster("h100", 1, 2)
    plan = planned("zigzag", [5000], machine, layers=3)
    found = simulate(plan, rules=CALM)
    forward, backward = (int(p.done.max()) for p in found.passes[0])
    assert found.attention_ns == 3 * (forward + backward) and found.pass_ns(True) == 3 * backward
    useful = 5000 * 5001 // 2 * 8 * 2 * 128
    assert found.tflops(False) == pytest.approx(useful / forward / 2 / 1000)
    assert found.mfu(True) == pytest.approx(useful * 2.5 / (2 * 989_000 * backward))
    assert found.exposed_ns == sum(3 * int(p.wait_ns[p.done.argmax()]) for p in found.passes[0])
    events = found.events()
    assert max(e.end for e in events) == forward + backward and min(e.begin for e in events) == 0


def test_the_closed_form_agrees_where_ranks_need_no_results_of_each_other() -> None:
    machine = flexcp.cluster("h100", 2, 4)
    for strategy in ("zigzag:4", "ulysses:4", "allgather:4", "usp:2,2"):
        plan = planned(strategy, [9000, 8000, 3000, 700], machine)
        short = predict(plan.placement, plan.shape, machine, plan.cost)
        found = simulate(plan, rules=Rules(contention=False, copy_mbps=0))
        assert found.attention_ns == pytest.approx(int((short.attention_ns + short.exposed_ns).max()), rel=0.06)


def test_a_step_of_one_rank_is_a_sum() -> None:
    machine = flexcp.cluster("h100", 1, 1)
    plan = planned("dp", [3000], machine, layers=5)
    found = simulate(plan, training=Training(LLAMA, "none"))
    linear = 5 * int(plan.cost.linear_ns(np.array([3000]), plan.shape, machine)[0])
    head = int(plan.cost.vocabulary_ns(np.array([3000]), LLAMA.head_flops_per_token, plan.shape, machine)[0])
    assert found.step is not None
    assert found.step.total_ns == found.attention_ns + linear + head
    assert (found.step.attention_ns, found.step.linear_ns) == (found.attention_ns, linear + head)
    assert found.step.wait_ns == found.step.sync_ns == 0


def step_ns(found: Simulation) -> int:
    assert found.step is not None
    return found.step.total_ns


def test_sync_costs_what_compute_does_not_hide() -> None:
    machine = flexcp.cluster("a100", 2, 2)
    plan = planned("zigzag", [4000], machine, layers=4)
    syncs: tuple[Sync, ...] = ("none", "fsdp", "allreduce")
    none, fsdp, reduce = (step_ns(simulate(plan, training=Training(LLAMA, sync))) for sync in syncs)
    bare = step_ns(simulate(plan, training=Training(LLAMA, "fsdp", overlap_permille=0)))
    assert none < reduce and none < fsdp < bare
    # All exposed: one gather forward and a gather and a scatter backward for each of 4 layers, the first gather, and a
    # gather and a scatter of embedding and head.
    layer, words = (
        int(plan.cost.link_ns(np.array([2 * weights // 4]), machine.inter_mbps)[0]) + machine.latency_ns
        for weights in (LLAMA.layer_parameters, 2 * LLAMA.vocabulary * LLAMA.model.hidden)
    )
    assert bare - none == pytest.approx(layer * (4 * 3 + 1) + 2 * words, rel=0.01)


@pytest.mark.parametrize("overlap", [1000, 0])
def test_sync_knows_the_weights_of_the_vocabulary(overlap: int) -> None:
    """The embedding's gradients are the last of an all-reduce, so they are exposed; the head's too if nothing is
    overlapped.
    """
    machine = flexcp.cluster("a100", 2, 2)
    plan = planned("zigzag", [4000], machine, layers=4)
    few, many = (replace(LLAMA, vocabulary=words) for words in (1000, 1000 + 2**17))
    less, more = (simulate(plan, training=Training(model, "allreduce", overlap)).step for model in (few, many))
    assert less is not None and more is not None
    size = 2 * 2**17 * LLAMA.model.hidden // 4
    expected = 2 * int(plan.cost.link_ns(np.array([size]), machine.inter_mbps)[0]) * (2 if overlap == 0 else 1)
    assert more.sync_ns - less.sync_ns == pytest.approx(expected, rel=0.001)
    syncs: tuple[Sync, ...] = ("allreduce", "fsdp")
    for sync in syncs:
        tied, apart = (simulate(plan, training=Training(replace(many, tied=t), sync, 0)).step for t in (True, False))
        assert tied is not None and apart is not None
        assert apart.sync_ns - tied.sync_ns == pytest.approx(expected / (2 if overlap == 0 else 1), rel=0.02)


@pytest.mark.parametrize("sync", ["fsdp", "allreduce", "none"])
@pytest.mark.parametrize("name", ["h100:2x4", "a100:2x2", "h100:1x4"])
@pytest.mark.parametrize("strategy", ["groups", "blocks", "zigzag:2", "ulysses:4", "dp", "minheap:512", "hdp"])
def test_the_parts_of_a_step_add_up_to_it(strategy: str, name: str, sync: Sync) -> None:
    """Holds also where another rank is slowest backward than forward, and where ranks wait for weights
    of slower ranks.
    """
    plan = planned(strategy, draw_lengths("libra256k", 32_768, 1), flexcp.cluster(name), layers=9)
    for overlap, tp in ((1000, 1), (0, 2)):
        step = simulate(plan, training=Training(LLAMA, sync, overlap, tp)).step
        assert step is not None and step.ranks.min() >= 0
        assert step.attention_ns + step.wait_ns + step.linear_ns + step.sync_ns == step.total_ns
        assert step.ranks.sum(axis=0).max() == step.total_ns
        assert sync != "none" or step.ranks[3].max() == 0


@pytest.mark.parametrize("sync", ["fsdp", "none"])
@pytest.mark.parametrize("strategy", ["groups", "blocks", "dp", "zigzag:2", "minheap:512"])
def test_two_layers_stand_for_all(strategy: str, sync: Sync, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compares two simulated layers with all layers simulated; without messages and sync, ranks are independent and the
    times are equal.
    """
    layers = 12
    plan = planned(strategy, draw_lengths("libra256k", 65_536, 1), flexcp.cluster("h100", 2, 4), layers)
    short = step_ns(simulate(plan, training=Training(LLAMA, sync)))
    monkeypatch.setattr("flexcp.simulator.training.SIMULATED_LAYERS", layers)
    every = step_ns(simulate(plan, training=Training(LLAMA, sync)))
    assert short == pytest.approx(every, rel=1e-9 if strategy == "dp" and sync == "none" else 0.03)


def test_ranks_that_exchange_nothing_do_not_wait_for_each_other() -> None:
    """One rank has a long document, the other more tokens; each takes the sum of its own layers."""
    machine = flexcp.cluster("h100", 1, 2)
    plan = planned("dp", [9000, *[100] * 120], machine, layers=7)
    step = simulate(plan, training=Training(LLAMA, "none")).step
    alone = [simulate(plan, rules=CALM).passes[0][way].compute_ns for way in (False, True)]
    assert step is not None
    linear = 7 * plan.cost.linear_ns(plan.placement.tokens, plan.shape, machine)
    head = plan.cost.vocabulary_ns(plan.placement.tokens, LLAMA.head_flops_per_token, plan.shape, machine)
    assert step.ranks[1].max() == 0 and (step.ranks[0] == 7 * (alone[0] + alone[1])).all()
    assert (step.ranks[2] == linear + head).all() and step.total_ns == step.ranks.sum(axis=0).max()


def test_no_rank_is_a_whole_layer_ahead_of_the_weights() -> None:
    plan = planned("dp", [20_000, 10], flexcp.cluster("h100", 1, 2), layers=7)
    syncs: tuple[Sync, ...] = ("none", "fsdp")
    free, gathered = (simulate(plan, training=Training(LLAMA, sync)).step for sync in syncs)
    assert free is not None and gathered is not None
    slow, fast = gathered.ranks.sum(axis=0)
    backward = (
        simulate(plan).passes[0][1].done.max() + plan.cost.linear_ns(np.array([20_000]), LLAMA.shape, plan.cluster)[0]
    )
    head = plan.cost.vocabulary_ns(plan.placement.tokens, LLAMA.head_flops_per_token, plan.shape, plan.cluster)
    assert slow - head[0] - (fast - head[1]) < backward, "the fast rank waits for weights that need the slow one"
    assert gathered.ranks[1, 1] > 0.8 * fast, "it waits for a rank, not for a link"
    assert free.ranks[:, 1].sum() < 0.1 * slow


def test_ranks_that_need_results_of_each_other_wait() -> None:
    """Unequal tokens balance the sum of attention and the rest of each layer, but that rest waits for results of
    other ranks.
    """
    planner = flexcp.Planner(32, 8, cluster=flexcp.cluster("h100", 1, 8), strategy="blocks", model=LLAMA.model)
    lengths, masks = draw_lengths("libra256k", 65_536), {"all": (flexcp.causal(), 8)}
    priced, equal = (planner(lengths, masks=masks, tokens=tokens) for tokens in ("priced", "equal"))
    assert priced.placement.tokens.max() > 1.2 * priced.placement.tokens.mean()
    found, even = (simulate(p, rules=CALM, training=Training(LLAMA, "none")) for p in (priced, equal))
    assert found.step is not None and found.step.wait_ns > 0
    assert step_ns(found) > 1.05 * step_ns(even)


def test_presets_have_their_sizes() -> None:
    billions = {name: preset.parameters / 1e9 for name, preset in PRESETS.items()}
    expected = {"llama3-8b": 8.0, "llama3-70b": 70.6, "gpt-8b": 6.0, "qwen3-30b-a3b": 30.5, "qwen2.5-vl-7b": 7.6}
    assert billions == pytest.approx(expected, rel=0.03)
    with pytest.raises(ValueError, match=r"unknown model 'llama3-8'.*did you mean 'llama3-8b'"):
        find_model("llama3-8")

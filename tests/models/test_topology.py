"""Tests of what tensor and pipeline parallelism leave to context parallelism, against counts by hand: ranks, heads,
ports, layers and FLOPs.
"""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

import flexcp
from flexcp.clusters import cluster
from flexcp.cost import dense_model
from flexcp.masks import causal, window
from flexcp.models.find import find_model
from flexcp.models.preset import Preset
from flexcp.models.topology import divided_preset, topology
from flexcp.shape import Shape
from flexcp.simulator.step_parts import Training
from flexcp.simulator.training import simulate

LLAMA, QWEN = find_model("llama3-8b"), find_model("qwen3-30b-a3b")
EIGHT = cluster("h100:4x8")


def test_tp8_of_8_kv_heads_leaves_one_and_one_rank_a_node() -> None:
    found = topology(EIGHT, Shape(32, 8, 128, 128), tp=8)
    assert (found.cluster.nodes, found.cluster.ranks_per_node) == (4, 1)
    assert (found.shape.heads, found.shape.kv_heads) == (4, 1)


def test_tp4_of_4_kv_heads_leaves_one_and_two_ranks_a_node() -> None:
    found = topology(EIGHT, Shape(32, 4, 128, 128), tp=4)
    assert (found.cluster.nodes, found.cluster.ranks_per_node) == (4, 2)
    assert (found.shape.heads, found.shape.kv_heads) == (8, 1)


def test_a_rank_keeps_the_port_of_one_gpu() -> None:
    """Under tp 8, the eight context-parallel groups of a node share its eight ports, so each group has one port."""
    found = topology(cluster("a100:4x8"), Shape(32, 8, 128, 128), tp=8).cluster
    assert found == replace(cluster("a100:4x8"), ranks_per_node=1)


def test_fewer_kv_heads_than_tp_are_replicated() -> None:
    assert topology(EIGHT, Shape(32, 4, 128, 128), tp=8).shape == Shape(4, 1, 128, 128)
    latent = Shape(32, 1, 192, 128, latent=576)
    assert topology(EIGHT, latent, tp=8).shape == replace(latent, heads=4)


def test_one_of_each_changes_nothing() -> None:
    shape = Shape(32, 8, 128, 128)
    found = topology(EIGHT, shape)
    assert (found.cluster, found.shape, found.model) == (EIGHT, shape, None)
    assert divided_preset(LLAMA) == LLAMA


@pytest.mark.parametrize(("pp", "shape"), [(2, (2, 8)), (4, (1, 8)), (8, (1, 4)), (32, (1, 1))])
def test_stages_span_whole_nodes_or_parts_of_one(pp: int, shape: tuple[int, int]) -> None:
    found = topology(EIGHT, LLAMA.shape, pp=pp).cluster
    assert (found.nodes, found.ranks_per_node) == shape


def test_a_rank_is_as_slow_as_the_slowest_gpu_of_its_group_and_of_all_stages() -> None:
    speeds = [1.0] * 16
    speeds[3], speeds[9] = 0.9, 0.8  # second group of the first stage; first group of the second
    found = topology(cluster("h100", 2, 8, speeds), LLAMA.shape, tp=2, pp=2).cluster
    assert found.speeds == (800, 900, 1000, 1000)


def test_other_layers_are_divided() -> None:
    part = divided_preset(LLAMA, tp=8, pp=2)
    whole, divided = (p.model.linear_flops_per_token(p.shape) for p in (LLAMA, part))
    assert whole == 8 * divided and part.model.layers == 16
    assert 8 * part.layer_parameters == LLAMA.layer_parameters
    assert 8 * part.head_flops_per_token == LLAMA.head_flops_per_token


def test_the_model_that_is_assumed_is_that_of_all_heads() -> None:
    shape = Shape(32, 8, 128, 128)
    found = topology(EIGHT, shape, tp=8)
    assert found.model is not None
    assert found.model.linear_flops_per_token(found.shape) * 8 == dense_model(shape).linear_flops_per_token(shape)


def test_windows_and_experts_of_a_stage() -> None:
    mixed = Preset(replace(LLAMA.model, layers=36), LLAMA.shape, LLAMA.vocabulary, windows=((128, 18),))
    assert divided_preset(mixed, pp=4).masks() == {"full": (causal(), 5), "window": (window(127), 4)}
    part = divided_preset(QWEN, ep=8)
    assert (part.experts, part.model, part.shape) == (16, QWEN.model, QWEN.shape)


@pytest.mark.parametrize(
    ("degrees", "says"),
    [
        ({"tp": 3}, "tp=3 does not divide the 8 GPUs of a node of h100:4x8; tensor parallelism stays inside a node"),
        ({"pp": 3}, "stages of whole nodes or of equal parts of a node; stages that do: [1, 2, 4, 8, 16, 32]"),
        ({"pp": 16, "tp": 4}, "tp=4 does not divide the 2 GPUs that a stage has on a node of h100:4x8"),
        ({"tp": 0}, "tp is over how many ranks to divide, a whole number of at least 1; got 0"),
    ],
)
def test_gpus_that_do_not_divide_are_refused(degrees: dict[str, int], says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        topology(EIGHT, Shape(64, 8, 128, 128), **degrees)


def test_heads_layers_and_experts_that_do_not_divide_are_refused() -> None:
    with pytest.raises(
        ValueError, match=re.escape("tp=8 does not divide 28 query and 4 KV heads") + ".*" + re.escape("[1, 2, 4]")
    ):
        topology(EIGHT, Shape(28, 4, 128, 128), tp=8)
    with pytest.raises(ValueError, match="tp=8 does not divide 48 query and 6 KV heads"):
        topology(EIGHT, Shape(48, 6, 128, 128), tp=8)
    with pytest.raises(ValueError, match=re.escape("pp=3 does not divide the 32 layers of llama3-8b")):
        divided_preset(LLAMA, pp=3)
    # The degrees that the error names divide both GPUs and layers; 8 is not among them, because it does not divide 28.
    for pp in (3, 8):
        with pytest.raises(ValueError, match=re.escape("[1, 2, 4]")):
            topology(EIGHT, LLAMA.shape, replace(LLAMA.model, layers=28), pp=pp)
    with pytest.raises(ValueError, match="llama3-8b has no experts; leave ep out"):
        divided_preset(LLAMA, ep=2)
    with pytest.raises(ValueError, match="ep=3 does not divide the 128 experts of qwen3-30b-a3b"):
        divided_preset(QWEN, ep=3)


@pytest.mark.parametrize("tp", [3, 8, 28])
def test_degrees_that_are_named_pass_every_check(tp: int) -> None:
    shape = Shape(28, 4, 128, 128)
    with pytest.raises(ValueError, match=f"^tp={tp} does not divide") as found:
        topology(EIGHT, shape, tp=tp)
    named = re.findall(r"\d+", str(found.value).partition("use one of ")[2])
    assert [topology(EIGHT, shape, tp=int(degree)).shape.heads for degree in named] == [28, 14, 7]


def test_a_planner_takes_it_as_it_is() -> None:
    found = topology(EIGHT, LLAMA.shape, LLAMA.model, tp=8)
    planner = flexcp.Planner(**found.arguments, strategy="zigzag")
    plan = planner([4000, 500])
    assert (plan.ranks, plan.shape, plan.cluster) == (4, found.shape, found.cluster)
    assert planner.cost.model == found.model


def test_a_step_under_tensor_parallelism_has_its_collectives() -> None:
    part = divided_preset(LLAMA, tp=8)
    found = topology(EIGHT, LLAMA.shape, LLAMA.model, tp=8)
    plan = flexcp.Planner(**found.arguments, strategy="dp")([4096] * 4, masks={"mask": (causal(), 32)})
    alone, beside = (simulate(plan, training=Training(part, "none", tp=tp)).step for tp in (1, 8))
    assert alone is not None and beside is not None
    # Four all-reduces of 4,096 rows of 4,096 bf16 numbers; 2 * 7/8 of each goes through the port, plus start-up times.
    sent = 4 * 2 * 7 * 4096 * 4096 * 2 // 8
    each = -(-sent * 1000 // (450_000 * 800 // 1000)) + 8 * 10_000
    assert beside.total_ns - alone.total_ns == 32 * each == beside.linear_ns - alone.linear_ns

"""Tests that the released Megatron-Core trains under plans as stock Megatron does document by document on one rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from megatron_runs import GROUPS, HEADS, STEPS, Arrays, Case, alone, check, planned

import flexcp
from flexcp.frameworks import megatron as flex
from flexcp.measure.ranks import RankPool

LATENT = {
    "multi_latent_attention": True,
    "q_lora_rank": 16,
    "kv_lora_rank": 12,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 6,
    "rope_type": "rope",
    "num_query_groups": HEADS,
}
WINDOWS = {"window_size": (7, 0), "window_attn_skip_freq": 2, "softmax_type": "learnable"}
LONG = {
    "CP4": Case(cp=4),
    "CP2 x TP2": Case(cp=2, tp=2, strategy="blocks"),
    "CP2 x PP2": Case(cp=2, pp=2, micro_batches=3),
}
SHORT = {
    "windows and sinks": Case(cp=2, config=WINDOWS, tokens="priced"),
    "off by one": Case(config={"softmax_type": "off-by-one"}, strategy="zigzag"),
    "multi-latent": Case(config=LATENT),
}


@pytest.fixture(scope="module")
def stock(four: RankPool) -> tuple[list[float], Arrays, Arrays]:
    found: tuple[list[float], Arrays, Arrays] = four.run(alone, Case(), STEPS)[0]
    return found


@pytest.mark.parametrize("name", LONG)
def test_five_steps_equal_stock_megatron(four: RankPool, stock: tuple[list[float], Arrays, Arrays], name: str) -> None:
    case = LONG[name]
    results = four.run(planned, case, STEPS, stock[2])
    check(results, stock)
    for _, _, share in results:
        assert all(count % case.tp == 0 for count in share.counts)
    pools = [share.counts for _, _, share in results]
    assert all(counts == pools[0] for counts in pools)  # all ranks that share a plan hold equally many tokens
    if case.pp > 1:
        assert len(set(pools[0])) > 1  # and the count differs between micro-batches


@pytest.mark.parametrize("name", SHORT)
def test_what_a_layer_may_be_is_honoured(four: RankPool, name: str) -> None:
    case = SHORT[name]
    own = four.run(alone, case, 2)[0]
    check(four.run(planned, case, 2, own[2]), own)


# --- without ranks ----------------------------------------------------------------------------------------------------


def config(**more: Any) -> Any:
    usual = {"num_layers": 4, "hidden_size": 32, "num_attention_heads": HEADS, "num_query_groups": GROUPS}
    return TransformerConfig(**usual | {"calculate_per_token_loss": True, "attention_dropout": 0.0} | more)


def core(**more: Any) -> Any:
    return flex.PlannedAttention(config(**more), 1, AttnMaskType.causal, "self")


def test_a_planner_counts_the_heads_of_a_tensor_slice() -> None:
    shape = flex.planner(config(tensor_model_parallel_size=2, bf16=True), flexcp.cluster("h100", 1, 4)).shape
    assert (shape.heads, shape.kv_heads, shape.head_dim, shape.dtype) == (HEADS // 2, GROUPS // 2, 8, "bfloat16")
    assert flex.planner(config(tensor_model_parallel_size=4), flexcp.cluster("h100", 1, 4)).shape.kv_heads == 1


def test_window_layers_become_a_second_mask() -> None:
    masks = flex.layer_masks(config(window_size=(7, 0), window_attn_skip_freq=4))
    assert masks == {"full": (flexcp.causal(), 1), "window": (flexcp.window(7, 0), 3)}
    assert flex.layer_masks(config()) == {"full": (flexcp.causal(), 4)}
    with pytest.raises(NotImplementedError, match="window layers together"):
        flex.layer_masks(config(window_size=(7, 0)), flexcp.full())


@pytest.mark.parametrize(
    ("more", "words"),
    [
        pytest.param({"qk_clip": True}, "qk_clip=True", id="clip"),
        pytest.param({"attention_dropout": 0.1}, "dropout", id="dropout"),
    ],
)
def test_what_a_plan_cannot_do_is_refused(more: dict[str, Any], words: str) -> None:
    with pytest.raises(NotImplementedError, match=words):
        layer = core(**more)
        step = flexcp.bind(flex.planner(config(**more), flexcp.cluster("cpu", 1, 1))([3]))
        q, kv = torch.zeros(3, 1, HEADS, 8), torch.zeros(3, 1, GROUPS, 8)
        layer(q, kv, kv, packed_seq_params=flex.PlannedSequences(step=step))


def test_losses_must_be_counted_per_token() -> None:
    with pytest.raises(ValueError, match="calculate_per_token_loss=True"):
        core(calculate_per_token_loss=False)


def test_a_mask_tensor_and_a_call_without_a_plan_are_refused() -> None:
    layer, x = core(), torch.zeros(3, 1, HEADS, 8)
    with pytest.raises(ValueError, match="got PackedSeqParams"):
        layer(x, x, x, packed_seq_params=PackedSeqParams())
    step = flexcp.bind(flex.planner(config(), flexcp.cluster("cpu", 1, 1))([3]))
    with pytest.raises(ValueError, match="attention_mask=None"):
        layer(x, x, x, torch.ones(3, 3), packed_seq_params=flex.PlannedSequences(step=step))


def test_a_spec_without_attention_is_refused() -> None:
    spec = get_gpt_layer_local_spec()
    assert flex.planned_spec(spec).submodules.self_attention.submodules.core_attention is flex.PlannedAttention
    assert spec.submodules.self_attention.submodules.core_attention is not flex.PlannedAttention
    with pytest.raises(NotImplementedError, match="self-attention"):
        flex.planned_spec(spec.submodules.mlp)

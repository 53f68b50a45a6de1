"""Tests that layers which would train wrongly on a rank's rows are refused by name: rotary embeddings whose frequencies
depend on the longest position, and layers that mix tokens by other means than attention.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from parallel_runs import logits_or_message
from transformers import AutoModelForCausalLM, PreTrainedConfig

import flexcp
from flexcp.frameworks import huggingface, multimodal
from flexcp.frameworks.huggingface_layers import refuse_unless_handled
from flexcp.measure.ranks import RankPool
from lib.model_runs import SIZES, make_config

LONG, SHORT = [40, 3, 1], [30, 3, 1]
THETA = {"rope_theta": 10_000.0}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0} | THETA
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0] * 4,
    "long_factor": [2.0, 3.0, 4.0, 5.0],
    "original_max_position_embeddings": 32,
    "factor": 4.0,
} | THETA
STATES = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": 16}


def gemma3_with(kind: str) -> PreTrainedConfig:
    """Return a Gemma 3 config, which has separate rotary parameters for each kind of layer."""
    of_kinds = {"full_attention": DYNAMIC, "sliding_attention": {"rope_type": "default"} | THETA}
    sizes = SIZES | {"max_position_embeddings": 32, "sliding_window": 7, "layer_types": [kind, "full_attention"]}
    return transformers.Gemma3TextConfig(**sizes, rope_parameters=of_kinds)


ROPES = {
    "dynamic": lambda: make_config("llama", max_position_embeddings=32, rope_parameters=DYNAMIC),
    "longrope": lambda: transformers.Phi3Config(
        **SIZES | {"max_position_embeddings": 128, "original_max_position_embeddings": 32},
        pad_token_id=0,
        rope_parameters=LONGROPE,
    ),
}


@pytest.mark.parametrize("kind", ROPES)
@pytest.mark.parametrize("on", [True, False])
def test_frequencies_by_the_longest_position_are_refused(pool: RankPool, kind: str, on: bool) -> None:
    for found in pool.run(logits_or_message, ROPES[kind](), LONG, on, ranks=2):
        assert isinstance(found, str)
        assert f"NotImplementedError: rope_type '{kind}' of {ROPES[kind]().model_type}" in found
        assert "has 40 tokens" in found
        assert "max_position_embeddings=32: the 2 ranks would use different frequencies" in found


@pytest.mark.parametrize("kind", ROPES)
def test_documents_of_the_original_length_have_the_same_frequencies_on_all_ranks(pool: RankPool, kind: str) -> None:
    torch.manual_seed(0)
    alone = AutoModelForCausalLM.from_config(ROPES[kind](), attn_implementation="eager")
    tokens = torch.arange(sum(SHORT)) % 64
    right = torch.cat([alone(t[None], use_cache=False).logits[0].detach() for t in tokens.split(SHORT)])
    for found in pool.run(logits_or_message, ROPES[kind](), SHORT, ranks=2):
        torch.testing.assert_close(found, right, atol=1e-5, rtol=1e-5)


def test_one_of_several_rotary_embeddings_is_enough(pool: RankPool) -> None:
    for found in pool.run(logits_or_message, gemma3_with("full_attention"), LONG, ranks=2):
        assert "rope_type 'dynamic' of gemma3_text" in found


def config_of(name: str, **fields: Any) -> PreTrainedConfig:
    return getattr(transformers, name)(**SIZES | fields)


HYBRIDS = {
    "conv": lambda: config_of("Lfm2Config", layer_types=["conv", "full_attention"]),
    "linear_attention": lambda: config_of("MiniMaxConfig", layer_types=["linear_attention", "full_attention"]),
    "mamba|linear_attention": lambda: config_of(
        "GraniteMoeHybridConfig", layer_types=["mamba", "attention"], num_local_experts=0, **STATES
    ),
    "recurrent": lambda: config_of(
        "RecurrentGemmaConfig", attention_window_size=9, lru_width=32, block_types=["recurrent", "attention"]
    ),
}


@pytest.mark.parametrize("words", HYBRIDS)
def test_layers_that_mix_tokens_by_other_means_are_refused(words: str) -> None:
    model = AutoModelForCausalLM.from_config(HYBRIDS[words]())
    before = model.config._attn_implementation
    says = rf"this model has layers of kind ({words}), which .*step\.relayout.*other_layers='handled'"
    for turn_on in (huggingface.turn_on, multimodal.turn_on):
        with pytest.raises(NotImplementedError, match=says):
            turn_on(model)
    assert model.config._attn_implementation == before, "nothing is turned on"
    huggingface.turn_on(model, other_layers="handled")
    huggingface.turn_on(model)  # as shared_forward does later
    assert model.config._attn_implementation == "flexcp"


def test_other_layers_are_refused_also_where_only_attention_is_replaced(pool: RankPool) -> None:
    for found in pool.run(logits_or_message, HYBRIDS["conv"](), SHORT, False, ranks=2):
        assert "Lfm2Attention: this model has layers of kind conv" in found


def test_layers_that_the_user_adapted_run() -> None:
    model = AutoModelForCausalLM.from_config(HYBRIDS["conv"]())
    huggingface.turn_on(model, other_layers="handled")
    planner = huggingface.planner(model, flexcp.cluster("cpu", 1, 1), strategy="blocks")
    step = flexcp.bind(planner([9], flexcp.causal()))
    assert model(**huggingface.inputs(torch.arange(9), step)).loss.isfinite()
    with pytest.raises(ValueError, match="other_layers is 'refused' or 'handled'; got 'mine'"):
        huggingface.turn_on(model, other_layers="mine")  # type: ignore[arg-type]


def test_a_family_of_hybrids_without_other_layers_is_accepted() -> None:
    """Granite 4.0 has models of the type granitemoehybrid whose layers are all attention."""
    config = config_of("GraniteMoeHybridConfig", layer_types=["attention"] * 2, num_local_experts=0, **STATES)
    model = AutoModelForCausalLM.from_config(config)
    huggingface.turn_on(model)
    assert model.config._attn_implementation == huggingface.NAME


def test_a_model_that_lists_no_kinds_is_known_by_its_type() -> None:
    model = torch.nn.Linear(1, 1)
    model.config = PreTrainedConfig()
    model.config.model_type = "jamba"
    with pytest.raises(NotImplementedError, match="this model has layers with a state"):
        refuse_unless_handled(model, "refused")


def test_layers_that_do_not_pass_the_step_on_are_named(pool: RankPool) -> None:
    config = config_of("NemotronConfig")
    for found in pool.run(logits_or_message, config, SHORT, ranks=2):
        assert "If the model was given a step, its layers do not pass keywords on to NemotronAttention" in found
    found = logits_or_message(None, config, SHORT, ranks=1)
    assert "was given to NemotronForCausalLM, but its layers do not pass keywords on to their attention" in found


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"global_head_dim": 16}, r"layers of gemma4_text differ in head_dim \(16, 8\)"),
        ({"global_head_dim": 8, "num_global_key_value_heads": 1}, r"differ in num_key_value_heads \(1, 2\)"),
    ],
)
def test_heads_that_differ_between_layers_are_refused(fields: dict[str, int], words: str) -> None:
    more = {"layer_types": ["sliding_attention", "full_attention"], "attention_k_eq_v": True}
    with pytest.raises(NotImplementedError, match=words):
        huggingface.planner(config_of("Gemma4TextConfig", **more, **fields), flexcp.cluster("cpu", 1, 1))
    alike = config_of("Gemma4TextConfig", **more, global_head_dim=8)
    assert huggingface.planner(alike, flexcp.cluster("cpu", 1, 1)).shape.head_dim == 8


def test_numbers_of_heads_in_a_list_are_compared() -> None:
    config = PreTrainedConfig(num_attention_heads=8, hidden_size=64, num_attention_heads_per_layer=[8, 4])
    with pytest.raises(NotImplementedError, match=r"differ in num_attention_heads \(4, 8\)"):
        huggingface.planner(config, flexcp.cluster("cpu", 1, 1))

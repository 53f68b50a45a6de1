"""Small ``config.json`` files: one of each model family as a user would write it, and changes of fields as users and
other families have them.
"""

from __future__ import annotations

import inspect
import re
import sys
from functools import cache
from importlib import import_module
from typing import Any

import transformers

from flexcp.models.config import SIZES
from flexcp.models.families import FAMILIES

WINDOW, GONE = 9, object()
NAMED = sorted(FAMILIES)
MIXED = ["sliding_attention", "full_attention"]
EIGHT = {"num_hidden_layers": 8}
CHANGES: dict[str, dict[str, Any]] = {
    "tied": {"tie_word_embeddings": True},
    "untied": {"tie_word_embeddings": False},
    "null tie": {"tie_word_embeddings": None},
    "no KV heads": {"num_key_value_heads": GONE},
    "null KV heads": {"num_key_value_heads": None},
    "other KV heads": {"num_key_value_heads": 2},
    "num_kv_heads": {"num_kv_heads": 2, "num_key_value_heads": GONE},
    "no head_dim": {"head_dim": GONE},
    "null head_dim": {"head_dim": None},
    "other head_dim": {"head_dim": 40},
    "no window": {"sliding_window": GONE},
    "null window": {"sliding_window": None},
    "window of 0": {"sliding_window": 0},
    "window": {"sliding_window": WINDOW},
    "window on": {"sliding_window": WINDOW, "use_sliding_window": True, "max_window_layers": 1},
    "window on from 0": {"sliding_window": WINDOW, "use_sliding_window": True, "max_window_layers": 0},
    "switch alone": {"sliding_window": GONE, "use_sliding_window": True, "max_window_layers": 1},
    "window off": {"sliding_window": WINDOW, "use_sliding_window": False, "max_window_layers": 1},
    "layer types": {"num_hidden_layers": 2, "sliding_window": WINDOW, "layer_types": MIXED},
    "layer types on": {
        "num_hidden_layers": 2,
        "sliding_window": WINDOW,
        "use_sliding_window": True,
        "layer_types": MIXED,
    },
    "layer types alone": {
        "num_hidden_layers": 2,
        "sliding_window": GONE,
        "use_sliding_window": True,
        "layer_types": MIXED,
    },
    "every third": {"sliding_window": WINDOW, "sliding_window_pattern": 3},
    "wider": {"intermediate_size": 240},
    "n_inner": {"n_inner": 240},
    "no width": {"intermediate_size": GONE, "n_inner": GONE, "ffn_dim": GONE, "ffn_hidden_size": GONE},
    "old names": {
        "n_embd": 96,
        "n_head": 4,
        "n_layer": 2,
        "hidden_size": GONE,
        "num_attention_heads": GONE,
        "num_hidden_layers": GONE,
    },
    "experts": {"num_experts": 12},
    "local experts": {"num_local_experts": 12},
    "no experts": {"num_experts": GONE, "num_local_experts": GONE, "n_routed_experts": GONE},
    "more experts a token": {"num_experts_per_tok": 3},
    "no experts a token": {"num_experts_per_tok": GONE},
    "no expert width": {"moe_intermediate_size": GONE},
    "shared experts": {
        "n_shared_experts": 2,
        "num_shared_experts": 2,
        "shared_expert_intermediate_size": 144,
        "shared_intermediate_size": 144,
    },
    "0 shared experts": {
        "n_shared_experts": 0,
        "num_shared_experts": 0,
        "shared_expert_intermediate_size": 0,
        "shared_intermediate_size": 0,
    },
    "no shared experts": {
        "n_shared_experts": GONE,
        "num_shared_experts": GONE,
        "shared_expert_intermediate_size": GONE,
        "shared_intermediate_size": GONE,
    },
    "dense first": EIGHT | {"first_k_dense_replace": 1},
    "dense by default": EIGHT | {"first_k_dense_replace": GONE},
    "dense kinds": EIGHT | {"mlp_layer_types": ["sparse"] * 7 + ["dense"]},
    "half dense": {"decoder_sparse_step": 2},
    "one dense": EIGHT | {"mlp_only_layers": [3]},
    "many queries": {"multi_query": False},
    "new falcon": {"new_decoder_architecture": True, "num_kv_heads": 2},
}


GROUPS = {"topk_group": 1, "n_group": 1}
ROTARY = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 4, 4]}}
EXTRA: dict[str, dict[str, Any]] = {
    "codegen": {"rotary_dim": 8},
    "dots1": GROUPS,
    "exaone_moe": GROUPS,
    "glm4_moe": GROUPS,
    "gptj": {"rotary_dim": 8},
    "helium": {"head_dim": 24},
    "solar_open": GROUPS,
    "qwen2_5_vl_text": ROTARY,
    "qwen2_vl_text": ROTARY,
}
"""Further fields that small models of a family need."""


def by_hand(family: str) -> dict[str, Any]:
    """Return a small file with the fields that a user would write."""
    found = FAMILIES[family]
    heads, hidden, layers = (names[0] for names in SIZES[found.sizes])
    # One layer more than the period of a window pattern, so that the place of the layer without a window matters.
    values = {
        "model_type": family,
        heads: 4,
        hidden: 96,
        layers: found.every + 1 if found.every else 2,
        "vocab_size": 80,
    }
    values |= {"pad_token_id": 0, "max_position_embeddings": 64, found.width: 192}
    if found.kv_heads in ("heads", "asked"):
        values["num_key_value_heads"] = 2
    if found.head_dim == "asked":
        values["head_dim"] = 32
    if found.window_asked:
        values["sliding_window"] = WINDOW
    if found.windows == "from" and found.window_asked:
        values["max_window_layers"] = 1
    if found.windows == "listed":
        values["layer_types"] = ["full_attention"] * 2
    if found.experts is not None:
        experts = found.experts
        values |= {experts.count[0]: 8, experts.width[0]: 72, experts.per_token[0]: 2}
        values |= {"first_k_dense_replace": 0} if experts.dense_first is not None else {}
        values |= {experts.shared_count: 1} if experts.shared_count else {}
        values |= {experts.shared_width: 72} if experts.shared_width else {}
    return values | EXTRA.get(family, {})


def changed(values: dict[str, Any], change: str) -> dict[str, Any]:
    """Return a file after a change; ``layer_types`` are cut or repeated to the number of layers."""
    found = {name: value for name, value in {**values, **CHANGES[change]}.items() if value is not GONE}
    kinds, layers = found.get("layer_types"), found.get("num_hidden_layers")
    if kinds is not None and "layer_types" not in CHANGES[change] and layers is not None:
        found["layer_types"] = (kinds * layers)[:layers]
    return found


def concerns(change: str, family: str) -> bool:
    """Whether a family's file, or its code in Transformers, has one of the fields that a change is about."""
    names = set(CHANGES[change]) - {"num_hidden_layers"}
    return not names.isdisjoint(by_hand(family)) or any(re.search(rf"\b{name}\b", _code(family)) for name in names)


@cache
def _code(family: str) -> str:
    module = transformers.CONFIG_MAPPING[family].__module__
    for name in (module, module.replace(".configuration_", ".modeling_")):
        import_module(name)
    # Whether matrices are tied is a field of every configuration.
    sources = [
        inspect.getsource(sys.modules[name]) for name in (module, module.replace(".configuration_", ".modeling_"))
    ]
    return "\n".join([*sources, "tie_word_embeddings"])

"""The leak probe: which logits of a model change when one packed document changes; light to import (see
parallel_runs.py).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import flexcp
from lib.model_runs import FAMILIES, SIZES, WINDOW

LENGTHS = [11, 17, 1, 24]
PERTURBED = 1
MODELS: dict[str, tuple[str, dict[str, Any]]] = FAMILIES | {
    "qwen3 with windows": (
        "Qwen3Config",
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    ),
    "llama4": (
        "Llama4TextConfig",
        {
            "attention_chunk_size": 8,
            "no_rope_layers": [1, 0],
            "floor_scale": 4,
            "attn_scale": 1.0,
            "initializer_range": 0.2,
            "num_local_experts": 2,
            "intermediate_size_mlp": 48,
            "moe_layers": [0],
        },
    ),
    "gemma3": ("Gemma3TextConfig", {"sliding_window": WINDOW, "query_pre_attn_scalar": 8, "sliding_window_pattern": 2}),
}


def made(family: str) -> Any:
    """Return a tiny model in float64, with the same weights in every call."""
    import transformers

    name, special = MODELS[family]
    torch.manual_seed(0)
    config = getattr(transformers, name)(**(SIZES | special))
    return transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", experts_implementation="eager", dtype=torch.float64
    ).eval()


def documents() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(SIZES["vocab_size"], (n,), generator=generator) for n in LENGTHS]


def perturbed() -> list[Tensor]:
    """Return the same documents, with all tokens of one of them changed."""
    return [(x + 1) % SIZES["vocab_size"] if i == PERTURBED else x for i, x in enumerate(documents())]


def logits_alone(family: str) -> Tensor:
    """Return logits of all documents, each run alone with Transformers' own attention."""
    model = made(family)
    with torch.no_grad():
        return torch.cat([model(x[None], use_cache=False).logits[0] for x in documents()])


def logits_on_ranks(group: dist.ProcessGroup, family: str) -> tuple[Tensor, Tensor]:
    """Return logits of the whole packed stream, gathered from all ranks, before and after the change."""
    from flexcp.frameworks import huggingface

    model = made(family)
    huggingface.turn_on(model)
    planner = huggingface.planner(model, flexcp.cluster("cpu", 1, group.size()), strategy="blocks")
    plan = planner(LENGTHS, masks=huggingface.masks(model.config))
    found = []
    for stream in (documents(), perturbed()):
        step = flexcp.bind(plan, group)
        with torch.no_grad():
            local = model(**huggingface.inputs(torch.cat(stream), step)).logits[0][: step.local_tokens]
        found.append(step.gather(local))
    return found[0], found[1]

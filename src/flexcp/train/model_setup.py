"""Model setup: a model to train with its planner and masks, from our own code or from Hugging Face.

``gpt`` is our small GPT. Any other name is a Hugging Face configuration, a file or a folder with ``config.json``, and
gets random weights.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flexcp.batch import MaskLike
from flexcp.clusters import Cluster
from flexcp.executor.attention import attention
from flexcp.executor.step import Step
from flexcp.masks import causal
from flexcp.planner import Planner
from flexcp.train.gpt import Gpt, GptConfig

HELD = 4
"""Tensors of a model's size that a rank holds: weights, gradients and two moments of AdamW."""


@dataclass(frozen=True)
class Trainee:
    """A model to train, its planner, and its masks as {name: (mask, number of layers)}.

    ``logits(tokens, step)`` returns the logits of this rank's rows; ``tokens`` are the ids of the whole stream.
    """

    model: nn.Module
    logits: Callable[[Tensor, Step], Tensor]
    planner: Planner
    masks: dict[str, tuple[MaskLike, int]]
    vocabulary: int


def make_trainee(
    name: str, dtype: str, device: torch.device, cluster: Cluster, strategy: str, sizes: Mapping[str, int]
) -> Trainee:
    """Make the model ``name`` with the same weights on every rank; ``sizes`` apply to ``gpt`` only.

    ``dtype`` is the name of a torch dtype. Raises ValueError for a Hugging Face model that is too large for the memory,
    or if transformers is not installed.
    """
    torch.manual_seed(0)
    return (
        _gpt(dtype, device, cluster, strategy, sizes)
        if name == "gpt"
        else _huggingface(name, dtype, device, cluster, strategy)
    )


def refuse_too_large(name: str, weights: int, size: int, ranks: int, memory: int) -> None:
    """Raise ValueError if ``ranks`` ranks cannot hold a model of ``weights`` weights together in ``memory`` bytes.

    Each rank holds the whole model with gradients and optimizer state; a weight has ``size`` bytes.
    """
    need = HELD * weights * size * ranks
    if need > memory:
        raise ValueError(
            f"{name} is too large to train here: every rank holds the whole model of {weights / 1e9:.1f} billion "
            f"parameters, its gradients and AdamW's moments, {need / 1e9:,.0f} GB on {ranks} "
            f"rank{'s' * (ranks > 1)}, and there are {memory / 1e9:,.0f} GB of memory; give the config.json of a "
            "smaller model"
        )


def _memory(device: torch.device) -> int:
    """Return the bytes of memory that a device has in all; all CPU ranks share the machine's."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _gpt(dtype: str, device: torch.device, cluster: Cluster, strategy: str, sizes: Mapping[str, int]) -> Trainee:
    config = GptConfig(**sizes)
    model = Gpt(config).to(device, getattr(torch, dtype))

    def logits(tokens: Tensor, step: Step) -> Tensor:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out = attention(q, k, v, step)
            assert isinstance(out, Tensor)
            return out

        found: Tensor = model(step.shard(tokens), step.positions.to(device), attend)
        return found

    planner = Planner(config.heads, config.kv_heads, config.head_dim, dtype=dtype, cluster=cluster, strategy=strategy)
    return Trainee(model, logits, planner, {"causal": (causal(), config.layers)}, config.vocabulary)


def _huggingface(name: str, dtype: str, device: torch.device, cluster: Cluster, strategy: str) -> Trainee:
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError:
        raise ValueError("a Hugging Face configuration needs transformers: pip install flexcp[huggingface]") from None
    from flexcp.frameworks import huggingface

    config: Any = AutoConfig.from_pretrained(name)
    with torch.device("meta"):
        weights = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    memory, ranks = _memory(device), 1 if device.type == "cuda" else cluster.ranks
    refuse_too_large(name, weights, getattr(torch, dtype).itemsize, ranks, memory)
    huggingface.register()
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype), attn_implementation=huggingface.NAME)
    model.to(device)
    huggingface.turn_on(model)

    def logits(tokens: Tensor, step: Step) -> Tensor:
        given = huggingface.inputs(tokens, step)
        del given["labels"]  # the training loop computes the loss itself
        found: Tensor = model(**given).logits.flatten(0, 1)
        return found if step.local_tokens else found[:0]

    planner = huggingface.planner(config, cluster, dtype, strategy=strategy)
    return Trainee(model, logits, planner, huggingface.masks(config), int(config.vocab_size))

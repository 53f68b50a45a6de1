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
from flexcp.train.documents import Documents
from flexcp.train.gpt import Gpt, GptConfig

HELD = 4
"""Tensors of a model's size that a rank holds: weights, gradients and two moments of AdamW."""
USUAL = "max_position_embeddings"
"""The usual name of the number of positions in a configuration of Transformers; GPT-2's is ``n_positions``."""
MOST_QUOTED = 200
"""The most characters that are quoted of an error message of Transformers."""


@dataclass(frozen=True)
class Outline:
    """A model to train without its weights: what is known of it before any weight is made.

    ``config`` is a ``GptConfig`` or a configuration of Transformers, ``planner`` plans its attention, ``masks`` are
    those of its layers as {name: (mask, number of layers)}, and ``vocabulary`` is its number of token ids.
    ``learned`` is, for a model with a table of learned positions, the configuration's name for their number, and the
    number, as in ``("n_positions", 1024)``; None for a model without such a table.
    """

    config: Any
    planner: Planner
    masks: dict[str, tuple[MaskLike, int]]
    vocabulary: int
    learned: tuple[str, int] | None = None


@dataclass(frozen=True)
class Trainee:
    """A model to train, with weights, and the :class:`Outline` that it was made from.

    ``logits(tokens, step)`` returns the logits of this rank's rows; ``tokens`` are the ids of the whole stream.
    """

    model: nn.Module
    logits: Callable[[Tensor, Step], Tensor]
    outline: Outline


def make_outline(
    name: str, dtype: str, device: torch.device, cluster: Cluster, strategy: str, sizes: Mapping[str, int]
) -> Outline:
    """Return the outline of the model ``name``, without making its weights; ``sizes`` apply to ``gpt`` only.

    Raise ValueError or NotImplementedError, in one line, for a model that cannot be trained on ``device``.
    """
    if name == "gpt":
        config = GptConfig(**sizes)
        heads = (config.heads, config.kv_heads, config.head_dim)
        planner = Planner(*heads, dtype=dtype, cluster=cluster, strategy=strategy)
        return Outline(config, planner, {"causal": (causal(), config.layers)}, config.vocabulary)
    found, learned = _huggingface_config(name, dtype, device, cluster)
    from flexcp.frameworks import huggingface

    planner = huggingface.planner(found, cluster, dtype, strategy=strategy)
    return Outline(found, planner, huggingface.masks(found), int(found.vocab_size), learned)


def make_trainee(
    name: str, dtype: str, device: torch.device, cluster: Cluster, strategy: str, sizes: Mapping[str, int]
) -> Trainee:
    """Make the model ``name`` with the same weights on every rank; ``sizes`` apply to ``gpt`` only.

    ``dtype`` is the name of a torch dtype. Raises ValueError for a Hugging Face model that is too large for the memory,
    or if transformers is not installed.
    """
    outline = make_outline(name, dtype, device, cluster, strategy, sizes)
    torch.manual_seed(0)
    make = _gpt if name == "gpt" else _huggingface
    return Trainee(*make(outline.config, dtype, device), outline)


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


def refuse_long_documents(documents: Documents, steps: int, learned: tuple[str, int] | None) -> None:
    """Raise ValueError if a document of the first ``steps`` steps has more tokens than a model has learned positions.

    ``learned`` is that of the model's :class:`Outline`.
    """
    if learned is None:
        return
    name, most = learned
    for number in range(steps):
        longest = max(map(len, documents.step(number)))
        if longest > most:
            raise ValueError(
                f"step {number} has a document of {longest} tokens, but {name} of the model is {most}, and it has no "
                f"learned positions beyond: give --data of shorter documents, --tokens {most}, which cuts them, or a "
                f"config.json with a larger {name}"
            )


def _learned_positions(model: nn.Module, config: Any) -> tuple[str, int] | None:
    """Return the configuration's name for the number of learned positions and the number; None if none are learned."""
    tables = (name.rpartition(".")[2] for name, part in model.named_modules() if isinstance(part, nn.Embedding))
    most = getattr(config, USUAL, None)
    if most is None or not any("position" in name or name == "wpe" for name in tables):
        return None
    return config.attribute_map.get(USUAL, USUAL), int(most)


def _memory(device: torch.device) -> int:
    """Return the bytes of memory that a device has in all; all CPU ranks share the machine's."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _gpt(config: GptConfig, dtype: str, device: torch.device) -> tuple[nn.Module, Callable[[Tensor, Step], Tensor]]:
    """Return our small GPT and the function that returns its logits."""
    model = Gpt(config).to(device, getattr(torch, dtype))

    def logits(tokens: Tensor, step: Step) -> Tensor:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out = attention(q, k, v, step)
            assert isinstance(out, Tensor)
            return out

        found: Tensor = model(step.shard(tokens), step.positions.to(device), attend)
        return found

    return model, logits


def _huggingface_config(
    name: str, dtype: str, device: torch.device, cluster: Cluster
) -> tuple[Any, tuple[str, int] | None]:
    """Return the Transformers configuration of a file or folder, and the model's learned positions.

    Raise ValueError or NotImplementedError, in one line, if Transformers makes no model of it, flexcp cannot run its
    attention, or memory cannot hold it.
    """
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError:
        raise ValueError("a Hugging Face configuration needs transformers: pip install flexcp[huggingface]") from None
    from flexcp.frameworks import huggingface
    from flexcp.frameworks.huggingface_attention import attention_dropouts

    try:
        config: Any = AutoConfig.from_pretrained(name, trust_remote_code=False)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except Exception as error:  # errors of Transformers' configurations and models have no common class
        words = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"{name}: Transformers makes no causal language model of it: {words[:MOST_QUOTED]}") from None
    weights = sum(p.numel() for p in model.parameters())
    memory, ranks = _memory(device), 1 if device.type == "cuda" else cluster.ranks
    refuse_too_large(name, weights, getattr(torch, dtype).itemsize, ranks, memory)
    huggingface.turn_on(model)
    if dtype == "float64" and getattr(model.config, "_experts_implementation", None):
        config._experts_implementation = "eager"  # the fast code for experts takes no float64
    for field, value in attention_dropouts(config).items():
        raise ValueError(f"{name}: attention dropout is not supported; set {field} to 0 (it is {value})")
    return config, _learned_positions(model, config)


def _huggingface(config: Any, dtype: str, device: torch.device) -> tuple[nn.Module, Callable[[Tensor, Step], Tensor]]:
    """Return the model of a Hugging Face configuration, with random weights, and the function for its logits."""
    from transformers import AutoModelForCausalLM

    from flexcp.frameworks import huggingface

    huggingface.register()
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype), attn_implementation=huggingface.NAME)
    model.to(device)
    huggingface.turn_on(model)

    def logits(tokens: Tensor, step: Step) -> Tensor:
        given = huggingface.inputs(tokens, step)
        del given["labels"]  # the training loop computes the loss itself
        found: Tensor = model(**given).logits.flatten(0, 1)
        return found if step.local_tokens else found[:0]

    return model, logits

"""Runs a small model of Transformers and records what it does: heads, keys that each layer sees, weights, and
multiplications of a token.

Attention is replaced by a function that records its inputs, so the probe needs no names of a family's fields. Models
whose attention cannot be replaced (falcon, gptj, codegen) return attention weights, which show heads and keys; their KV
heads and head sizes only show in the number of weights. Of a vision-language model only the text model runs; whether
its matrices are tied is seen on the whole model, built on the meta device.
"""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import transformers
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface
from transformers.initialization import no_init_weights
from transformers.masking_utils import AttentionMaskInterface, eager_mask

TOKENS = 24
ALL = 0
"""The number of keys that stands for a layer without a window."""
UNKNOWN = -1
"""The number of keys that stands for a mask that is neither causal nor a causal window."""
Layer = tuple[int, int, int, int, int]
"""Heads, KV heads, head size, value size, keys; the three in the middle are 0 if attention cannot be replaced."""
_calls: list[Layer] = []


def _keys(seen: Any, window: int | None) -> int:
    """Return the keys of a mask of TOKENS tokens; a longer window is known by its keyword alone."""
    last = int(seen[-1].sum())
    distance = torch.arange(TOKENS)[:, None] - torch.arange(TOKENS)
    if not torch.equal(seen, (distance >= 0) & (distance < last)):
        return UNKNOWN
    return last if last < TOKENS else (window or ALL)


def _noted(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **keywords: Any) -> tuple[Any, None]:
    keys = _keys(attention_mask[0, 0] == 0, keywords.get("sliding_window"))
    _calls.append((query.shape[1], key.shape[1], query.shape[-1], value.shape[-1], keys))
    return value.new_zeros(1, TOKENS, query.shape[1], value.shape[-1]), None


class _Multiplications(TorchFunctionMode):
    """Counts the multiplications of matrix products."""

    total = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if name in ("linear", "matmul", "__matmul__", "bmm"):
            self.total += found.numel() * args[0].shape[-1]
        elif name in ("addmm", "baddbmm"):
            self.total += found.numel() * args[1].shape[-1]
        return found


AttentionInterface.register("noted", _noted)
AttentionMaskInterface.register("noted", eager_mask)


@dataclass(frozen=True)
class Seen:
    """What the probe saw of a model. ``weights`` counts those of matrices in layers, ``multiplications`` those of one
    token with these matrices.

    ``replaced`` says whether attention was replaced. Otherwise ``layers`` has heads and keys only, and multiplications
    include those of attention.
    """

    layers: Counter[Layer]
    replaced: bool
    weights: int
    multiplications: float
    vocabulary: tuple[int, int]
    tied: bool | None


def seen(config: Any) -> Seen:
    """Build a small model of ``config``, run it once, and return what the probe saw."""
    text = config.get_text_config()
    if text is not config:
        return replace(_run(text), tied=tied_around(config))
    return _run(config)


def _run(config: Any) -> Seen:
    # Families without a causal language model have at least a base text model.
    alone = type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    kind = (transformers.MODEL_FOR_CAUSAL_LM_MAPPING if alone else transformers.MODEL_MAPPING)[type(config)]
    replaced = kind.is_backend_compatible()
    with no_init_weights() if replaced else nullcontext():
        model = kind._from_config(
            config, attn_implementation="noted" if replaced else "eager", experts_implementation="eager"
        )
    model.tie_weights()  # no_init_weights() skips this
    _calls.clear()
    with _Multiplications() as counter, torch.no_grad():
        found = model.eval()(input_ids=torch.arange(TOKENS)[None], use_cache=False, output_attentions=not replaced)
    multiplied = counter.total / TOKENS
    layers = (
        _calls if replaced else [(each.shape[1], 0, 0, 0, _keys(each[0, 0] > 0, None)) for each in found.attentions]
    )
    embedding, head = model.get_input_embeddings().weight, getattr(model, "lm_head", None)
    # Embeddings, also of positions, do not belong to layers.
    outside = {id(part.weight) for part in model.modules() if isinstance(part, torch.nn.Embedding) or part is head}
    weights = sum(p.numel() for p in model.parameters() if p.dim() > 1 and id(p) not in outside)
    multiplied -= 0 if head is None else head.weight.numel()
    tied = None if head is None else head.weight is embedding
    return Seen(Counter(layers), replaced, weights, multiplied, tuple(embedding.shape), tied)


def tied_around(config: Any) -> bool:
    """Return whether embedding and head of a vision-language model are one matrix."""
    with torch.device("meta"):
        whole = transformers.AutoModelForImageTextToText.from_config(config)
    return whole.get_output_embeddings().weight is whole.get_input_embeddings().weight

"""A small GPT on one page: embeddings, blocks of attention (GQA, RoPE) and a gated feed-forward, tied output weights.

Attention is a function that the caller passes in: flexcp's on several ranks, torch's own on one process. Nothing else
in the model depends on parallelism: positions are an argument, and all other layers work token by token.

Shape letters: T tokens, H query heads, G KV heads, D head size, E embedding size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

AttentionFunction = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Attention of q ``[T, H, D]``, k and v ``[T, G, D]``, which returns ``[T, H, D]``."""


@dataclass(frozen=True)
class GptConfig:
    """Sizes of the model."""

    vocabulary: int = 256
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32

    @property
    def width(self) -> int:
        return self.heads * self.head_dim


class Gpt(nn.Module):
    """A language model that returns next-token logits ``[T, vocabulary]``, one row for each token."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.blocks = nn.ModuleList(_Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width)
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, tokens_T: Tensor, positions_T: Tensor, attention: AttentionFunction) -> Tensor:
        x_TE = self.embedding(tokens_T)
        for block in self.blocks:
            x_TE = block(x_TE, positions_T, attention)
        logits: Tensor = self.norm(x_TE) @ self.embedding.weight.T
        return logits


class _Block(nn.Module):
    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.config = config
        width, kv_width = config.width, config.kv_heads * config.head_dim
        self.norm, self.norm_mlp = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = nn.Linear(width, width + 2 * kv_width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate_up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x_TE: Tensor, positions_T: Tensor, attention: AttentionFunction) -> Tensor:
        c = self.config
        heads = self.qkv(self.norm(x_TE)).unflatten(-1, (c.heads + 2 * c.kv_heads, c.head_dim))
        q_THD, k_TGD, v_TGD = heads.split([c.heads, c.kv_heads, c.kv_heads], dim=1)
        mixed_THD = attention(_rotated(q_THD, positions_T), _rotated(k_TGD, positions_T), v_TGD)
        x_TE = x_TE + self.out(mixed_THD.flatten(1))
        gate, up = self.gate_up(self.norm_mlp(x_TE)).chunk(2, dim=-1)
        mlp: Tensor = self.down(nn.functional.silu(gate) * up)
        return x_TE + mlp


def _rotated(x_THD: Tensor, positions_T: Tensor) -> Tensor:
    """Apply rotary position embedding."""
    half = x_THD.shape[-1] // 2
    frequency = 10_000.0 ** (-torch.arange(half, dtype=x_THD.dtype, device=x_THD.device) / half)
    angle = (positions_T[:, None].to(x_THD.dtype) * frequency)[:, None, :]
    a, b = x_THD[..., :half], x_THD[..., half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], dim=-1)

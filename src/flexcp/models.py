"""Models by name: shapes and sizes of transformers people train, as far as planning and simulation need them.

Sizes are from the models' published configurations (Llama 3, Qwen3, Qwen2.5-VL). ``gpt-8b`` is our reading of DCP's end-to-end model:
Llama's width, layers and heads with a plain feed-forward of four times the width (two matrices, written here as a gated one of the same
FLOPs).
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from flexcp.cost import Model
from flexcp.pieces import Shape


@dataclass(frozen=True)
class Preset:
    """A model with its attention shape; ``experts`` are all of a layer's feed-forwards, of which a token uses some."""

    model: Model
    shape: Shape
    vocabulary: int
    experts: int = 1

    @property
    def layer_parameters(self) -> int:
        """Weights of one layer: projections and all feed-forwards."""
        model, shape = self.model, self.shape
        projections = model.hidden * (shape.heads + shape.kv_heads) * (shape.head_dim + shape.v_head_dim)
        return projections + 3 * model.hidden * model.feed_forward * self.experts

    @property
    def parameters(self) -> int:
        """Weights of all layers, the embedding and the head."""
        return self.model.layers * self.layer_parameters + 2 * self.vocabulary * self.model.hidden

    @property
    def head_flops_per_token(self) -> int:
        """Forward FLOPs of one token in the vocabulary's projection."""
        return 2 * self.vocabulary * self.model.hidden


def _preset(
    name: str, hidden: int, layers: int, feed_forward: int, heads: int, kv_heads: int, vocabulary: int, active: int = 1, experts: int = 1
) -> Preset:  # fmt: skip
    return Preset(
        Model(name, hidden, layers, feed_forward, active), Shape(heads, kv_heads, 128, 128), vocabulary, experts
    )


PRESETS = {
    preset.model.name: preset
    for preset in (
        _preset("llama3-8b", 4096, 32, 14_336, 32, 8, 128_256),
        _preset("llama3-70b", 8192, 80, 28_672, 64, 8, 128_256),
        _preset("gpt-8b", 4096, 32, 10_923, 32, 8, 50_257),
        _preset("qwen3-30b-a3b", 2048, 48, 768, 32, 4, 151_936, active=8, experts=128),
        _preset("qwen2.5-vl-7b", 3584, 28, 18_944, 28, 4, 152_064),
    )
}


def find_model(name: str) -> Preset:
    """The preset of that name."""
    if name not in PRESETS:
        close = difflib.get_close_matches(name, PRESETS, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ValueError(f"unknown model {name!r}: {hint}known models are {', '.join(PRESETS)}")
    return PRESETS[name]

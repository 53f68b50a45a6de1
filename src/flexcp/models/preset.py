"""Preset: the sizes of a model that planning and simulation need: its layers, its attention, the windows of layers."""

from __future__ import annotations

from dataclasses import dataclass

from flexcp.cost import Model
from flexcp.masks import Mask, causal, window
from flexcp.shape import Shape


@dataclass(frozen=True)
class Preset:
    """A model with its attention shape, its vocabulary (number of tokens) and its experts.

    ``experts`` is the number of feed-forwards of a layer, of which a token uses some. ``windows`` are (keys, number of
    layers) of the layers with a window of that many keys; all other layers are causal. A ``tied`` model has one matrix
    for embedding and head.
    """

    model: Model
    shape: Shape
    vocabulary: int
    experts: int = 1
    windows: tuple[tuple[int, int], ...] = ()
    tied: bool = False

    def masks(self, mask: Mask | None = None) -> dict[str, tuple[Mask, int]]:
        """Return the masks of the layers by name, each with its number of layers.

        They are the model's own, or ``mask`` in all layers.
        """
        if mask is not None or not self.windows:
            return {"mask": (causal() if mask is None else mask, self.model.layers)}
        full = self.model.layers - sum(layers for _, layers in self.windows)
        found: dict[str, tuple[Mask, int]] = {"full": (causal(), full)} if full else {}
        for keys, layers in self.windows:
            found["window" if len(self.windows) == 1 else f"window {keys}"] = (window(keys - 1), layers)
        return found

    @property
    def layer_parameters(self) -> int:
        """The number of weights of one layer: projections and all feed-forwards."""
        model, shape = self.model, self.shape
        projections = model.hidden * (shape.heads + shape.kv_heads) * (shape.head_dim + shape.v_head_dim)
        return projections + 3 * model.hidden * model.feed_forward * self.experts

    @property
    def parameters(self) -> int:
        """The number of weights of all layers, the embedding and the head."""
        return self.model.layers * self.layer_parameters + self.vocabulary_parameters

    @property
    def vocabulary_parameters(self) -> int:
        """The number of weights of the embedding and the head."""
        return (1 if self.tied else 2) * self.vocabulary * self.model.hidden

    @property
    def head_flops_per_token(self) -> int:
        """The forward FLOPs of one token in the projection to the vocabulary."""
        return 2 * self.vocabulary * self.model.hidden

"""A model as far as planning and simulation need it: sizes of its layers, its attention, the windows of its layers."""

from __future__ import annotations

from dataclasses import dataclass

from flexcp.cost import Model
from flexcp.masks import Mask, causal, window
from flexcp.shape import Shape


@dataclass(frozen=True)
class Preset:
    """A model with its attention shape; ``experts`` are all of a layer's feed-forwards, of which a token uses some.

    ``windows`` are (keys, layers) of the layers that see no more than so many keys; all other layers are causal. A
    ``tied`` model has one matrix of its vocabulary for embedding and head.
    """

    model: Model
    shape: Shape
    vocabulary: int
    experts: int = 1
    windows: tuple[tuple[int, int], ...] = ()
    tied: bool = False

    def masks(self, mask: Mask | None = None) -> dict[str, tuple[Mask, int]]:
        """The masks of the layers with their counts, for a batch: the model's own, or ``mask`` in all of them."""
        if mask is not None or not self.windows:
            return {"mask": (causal() if mask is None else mask, self.model.layers)}
        full = self.model.layers - sum(layers for _, layers in self.windows)
        found: dict[str, tuple[Mask, int]] = {"full": (causal(), full)} if full else {}
        for keys, layers in self.windows:
            found["window" if len(self.windows) == 1 else f"window {keys}"] = (window(keys - 1), layers)
        return found

    @property
    def layer_parameters(self) -> int:
        """Weights of one layer: projections and all feed-forwards."""
        model, shape = self.model, self.shape
        projections = model.hidden * (shape.heads + shape.kv_heads) * (shape.head_dim + shape.v_head_dim)
        return projections + 3 * model.hidden * model.feed_forward * self.experts

    @property
    def parameters(self) -> int:
        """Weights of all layers, the embedding and the head."""
        return self.model.layers * self.layer_parameters + self.vocabulary_parameters

    @property
    def vocabulary_parameters(self) -> int:
        """Weights of the embedding and the head."""
        return (1 if self.tied else 2) * self.vocabulary * self.model.hidden

    @property
    def head_flops_per_token(self) -> int:
        """Forward FLOPs of one token in the vocabulary's projection."""
        return 2 * self.vocabulary * self.model.hidden

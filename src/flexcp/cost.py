"""CostModel: what work costs, as integers.

Planners compare costs, so a cost is an exact integer on every machine. The unit of a rank's load is one *pair*: the attention of one
(query, key) pair over all heads, forward and backward. What a token costs in the rest of the layer is expressed in pairs too, so
that ``load = area + tokens * pairs_per_token`` prices compute and tokens with one number.
"""

from __future__ import annotations

from dataclasses import dataclass

from flexcp.pieces import Shape


@dataclass(frozen=True)
class CostModel:
    """Efficiencies are per mille of a rank's peak; ``linear_flops`` is one token's forward work in the rest of one layer.

    ``linear_flops=None`` stands for a dense gated model with hidden = heads x head_dim and a feed-forward of 3.5 times that.
    """

    attention_efficiency: int = 600
    linear_efficiency: int = 700
    linear_flops: int | None = None

    def pairs_per_token(self, shape: Shape) -> int:
        """How many attention pairs the rest of a layer costs per token, forward and backward (backward 2.5 and 2 times)."""
        hidden = shape.heads * shape.head_dim
        projections = 2 * hidden * hidden + hidden * shape.kv_heads * (shape.head_dim + shape.v_head_dim)
        feed_forward = 3 * hidden * (7 * hidden // 2)
        linear = self.linear_flops if self.linear_flops is not None else 2 * (projections + feed_forward)
        attention = 2 * shape.heads * (shape.head_dim + shape.v_head_dim)
        return max(1, (linear * 6 * self.attention_efficiency) // (attention * 7 * self.linear_efficiency))

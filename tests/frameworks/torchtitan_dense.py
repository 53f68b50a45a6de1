"""A dense attention for torchtitan's own side of the comparison:
its flex and varlen attentions have no backward on a CPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torchtitan.config.override import derive, override
from torchtitan.models.common.attention import VarlenAttention


class Dense(VarlenAttention):
    """Causal inside the documents that torchtitan's own metadata names, and in the layer's window."""

    @dataclass(kw_only=True, slots=True)
    class Config(VarlenAttention.Config):
        """As varlen's."""

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        attention_masks: Any,
        scale: Any = None,
        out_transform: Any = None,
        **others: Any,
    ) -> Tensor:
        rows, length = q.shape[:2]
        q, k, v = (x.flatten(0, 1).transpose(0, 1) for x in (q, k, v))
        k, v = (x.repeat_interleave(len(q) // len(x), 0) for x in (k, v))
        at = torch.arange(rows * length)
        document = torch.searchsorted(attention_masks.cu_seq_q.long(), at, right=True)
        back = at[:, None] - at
        left = int(self.window_size[0])
        seen = (document[:, None] == document) & (back >= 0) & (back <= (left if left >= 0 else len(at)))
        logits = (q @ k.transpose(1, 2) * (q.shape[-1] ** -0.5 if scale is None else scale)).masked_fill(
            ~seen, -torch.inf
        )
        out = (torch.softmax(logits, -1) @ v).transpose(0, 1).unflatten(0, (rows, length))
        if out_transform is None:
            return out
        transformed: Tensor = out_transform(out, torch.logsumexp(logits, -1).T.unflatten(0, (rows, length)))
        return transformed


@override(target=VarlenAttention.Config, exact=True, description="dense")
def dense(config: VarlenAttention.Config) -> Dense.Config:
    return derive(config, Dense.Config)

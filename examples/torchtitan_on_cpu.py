"""torchtitan on CPU ranks, for its examples; on GPUs nothing of this is needed.

torchtitan knows accelerators only. Here the CPU answers for one, gloo is spared two calls that it lacks, weights are
drawn as on one process, and ``dense`` is an attention to train with: torchtitan's flex and varlen attentions have no
backward on a CPU. Import this module before torchtitan, which chooses its device while it is imported.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch._utils
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

with patch.object(torch._utils, "_get_available_device_type", lambda: "cpu"):
    from torchtitan.tools import utils

from torchtitan.config.override import derive, override
from torchtitan.models.common.attention import VarlenAttention

assert utils.device_type == "cpu", "torchtitan was imported before torchtitan_on_cpu, and has chosen another device"

ANSWERS: dict[str, Any] = {
    "get_device_name": lambda device: "cpu",
    "get_device_properties": lambda device: SimpleNamespace(total_memory=1 << 34),
    "reset_peak_memory_stats": lambda: None,
    "empty_cache": lambda: None,
    "memory_stats": lambda device: {},
}
"""What torchtitan asks an accelerator for."""


@contextlib.contextmanager
def cpu_ranks() -> Iterator[None]:
    """Build and run torchtitan's trainer in here."""
    with (
        patch.multiple(torch.cpu, create=True, **ANSWERS),
        patch("torchtitan.distributed.fsdp.disable_fsdp_gradient_division", sum_gradients),
        patch("torchtitan.distributed.utils.set_pg_timeouts"),  # its barrier names a device, which gloo refuses
    ):
        yield


def sum_gradients(model: torch.nn.Module) -> None:
    """What torchtitan sets, but by a plain sum: it would scale gradients while it sums them, which gloo lacks."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def draw_weights(trainer: Any) -> None:
    """Give the trainer's model the weights of one process: on a CPU every rank draws its part as if it were the first.

    On GPUs ``config.debug.seed`` does it.
    """
    torch.manual_seed(0)
    whole = trainer.model_config.build()
    whole.init_weights()
    with torch.no_grad():
        for mine, drawn in zip(trainer.model_parts[0].parameters(), whole.parameters(), strict=True):
            sharded = isinstance(mine, DTensor)
            mine.copy_(distribute_tensor(drawn, mine.device_mesh, mine.placements) if sharded else drawn)


class Dense(VarlenAttention):
    """Causal inside the documents that torchtitan's own metadata names, and in the layer's window."""

    @dataclass(kw_only=True, slots=True)
    class Config(VarlenAttention.Config):
        """As varlen's."""

    def forward(
        self,
        q_BLNH: Tensor,
        k_BLNH: Tensor,
        v_BLNH: Tensor,
        *,
        attention_masks: Any,
        scale: Any = None,
        out_transform: Any = None,
        **others: Any,
    ) -> Tensor:
        rows, length = q_BLNH.shape[:2]
        q, k, v = (x.flatten(0, 1).transpose(0, 1) for x in (q_BLNH, k_BLNH, v_BLNH))
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

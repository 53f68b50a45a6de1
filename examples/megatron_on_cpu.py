"""Megatron-Core on CPU ranks, for its examples; on GPUs nothing of this is needed.

Megatron names "cuda" when it makes buffers, synchronizes with it, and forks its random state around dropout. Here the
device is the CPU, synchronizing is nothing and no dropout is used. Models, parallel layers, schedules, DDP, gradient
reduction and optimizers are its own code. Its router looks for a name of TransformerEngine, which is given to it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest.mock import MagicMock, patch

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.moe import moe_utils, token_dispatcher
from torch import Tensor
from torch.overrides import TorchFunctionMode


class CudaIsCpu(TorchFunctionMode):
    """Tensors asked for on "cuda" are made on the CPU."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        if str(given.get("device", "")).startswith("cuda"):
            given["device"] = "cpu"
        return args[0] if function is torch.Tensor.cuda else function(*args, **given)


@contextlib.contextmanager
def megatron_world(tp: int = 1, pp: int = 1, cp: int = 1, ep: int = 1, vp: int | None = None) -> Iterator[Any]:
    """All ranks of this process's world as Megatron's, for as long as the context lasts: its ``parallel_state``."""
    stream = MagicMock()
    with (
        patch.multiple(
            torch.cuda,
            current_device=lambda: "cpu",
            synchronize=lambda *_: None,
            Stream=lambda *_: stream,
            current_stream=lambda *_: stream,
            stream=lambda *_: contextlib.nullcontext(),
        ),
        patch.object(CudaRNGStatesTracker, "fork", lambda self, name="": contextlib.nullcontext()),
        patch.object(moe_utils, "te_general_gemm", None, create=True),
        patch.object(multi_latent_attention, "HAVE_TE", False),
        patch.object(token_dispatcher, "maybe_move_tensor_to_cpu", from_device),
    ):
        before = set(dist.distributed_c10d._world.pg_map)
        parallel_state.initialize_model_parallel(
            tp, pp, vp, context_parallel_size=cp, expert_model_parallel_size=ep, create_gloo_process_groups=False
        )
        try:
            with CudaIsCpu():
                yield parallel_state
        finally:
            parallel_state.destroy_model_parallel()
            # Megatron makes dozens of groups and leaves them; on gloo each has threads that wake a hundred times a
            # second.
            dist.barrier()
            for group in set(dist.distributed_c10d._world.pg_map) - before:
                dist.destroy_process_group(group)


def from_device(x: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Counts of an all-to-all as numbers, which Megatron makes of them only when they come from a GPU."""
    return x.numpy() if as_numpy and isinstance(x, Tensor) else x

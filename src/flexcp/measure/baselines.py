"""Attention of the same documents by other installed packages, for comparison.

``torch.context_parallel`` is PyTorch's own, based on ``scaled_dot_product_attention``. It supports neither documents
nor masks other than causal and full, needs lengths divisible by 2 x ranks, and has no CPU path (its dispatcher has no
sharding rule for the CPU kernel; torch 2.13, November 2026). It therefore runs on GPUs only, one document after the
other, each padded. Other packages are listed as installed or not; flexcp has no adapter for them yet.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from flexcp.masks import Mask
from flexcp.shape import Shape

Run = Callable[[], tuple[Any, Callable[[], Any]]]
"""Runs the forward, and returns the output and a function that runs the backward."""
OTHERS = ("ring_flash_attn", "transformer_engine", "magi_attention")


def baselines(
    group: dist.ProcessGroup, lengths: Sequence[int], mask: Mask, shape: Shape, device: str
) -> dict[str, Run | str]:
    """Return for each other package a function that runs its attention (:data:`Run`), or why it cannot run."""
    found: dict[str, Run | str] = {"torch.context_parallel": _context_parallel(group, lengths, mask, shape, device)}
    for package in OTHERS:
        installed = importlib.util.find_spec(package) is not None
        found[package] = "installed, but flexcp has no adapter for it yet" if installed else "not installed"
    return found


def _context_parallel(
    group: dist.ProcessGroup, lengths: Sequence[int], mask: Mask, shape: Shape, device: str
) -> Run | str:
    if device == "cpu":
        return "has no CPU path: PyTorch registers no sharding rule for its CPU attention kernel; runs on GPUs"
    if str(mask) not in ("causal", "full"):
        return f"knows causal and full attention only, not {mask}"
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.experimental import context_parallel

    mesh = DeviceMesh.from_group(group, device)
    ranks = dist.get_world_size(group)
    documents = [-(-n // (2 * ranks)) * 2 * ranks for n in lengths]
    sizes = [(shape.heads, shape.head_dim), (shape.kv_heads, shape.head_dim), (shape.kv_heads, shape.v_head_dim)]
    dtype = getattr(torch, shape.dtype)

    def inside() -> AbstractContextManager[None]:
        # context_parallel needs a buffer that it can shard; the tensors below are shards from the start.
        buffer = torch.empty(2 * ranks, device=device)
        return context_parallel(mesh, buffers=[buffer], buffer_seq_dims=[0], no_restore_buffers={buffer})

    def run() -> tuple[list[Tensor], Callable[[], Any]]:
        kept = []
        with inside():
            for n in documents:
                q, k, v = (
                    torch.randn(1, h, n // ranks, d, device=device, dtype=dtype, requires_grad=True) for h, d in sizes
                )
                out = F.scaled_dot_product_attention(q, k, v, is_causal=str(mask) == "causal", enable_gqa=True)
                kept.append((out, (q, k, v)))

        def backward() -> None:
            with inside():
                for out, inputs in kept:
                    torch.autograd.grad(out, inputs, torch.ones_like(out))

        return [out for out, _ in kept], backward

    return run

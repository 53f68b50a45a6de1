"""Helpers of the telemetry tests: the plan of a small batch, random inputs, training of a step, and a way to replace
the CPU kernel by one with a mistake.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

import flexcp
from flexcp.executor.kernels import cpu
from flexcp.executor.step import Step
from flexcp.plan.plan import Plan

LENGTHS = [33, 1, 50, 2, 8]
TOKENS = sum(LENGTHS)
HEADS, KV_HEADS, HEAD_DIM, V_HEAD_DIM = 4, 2, 8, 6


def plan_for(ranks: int, mask: Any = None, strategy: str = "blocks", dtype: str = "float64", **more: Any) -> Plan:
    where = flexcp.cluster("cpu", 1, ranks)
    planner = flexcp.Planner(HEADS, KV_HEADS, HEAD_DIM, V_HEAD_DIM, dtype, where, strategy=strategy)
    mask = flexcp.causal() if mask is None and "masks" not in more else mask
    return planner(more.pop("lengths", LENGTHS), mask, **more)


def qkv(step: Step, size: float = 1.0) -> list[Tensor]:
    """Return this rank's rows of random q, k and v."""
    dtype, tokens = getattr(torch, step.plan.shape.dtype), step.plan.batch.tokens
    generator = torch.Generator().manual_seed(0)
    sizes = ((HEADS, HEAD_DIM), (KV_HEADS, HEAD_DIM), (KV_HEADS, V_HEAD_DIM))
    full = [torch.randn(tokens, *s, generator=generator, dtype=torch.float64).mul(size).to(dtype) for s in sizes]
    return [step.shard(x).requires_grad_() for x in full]


def sinks_of(step: Step) -> Tensor:
    return torch.linspace(-1, 2, HEADS, dtype=getattr(torch, step.plan.shape.dtype))


def train(step: Step, layers: int = 1, **call: Any) -> None:
    """Forward and backward through some attention layers."""
    for _ in range(layers):
        out = flexcp.attention(*qkv(step), step, **call)
        assert isinstance(out, Tensor)
        out.sum().backward()


@contextmanager
def kernel_forward(change: Callable[..., None]) -> Iterator[None]:
    """Inside this context, ``change(right, q, k, v, work, settings, out, lse)`` is the forward of the CPU kernel."""
    right = cpu.forward

    def wrong(*arguments: Any) -> None:
        change(right, *arguments)

    cpu.forward = wrong
    try:
        yield
    finally:
        cpu.forward = right

"""The layer around attention, for calibration: the time of its matrix products, and the bytes that autograd saves.

Weights, inputs and gradients are random, because products of equal numbers draw less power, and a GPU that draws less
power runs at a higher clock than in training.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from flexcp.cost import Model
from flexcp.shape import Shape


@dataclass(frozen=True)
class LayerTimes:
    """Nanoseconds of the rest of a layer, forward and backward together, for each number of tokens.

    ``token_bytes`` are the bytes that autograd keeps of a token of one layer for the backward, attention's own
    included.
    """

    tokens: tuple[int, ...]
    ns: tuple[float, ...]
    token_bytes: int


def layer_times(
    group: dist.ProcessGroup | None, shape: Shape, model: Model, device: str, tokens: tuple[int, ...], repeats: int = 3
) -> LayerTimes:
    """Measure a layer of projections and a gated feed-forward, without norms; collective if there is a group.

    ``tokens`` are the numbers of tokens to measure, each the median of ``repeats``.
    """
    dtype = getattr(torch, shape.dtype)
    out_size, kv_size = shape.heads * shape.v_head_dim, shape.kv_heads * (shape.head_dim + shape.v_head_dim)
    used = model.feed_forward * model.experts_active
    sizes = [(shape.heads * shape.head_dim + kv_size, model.hidden), (model.hidden, out_size)]
    sizes += [(2 * used, model.hidden), (model.hidden, used)]
    weights = [_random(*size, dtype=dtype, device=device).div_(size[1] ** 0.5).requires_grad_() for size in sizes]
    times = []
    for count in tokens:
        x, gradient = (_random(count, model.hidden, dtype=dtype, device=device) for _ in range(2))
        x.requires_grad_()
        samples = []
        for _ in range(repeats + 1):
            if group is not None:
                dist.barrier(group)
            begin = time.perf_counter_ns()
            _layer(x, weights, out_size).backward(gradient)
            if device == "cuda":
                torch.cuda.synchronize()
            samples.append(float(time.perf_counter_ns() - begin))
        times.append(statistics.median(samples[1:]))
    return LayerTimes(tokens, tuple(times), _kept_bytes(weights, out_size, shape, model, device))


def _random(rows: int, columns: int, *, dtype: torch.dtype, device: str) -> Tensor:
    return torch.randn(rows, columns, device=device).to(dtype)


def _layer(x: Tensor, weights: list[Tensor], out_size: int) -> Tensor:
    """Return the layer's output for ``x``; ``out_size`` columns of q, k and v stand for attention's output."""
    qkv, out, up, down = weights
    attended = F.linear(x, qkv)[:, :out_size]  # attention itself is measured apart
    x = x + F.linear(attended, out)
    gate, value = F.linear(x, up).chunk(2, dim=-1)
    return x + F.linear(F.silu(gate) * value, down)


def _kept_bytes(weights: list[Tensor], out_size: int, shape: Shape, model: Model, device: str) -> int:
    """Return the bytes that autograd saves per token, each storage once, with attention's q, k, v, out and LSE."""
    tokens = 128
    known = {w.untyped_storage().data_ptr() for w in weights}
    total = 0

    def pack(x: Tensor) -> Tensor:
        nonlocal total
        storage = x.untyped_storage()
        if storage.data_ptr() not in known:
            known.add(storage.data_ptr())
            total += storage.nbytes()
        return x

    x = torch.ones(tokens, model.hidden, dtype=weights[0].dtype, device=device, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept):
        result = _layer(x, weights, out_size)
    del result
    own = shape.element_bytes * shape.heads * shape.v_head_dim + shape.accumulator_bytes * shape.heads  # out and LSE
    return total // tokens + own

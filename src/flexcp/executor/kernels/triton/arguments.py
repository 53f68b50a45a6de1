"""What a launch passes for the caller's tensors and settings: memory that can be read, strides, boxes, factors.

A kernel reads 16 bytes at a time. So tensors begin at multiples of ``ALIGNMENT`` bytes, and strides are passed in units
of ``UNIT`` elements, from which the compiler knows that rows are aligned. Other tensors are copied. The Hopper and CuTe
kernels follow the same rules.
"""

from __future__ import annotations

import math

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from flexcp.executor.kernels import Settings

ALIGNMENT, UNIT = 16, 16
"""Inputs begin at a multiple of ``ALIGNMENT`` bytes, and their strides are multiples of ``UNIT`` elements.

``UNIT`` is 8 instead for head sizes that are no multiple of 16. Other inputs are copied.
"""
NARROWEST = 16
"""The fewest columns of a matrix product."""


def aligned(x: Tensor, unit: int = UNIT) -> Tensor:
    """Return the tensor itself if the kernel's 16-byte loads can read it, else a contiguous copy."""
    return x if fits(x, unit) and x.storage_offset() * x.element_size() % ALIGNMENT == 0 else x.contiguous()


def fits(x: Tensor, unit: int) -> bool:
    """Return whether the strides are multiples of ``unit`` elements and columns are adjacent."""
    apart = (stride % unit == 0 for stride, size in zip(x.stride()[:2], x.shape[:2], strict=True) if size > 1)
    return x.stride(2) == 1 and all(apart)


def strides(*tensors: Tensor, unit: int = UNIT) -> list[int]:
    """Return the strides of rows and heads of each tensor, as integers for a launch.

    They are in units of ``unit`` elements for 3-D tensors, and in elements for 2-D ones (statistics).
    """
    return [s if t.dim() == 2 else s // unit for t in tensors for s in t.stride()[:2]]


def described(x_THD: Tensor, rows: int, heads: int) -> TensorDescriptor:
    """Return the tensor descriptor for blocks of ``rows`` rows and ``heads`` heads.

    Columns of a block beyond the head size are read as zeros.
    """
    block = [rows, heads, columns(x_THD.shape[2])]
    return TensorDescriptor(x_THD, list(x_THD.shape), list(x_THD.stride()), block)


def columns(size: int) -> int:
    """Return the width of a block for a head size: the next power of two, as Triton needs, at least ``NARROWEST``."""
    return max(NARROWEST, int(triton.next_power_of_2(size)))


def scales(settings: Settings, dtype: torch.dtype) -> tuple[float, float]:
    """Return the factor of q.k, and the softcap (0 for none); raise ValueError if the scale is not above 0.

    Without a softcap the factor times q.k is a logit in the kernels' base; with one it is the argument of tanh.
    """
    if not settings.scale > 0:
        raise ValueError(f"the scale of logits must be above 0; got {settings.scale}")
    if settings.softcap is None:
        return settings.scale * base_of(dtype), 0.0
    return settings.scale / settings.softcap, settings.softcap


def base_of(dtype: torch.dtype) -> float:
    """Return the factor from natural logits to those of the kernels: log2(e), or 1 for float32 (no rounding)."""
    return 1.0 if dtype == torch.float32 else math.log2(math.e)

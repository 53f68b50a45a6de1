"""Arithmetic that the three Triton kernels share: products of blocks, powers of the logits' base, tanh.

Logits are in base 2, or in base e for float32, because the rounded factor between them would change every logit. A
``PRECISION`` of "ieee" stands for float32.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def added(acc, a, b, PRECISION: tl.constexpr):
    """Return ``acc + a @ b``.

    In float32 the product of a block is summed by itself first, so that chains of roundings stay short. It is written
    as a difference, because Triton would merge a sum into one chain again.
    """
    exact: tl.constexpr = PRECISION == "ieee"
    return acc - tl.dot(-a, b, input_precision="ieee") if exact else tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def power(x, PRECISION: tl.constexpr):
    """Return the base of the logits (e for float32, else 2) to the power of ``x``."""
    return tl.exp(x) if PRECISION == "ieee" else tl.exp2(x)


@triton.jit
def base_of(PRECISION: tl.constexpr):
    """Return the factor from natural logits to those of the kernel: 1 for float32, else log2(e)."""
    return 1.0 if PRECISION == "ieee" else LOG2E


@triton.jit
def tanh(x):
    """Return tanh(x) to float32 precision; near 0, where the closed form cancels, by a series."""
    y = tl.minimum(tl.abs(x), 20.0)
    far = 1.0 - 2.0 / (1.0 + tl.exp2(y * (2.0 * LOG2E)))
    far = tl.where(x < 0, -far, far)
    w = x * x
    near = x * (1.0 - w * (0.33333334 - w * (0.13333334 - w * (0.053968254 - w * 0.021869488))))
    return tl.where(y < 0.25, near, far)

"""Masked product: a matrix product in which hidden pairs have no effect, not even by NaN or infinity.

A kernel multiplies whole tiles and gives hidden pairs the weight zero. That is right for finite numbers, but zero times
NaN is NaN: one bad row of values would reach all rows of its tile, even those that do not see it. The kernels in plain
torch use this function instead of a plain product.
"""

from __future__ import annotations

import torch
from torch import Tensor


def seen_product(weights: Tensor, hidden: Tensor | None, rows: Tensor) -> Tensor:
    """Return ``weights @ rows``, on which hidden pairs have no effect even if ``rows`` holds NaN or infinity.

    ``hidden`` is boolean and broadcasts to the shape of the weights, which must be zero there; None hides nothing.
    """
    if hidden is None or bool(torch.isfinite(rows).all()):
        return weights @ rows
    found = weights @ torch.where(torch.isfinite(rows), rows, 0.0)
    up, down, seen = (x.to(rows.dtype) for x in (weights > 0, weights < 0, (~hidden).expand_as(weights)))
    plus, minus, unknown = (x.to(rows.dtype) for x in (rows == torch.inf, rows == -torch.inf, rows.isnan()))
    rising, falling = up @ plus + down @ minus, up @ minus + down @ plus
    found = found + torch.where(rising > 0, torch.inf, 0.0) - torch.where(falling > 0, torch.inf, 0.0)
    return torch.where(seen @ unknown > 0, torch.nan, found)

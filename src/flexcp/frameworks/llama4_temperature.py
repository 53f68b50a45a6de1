"""Llama 4's attention temperature: correct the scale that layers without RoPE give their queries.

These layers scale queries by their position, which the model takes from the row number. A rank's rows are not the
tokens of one document, so queries are scaled for the wrong position. Both scales are known: :func:`retuned` divides by
the scale that the model used and multiplies by that of the token's position in its document. Both are 1 at positions
below ``floor_scale - 1`` (``floor_scale`` is 8,192 in the released models), and queries then stay bitwise the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def retuned(module: nn.Module, q_THD: Tensor, rows: int, positions_T: Tensor) -> Tensor:
    """Return queries ``[T, H, D]`` scaled for their positions ``[T]``, instead of for their row numbers.

    ``rows`` is the length of the rows in which the model numbered them. Layers without such a scale get their queries
    back unchanged. Raise NotImplementedError under torch.compile.
    """
    if not getattr(module, "attn_temperature_tuning", False) or getattr(module, "use_rope", True):
        return q_THD
    if torch.compiler.is_compiling():
        raise NotImplementedError(
            f"{type(module).__name__} scales queries by counting its rows (attn_temperature_tuning), which flexcp "
            "corrects outside of torch.compile only: leave this model uncompiled, or set attn_temperature_tuning=False "
            f"if its documents have at most {module.floor_scale} tokens"
        )
    counted = torch.arange(rows).repeat(len(q_THD) // max(1, rows))
    ratio = _scale(module, positions_T) / _scale(module, counted)
    return q_THD if bool((ratio == 1).all()) else (q_THD * ratio.to(q_THD.device)[:, None, None]).to(q_THD.dtype)


def _scale(module: Any, positions: Tensor) -> Tensor:
    """Return the scale at each position, as the model computes it."""
    scale: Tensor = torch.log1p(torch.floor((positions.float() + 1.0) / module.floor_scale)) * module.attn_scale + 1.0
    return scale

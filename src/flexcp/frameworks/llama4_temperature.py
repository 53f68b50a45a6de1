"""Llama 4's temperature: its layers without RoPE scale queries by where they are,
which the model finds by counting its rows.

Rows of a rank are not the tokens of one document, so queries come scaled for the wrong place. Both scales are known:
:func:`retuned` divides by the one that the model took and multiplies by the one of the token's place in its document.
They are 1 for the first ``floor_scale`` tokens (8,192 in the released models), where nothing changes, not a bit.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def retuned(module: nn.Module, q_THD: Tensor, rows: int, positions_T: Tensor) -> Tensor:
    """Queries ``[T, H, D]`` that a model scaled by their number in rows of ``rows`` tokens,
    scaled by their positions in its place.
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
    """As the model computes it."""
    scale: Tensor = torch.log1p(torch.floor((positions.float() + 1.0) / module.floor_scale)) * module.attn_scale + 1.0
    return scale

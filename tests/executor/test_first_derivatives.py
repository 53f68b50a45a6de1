"""Proves that second derivatives of what communicates or computes in place are refused and never partly missing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import flexcp
from flexcp.executor.losses.log_probs import log_probs

LENGTHS = [9, 4]
TOKENS = sum(LENGTHS)


def bound(**options: object) -> flexcp.Step:
    given: dict[str, Any] = {"heads": 4, "kv_heads": 2, "head_dim": 8, "dtype": "float64", "strategy": "dp"}
    planner = flexcp.Planner(cluster=flexcp.cluster("cpu", ranks_per_node=1), **given | options)
    step = flexcp.bind(planner(LENGTHS))
    assert len(step.indices) == TOKENS
    return step


def rows(*sizes: int) -> Tensor:
    drawn = torch.Generator().manual_seed(5)
    return torch.randn(TOKENS, *sizes, generator=drawn, dtype=torch.float64).requires_grad_()


def expand(latent: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    wide = (latent @ up).view(len(latent), 4, 16)
    return wide[..., :8].contiguous(), wide[..., 8:].contiguous()


def latent_of_queries(q: Tensor) -> Tensor:
    latent, up = rows(6).detach(), torch.linspace(-1, 1, 6 * 64, dtype=torch.float64).view(6, 64)
    out = flexcp.latent_attention(q.view(TOKENS, 4, 8), latent, expand, [up], bound(kv_heads=1, latent=6))
    assert isinstance(out, Tensor)
    return out


CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "step.roll": lambda x: bound().roll(x),
    "step.gather": lambda x: bound().gather(x),
    "relayout": lambda x: bound().relayout(x),
    "restore": lambda x: bound().restore(x),
    "latent_attention": latent_of_queries,
    "log_probs": lambda x: log_probs(x, torch.arange(TOKENS), torch.arange(TOKENS)),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("power", [1, 2])
def test_a_second_derivative_is_refused(name: str, power: int) -> None:
    """With a power of 1, the gradients that the backward is given require none, but what it saved does."""
    x = rows(32)
    out = CALLS[name](x)
    first = torch.autograd.grad((out if power == 1 else out**2).sum(), x, create_graph=True)[0]
    linear = name not in ("latent_attention", "log_probs")
    if linear and power == 1:
        assert not first.requires_grad  # a sum of moved rows has second derivatives of zero
        return
    with pytest.raises(NotImplementedError, match=rf"{name}.* has no second derivatives"):
        torch.autograd.grad((first**2).sum() + (x**2).sum(), x)


@pytest.mark.parametrize("name", CALLS)
def test_a_first_derivative_may_keep_its_graph(name: str) -> None:
    x = rows(32)
    (kept,) = torch.autograd.grad((CALLS[name](x) ** 2).sum(), x, create_graph=True)
    (plain,) = torch.autograd.grad((CALLS[name](x) ** 2).sum(), x)
    assert torch.equal(kept, plain)

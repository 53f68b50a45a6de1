"""Proves what attention does to rows at their ends: the gradient of a sink is exact where its terms cancel."""

from __future__ import annotations

import torch

from flexcp.executor.kernels.sinks_and_delta import sinks_gradient


def test_a_sinks_gradient_survives_cancellation() -> None:
    """Terms of up to 2**24 add up to 1,000 a head; sums in float32 would lose it, whatever their order."""
    generator = torch.Generator().manual_seed(0)
    large = torch.randint(1 << 20, 1 << 24, (4096, 3), generator=generator)
    terms = torch.cat([large, -large, torch.ones(1000, 3, dtype=torch.int64)])[
        torch.randperm(9192, generator=generator)
    ]
    lse, sinks = torch.zeros(9192, 3), torch.zeros(3)
    assert sinks_gradient(sinks, lse, terms.float()).tolist() == [-1000.0] * 3

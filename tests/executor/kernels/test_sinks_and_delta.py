"""Proves the computations before and after the kernels: sinks and delta (the row sums of the output times its gradient)
against dense attention under torch's autograd, rows that see no key, and a sink's gradient whose terms cancel.
"""

from __future__ import annotations

import torch

from flexcp.executor.kernels.sinks_and_delta import OutputGradient, delta_of, sinks_gradient, with_sinks

SINKS = torch.tensor([0.7, -1.5, 2.0], dtype=torch.float64)


def logits_and_values() -> tuple[torch.Tensor, torch.Tensor]:
    """Logits ``[row, head, key]`` and values ``[key, head, channel]``."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 3, 7, generator=generator, dtype=torch.float64)
    return logits, torch.randn(7, 3, 4, generator=generator, dtype=torch.float64)


def by_head(p: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return the product ``[row, head, key] @ [key, head, channel]`` of each head."""
    return (p.transpose(0, 1) @ values.transpose(0, 1)).transpose(0, 1)


def test_a_sink_is_one_more_key_without_a_value() -> None:
    logits, values = logits_and_values()
    out = by_head(torch.softmax(logits, -1), values)
    more = torch.cat([logits, SINKS[None, :, None].expand(5, 3, 1)], -1)
    expected = by_head(torch.softmax(more, -1)[..., :-1], values)
    found, total = with_sinks(out, torch.logsumexp(logits, -1), SINKS)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(total, torch.logsumexp(more, -1))


def test_a_row_without_keys_has_the_sink_alone() -> None:
    out, lse = torch.zeros(2, 3, 4), torch.full((2, 3), -torch.inf)
    found, total = with_sinks(out, lse, SINKS)
    assert torch.equal(found, out) and torch.equal(total, SINKS.float().expand(2, 3))
    found, total = with_sinks(out, lse, torch.full((3,), -torch.inf))
    assert torch.equal(found, out) and torch.equal(total, lse)


def test_gradients_of_sinks_and_logits_are_those_of_autograd() -> None:
    """The loss uses both output and LSE, so delta must carry the gradients of both."""
    logits, values = logits_and_values()
    logits, sinks = logits.requires_grad_(), SINKS.clone().requires_grad_()
    more = torch.cat([logits, sinks[None, :, None].expand(5, 3, 1)], -1)
    p = torch.softmax(more, -1)[..., :-1]
    out, lse = by_head(p, values), torch.logsumexp(more, -1)
    do, dlse = torch.linspace(-1, 2, 60, dtype=torch.float64).view(5, 3, 4), torch.arange(15.0).double().view(5, 3)
    ((out * do).sum() + (lse * dlse).sum()).backward()
    delta = delta_of(do, out.detach(), dlse, torch.float64)
    torch.testing.assert_close(sinks_gradient(SINKS, lse.detach(), delta), sinks.grad)
    dp = by_head(do, values.transpose(0, 2))
    torch.testing.assert_close(p.detach() * (dp - delta[..., None]), logits.grad)
    without = delta_of(do, out.detach(), None, torch.float64)
    torch.testing.assert_close(without - dlse, delta)


def test_reordered_gradients_keep_their_delta() -> None:
    do, out, dlse = torch.randn(5, 3, 4), torch.randn(5, 3, 4), torch.randn(5, 3)
    whole = OutputGradient(do, out, dlse, torch.float32)
    turned = whole.in_order(lambda x: x.flip(0))
    assert torch.equal(turned.do, do.flip(0)) and turned.out is None
    assert torch.equal(turned.delta, delta_of(do, out, dlse, torch.float32).flip(0))


def test_a_sinks_gradient_survives_cancellation() -> None:
    """Terms of up to 2**24 add up to 1,000 for each head, which sums in float32 would lose in any order."""
    generator = torch.Generator().manual_seed(0)
    large = torch.randint(1 << 20, 1 << 24, (4096, 3), generator=generator)
    terms = torch.cat([large, -large, torch.ones(1000, 3, dtype=torch.int64)])[
        torch.randperm(9192, generator=generator)
    ]
    lse, sinks = torch.zeros(9192, 3), torch.zeros(3)
    assert sinks_gradient(sinks, lse, terms.float()).tolist() == [-1000.0] * 3


def test_a_row_without_keys_gives_a_sink_no_gradient() -> None:
    lse, delta = torch.tensor([[-torch.inf], [0.0]]), torch.tensor([[0.0], [3.0]])
    assert sinks_gradient(torch.zeros(1), lse, delta).tolist() == [-3.0]

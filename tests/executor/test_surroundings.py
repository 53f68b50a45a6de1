"""Proves that what surrounds a call (inference mode, a default device, autocast around ``expand``) does not change
what a step keeps, where its own tensors lie, or its results.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import flexcp
from flexcp.executor.exchange.arena import Arena
from flexcp.executor.exchange.collectives import Collectives
from flexcp.measure.ranks import RankPool
from flexcp.plan.plan import Plan

LENGTHS = [19, 8]
TOKENS = sum(LENGTHS)


def planned(ranks: int = 1, **options: Any) -> Plan:
    given = {"heads": 4, "kv_heads": 2, "head_dim": 8, "dtype": "float64", "strategy": "ring"} | options
    return flexcp.Planner(cluster=flexcp.cluster("cpu", ranks_per_node=ranks), **given)(LENGTHS)


def stream(*sizes: int) -> Tensor:
    drawn = torch.Generator(device="cpu").manual_seed(sizes[0])
    return torch.randn(TOKENS, *sizes, generator=drawn, dtype=torch.float64, device="cpu")


def inputs(step: flexcp.Step) -> list[Tensor]:
    return [step.shard(stream(heads, 8)).requires_grad_() for heads in (4, 2, 2)]


# --- inference mode ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_step_of_inference_mode_can_be_trained_with(pool: RankPool, ranks: int) -> None:
    assert pool.run(on_evaluation, planned(ranks), ranks=ranks) == [True] * ranks


def gradients(step: flexcp.Step) -> list[Tensor]:
    given = inputs(step)
    table = torch.linspace(-1, 1, TOKENS, dtype=torch.float64).requires_grad_()
    weights = torch.nn.functional.embedding(step.positions, table[:, None])
    out = flexcp.attention(*given, step)
    assert isinstance(out, Tensor)
    return list(torch.autograd.grad((step.roll(out)[:, 0] * weights).sum(), [*given, table]))


def on_evaluation(group: dist.ProcessGroup, plan: Plan) -> bool:
    expected = gradients(flexcp.bind(plan, group))
    with torch.inference_mode():
        step = flexcp.bind(plan, group)
        flexcp.attention(*[x.detach() for x in inputs(step)], step)
        assert len(step.indices) == len(step.positions) == step.local_tokens
        step.prepare("cpu")
    later = flexcp.bind(plan, group, arena=step.arena)
    return all(map(torch.equal, [*gradients(step), *gradients(later)], [*expected, *expected]))


def test_an_arena_of_inference_mode_can_be_written_to_later() -> None:
    arena = Arena()
    with torch.inference_mode(), arena.lease(64, torch.device("cpu")):
        pass
    with arena.lease(64, torch.device("cpu")) as memory:
        memory.zero_()


def test_slices_of_inference_mode_can_be_trained_with() -> None:
    with torch.inference_mode():
        slices = flexcp.packed_slices(LENGTHS, flexcp.causal())
    q, k, v = (stream(heads, 8).requires_grad_() for heads in (4, 2, 2))
    out = flexcp.slice_attention(q, k, v, slices)
    assert isinstance(out, Tensor)
    out.sum().backward()


# --- a default device -------------------------------------------------------------------------------------------------


def on_default_device(group: dist.ProcessGroup, plan: Plan) -> bool:
    expected = gradients(flexcp.bind(plan, group))
    with torch.device("meta"):
        step = flexcp.bind(plan, group)
        given = inputs(step)
        out = flexcp.attention(*given, step)
        assert isinstance(out, Tensor)
        found = torch.autograd.grad(step.roll(out)[:, 0].sum(), given)
        whole = step.gather(step.restore(step.relayout(out)))
        told = Collectives(group, timedelta(seconds=20)).told("names", step.rank, torch.device("cpu"))
    own = [step.handle, step.indices, step.positions, whole, *found]
    return told == list(range(plan.ranks)) and all(x.device.type == "cpu" for x in [*own, *expected])


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_default_device_does_not_move_what_belongs_on_the_cpu(pool: RankPool, ranks: int) -> None:
    assert pool.run(on_default_device, planned(ranks), ranks=ranks) == [True] * ranks


def test_the_reference_kernel_works_under_a_default_device() -> None:
    q, k, v = (stream(heads, 8) for heads in (4, 2, 2))
    expected = flexcp.slice_attention(q, k, v, flexcp.causal(), LENGTHS, kernel="reference")
    with torch.device("meta"):
        found = flexcp.slice_attention(q, k, v, flexcp.causal(), LENGTHS, kernel="reference")
    assert isinstance(found, Tensor) and isinstance(expected, Tensor) and torch.equal(found, expected)


# --- autocast around expand -------------------------------------------------------------------------------------------


def expand(latent: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    wide = (latent @ up).view(len(latent), 4, 16)
    return wide[..., :8].contiguous(), wide[..., 8:].contiguous()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_expand_runs_under_the_autocast_of_the_call_in_both_directions(dtype: torch.dtype) -> None:
    """The same as an expand that casts by itself, without autocast."""
    name = str(dtype).removeprefix("torch.")
    step = flexcp.bind(planned(kv_heads=1, latent=6, dtype=name, strategy="dp"))
    step.prepare("cpu")

    def cast(latent: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        k, v = expand(latent.bfloat16(), up.bfloat16())
        return k.to(dtype), v.to(dtype)

    results = []
    for casts in (True, False):
        q, latent = (step.shard(stream(*size)).to(dtype).requires_grad_() for size in ((4, 8), (6,)))
        up = torch.linspace(-1, 1, 6 * 64).view(6, 64).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=casts):
            out = flexcp.latent_attention(q, latent, expand if casts else cast, [up], step)
        results.append([out, *torch.autograd.grad(out.sum(), (q, latent, up))])
    assert all(map(torch.equal, *results))

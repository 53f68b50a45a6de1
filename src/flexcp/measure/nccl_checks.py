"""NCCL checks: what must hold of the exchange on a device, as functions that return numbers. One GPU is enough: ranks share it.

    python benchmarks/gpu.py --only nccl --patience 3000 --write nccl.json

- :func:`right_everywhere`: every strategy x mask on 2, 4 and 8 ranks, forward and backward, by the bf16 rule.
- :func:`same_every_time`: 100 repeats of forward and backward have the same bits, with whole stages and with calls of one round.
- :func:`first_among_some`: the first exchange of a new group is among some of its ranks only, and one rank never exchanges anything.
- :func:`host_waits`: calls of the CUDA runtime that make the host wait, as the profiler saw them in a layer after the first.

Ranks get a host id each (:func:`flexcp.measure.gpu_checks.on_nccl_ranks`); NCCL then goes through sockets, so times mean nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flexcp.clusters import cluster
from flexcp.executor.op import attention
from flexcp.executor.step import Step, bind
from flexcp.measure.gpu_checks import LENGTHS, STRATEGIES, gpu_cases, on_nccl_ranks, verify_gpu
from flexcp.plan import Plan
from flexcp.planner import Planner

RANKS = (2, 4, 8)
REPEATS = 100
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
PATIENCE = 1200.0


def run_all(kernel: str | None = None) -> dict[str, Any]:
    """Every check, by name, and whether all of them hold."""
    found: dict[str, Any] = {
        "right": right_everywhere(kernel),
        "same": {ranks: same_every_time(ranks, kernel) for ranks in RANKS},
        "first among some": {ranks: first_among_some(ranks, kernel) for ranks in (4, 8)},
        "host waits": {ranks: host_waits(ranks, kernel) for ranks in RANKS},
    }
    wrong = [found["right"]["failed"], *found["same"].values(), *found["first among some"].values()]
    waits = [names for each in found["host waits"].values() for names in each.values() if names]
    return {**found, "failed": bool(any(wrong) or waits)}


def right_everywhere(kernel: str | None) -> dict[str, Any]:
    """How many cases passed, and those that did not."""
    return verify_gpu(list(gpu_cases(kernel, RANKS)))


def same_every_time(ranks: int, kernel: str | None) -> list[str]:
    """Strategies and repeats in which a bit differed on some rank."""
    plans = [_plan(strategy, ranks) for strategy in STRATEGIES]
    answers = on_nccl_ranks(ranks, _repeats, plans, kernel, patience=PATIENCE)
    return sorted({wrong for rank in answers for wrong in rank})


def first_among_some(ranks: int, kernel: str | None) -> list[str]:
    """What went wrong where only some ranks exchange anything; each plan in a group that never did before."""
    plan = Planner(8, 4, 128, cluster=cluster("cpu", 1, ranks), strategy=f"zigzag:{ranks // 2}")([700])
    assert not plan.peers(ranks - 1) and plan.peers(0)  # the second group has no document
    answers = on_nccl_ranks(ranks, _repeats, [plan], kernel, patience=PATIENCE)
    return sorted({wrong for rank in answers for wrong in rank})


def host_waits(ranks: int, kernel: str | None) -> dict[str, list[str]]:
    """For each strategy the runtime calls of a layer that made some rank's host wait."""
    plans = [_plan(strategy, ranks) for strategy in STRATEGIES]
    answers = on_nccl_ranks(ranks, _waits, plans, kernel, patience=PATIENCE)
    return {name: sorted({call for rank in answers for call in rank[name]}) for name in answers[0]}


def _plan(strategy: str, ranks: int) -> Plan:
    return Planner(8, 4, 128, cluster=cluster("cpu", 1, ranks), strategy=strategy)(LENGTHS)


def _repeats(groups: dict[int, Any], plans: list[Plan], kernel: str | None) -> list[str]:
    wrong = []
    for plan in plans:
        group = groups[plan.ranks]
        for calls in ({}, {"rounds_per_call": 1, "chunk_bytes": 1 << 16}):
            step = bind(plan, group, **calls)  # type: ignore[arg-type]
            inputs = _inputs(step)
            exact = _layer(step, inputs, kernel)
            for repeat in range(REPEATS):
                same = all(torch.equal(a, b) for a, b in zip(_layer(step, inputs, kernel), exact, strict=True))
                wrong += [] if same else [f"{plan.strategy} {calls} repeat {repeat}"]
            if not all(bool(torch.isfinite(x).all()) for x in exact):
                wrong.append(f"{plan.strategy} {calls}: not finite")
    return wrong


def _waits(groups: dict[int, Any], plans: list[Plan], kernel: str | None) -> dict[str, list[str]]:
    found = {}
    for plan in plans:
        step = bind(plan, groups[plan.ranks])
        inputs = _inputs(step)
        _layer(step, inputs, kernel)
        torch.cuda.synchronize()
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profiler:
            _layer(step, inputs, kernel)
            # Leaving the profiler waits for the device, but in no layer: what it counts there comes after this mark.
            with torch.profiler.record_function("layer ends"):
                pass
        events = profiler.events()
        end = min(e.time_range.start for e in events if e.name == "layer ends")
        found[plan.strategy] = [e.name for e in events if e.name in WAITS and e.time_range.start < end]
    return found


def _inputs(step: Step) -> tuple[Tensor, ...]:
    """This rank's q, k, v and gradient of the output, the same in every run."""
    shape, generator = step.plan.shape, torch.Generator("cuda").manual_seed(step.rank)
    sizes = [(shape.heads, shape.head_dim)] + [(shape.kv_heads, shape.head_dim)] * 2 + [(shape.heads, shape.v_head_dim)]
    return tuple(
        torch.randn(step.local_tokens, *size, device="cuda", dtype=torch.bfloat16, generator=generator)
        for size in sizes
    )


def _layer(step: Step, inputs: tuple[Tensor, ...], kernel: str | None) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in inputs[:3]]
    out = attention(leaves[0], leaves[1], leaves[2], step, kernel=kernel, deterministic=True)
    assert isinstance(out, Tensor)
    return [out.detach(), *torch.autograd.grad(out, leaves, inputs[3])]

"""NCCL checks: functions that return numbers which must hold for the exchange on a device.
One GPU is enough: ranks share it.

    python benchmarks/gpu.py --only nccl --patience 500 --write nccl.json

- :func:`right_everywhere`: every strategy x mask, forward and backward, by the bf16 rule.
- :func:`same_every_time`: 100 repeats of forward and backward give the same bits, with whole stages and with calls of
  one round.
- :func:`first_among_some`: the first exchange of a new group involves only some of its ranks, and one rank never
  exchanges anything.
- :func:`host_waits`: calls of the CUDA runtime that make the host wait, as the profiler saw them in a layer after the
  first.
- :func:`failures`: how ranks end when one of them hangs, or binds another plan.

Each rank has its own NCCL host id (:mod:`lib.nccl_ranks`); NCCL then uses sockets, so times mean nothing.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flexcp.clusters import cluster
from flexcp.executor.attention import attention
from flexcp.executor.bind import bind
from flexcp.executor.step import Step
from flexcp.plan.plan import Plan
from flexcp.planner import Planner
from lib.gpu_checks import LENGTHS, GpuCase, gpu_cases, verify_gpu
from lib.nccl_ranks import ends_of_nccl_ranks, on_nccl_ranks

RANKS = (2, 4, 8)
REPEATS = 100
IN_ROUNDS = ("ring", "allgather", "blocks", "hypergraph")
"""Strategies that are also repeated with calls of one round."""
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
PATIENCE = 500.0
LIMIT = 10.0
"""Seconds that a rank may wait for another in :func:`failures`."""


def run_all(
    ranks: int, kernel: str | None = None, cases: Sequence[GpuCase] | None = None, checks: Sequence[str] = ()
) -> dict[str, Any]:
    """Run the checks (all, or the named ones) on this many ranks and return whether all hold;
    ``cases`` may be made elsewhere.
    """
    chosen = [c for c in cases or gpu_cases(kernel, (ranks,)) if c.plan.ranks == ranks]
    plans = [c.plan for c in chosen if " causal " in c.name]
    every: dict[str, Callable[[], Any]] = {
        "right": lambda: right_everywhere(chosen),
        "some": lambda: first_among_some(ranks, kernel) if ranks >= 4 else [],
        "failures": lambda: failures(ranks, kernel),
        "same": lambda: same_every_time(plans, kernel),
        "waits": lambda: host_waits(plans, kernel),
    }
    found: dict[str, Any] = {"ranks": ranks, "strategies": sorted({plan.strategy for plan in plans})}
    for name, check in every.items():
        if not checks or name in checks:
            begin = time.monotonic()
            found[name] = check()
            told = f"{ranks} ranks, {name} ({time.monotonic() - begin:.0f} s): {json.dumps(found[name])}"
            print(told, file=sys.stderr, flush=True)
    wrong = [
        found.get("right", {}).get("failed"),
        found.get("same"),
        found.get("some"),
        *found.get("waits", {}).values(),
    ]
    hung = [name for name, ends in found.get("failures", {}).items() if not _ended_in_time(name, ends)]
    return {**found, "failed": bool(any(wrong) or hung)}


def right_everywhere(cases: Sequence[GpuCase]) -> dict[str, Any]:
    """Return how many cases passed, and the ones that failed."""
    return verify_gpu(list(cases), PATIENCE)


def same_every_time(plans: Sequence[Plan], kernel: str | None) -> list[str]:
    """Return the strategies and repeats in which a bit differed on some rank."""
    answers = on_nccl_ranks(plans[0].ranks, _repeats, plans, kernel, patience=PATIENCE)
    return sorted({wrong for rank in answers for wrong in rank})


def first_among_some(ranks: int, kernel: str | None) -> list[str]:
    """Return what went wrong if only some ranks exchange anything in a new group."""
    plan = Planner(8, 4, 128, cluster=cluster("cpu", 1, ranks), strategy=f"zigzag:{ranks // 2}")([700])
    assert not plan.peers(ranks - 1) and plan.peers(0)  # the second group has no document
    answers = on_nccl_ranks(ranks, _repeats, [plan], kernel, patience=PATIENCE)
    return sorted({wrong for rank in answers for wrong in rank})


def host_waits(plans: Sequence[Plan], kernel: str | None) -> dict[str, list[str]]:
    """Return for each strategy the runtime calls of a layer that made some rank's host wait."""
    answers = on_nccl_ranks(plans[0].ranks, _waits, plans, kernel, patience=PATIENCE)
    return {name: sorted({call for rank in answers for call in rank[name]}) for name in answers[0]}


def failures(ranks: int, kernel: str | None) -> dict[str, list[dict[str, Any]]]:
    """Return how each rank ended when the last one hangs before its second layer, and when it binds another plan."""
    plans = [_plan(strategy, ranks) for strategy in ("ring", "allgather")]
    return {
        name: ends_of_nccl_ranks(ranks, function, plans, kernel, limit=LIMIT, patience=8 * LIMIT, staying=staying)
        for name, function, staying in (("stands still", _stands_still, 1), ("another plan", _another_plan, 0))
    }


def _ended_in_time(name: str, ends: list[dict[str, Any]]) -> bool:
    """Return whether every rank (except one that hangs) ended with an error in time."""
    others = ends[:-1] if name == "stands still" else ends
    return all(end["code"] not in (None, 0) for end in others)


def _stands_still(groups: dict[int, Any], plans: list[Plan], kernel: str | None) -> None:
    step = bind(plans[0], groups[plans[0].ranks])
    inputs = _inputs(step)
    _layer(step, inputs, kernel)
    torch.cuda.synchronize()
    if step.rank == step.cp_size - 1:
        time.sleep(100 * LIMIT)
    _layer(step, inputs, kernel)
    torch.cuda.synchronize()


def _another_plan(groups: dict[int, Any], plans: list[Plan], kernel: str | None) -> None:
    group = groups[plans[0].ranks]
    bind(plans[group.rank() == group.size() - 1], group, timeout=LIMIT)


def _plan(strategy: str, ranks: int) -> Plan:
    return Planner(8, 4, 128, cluster=cluster("cpu", 1, ranks), strategy=strategy)(LENGTHS)


def _repeats(groups: dict[int, Any], plans: Sequence[Plan], kernel: str | None) -> list[str]:
    wrong = []
    in_rounds: dict[str, Any] = {"rounds_per_call": 1, "chunk_bytes": 1 << 16}
    whole: dict[str, Any] = {}
    runs = [(plan, whole) for plan in plans] + [(plan, in_rounds) for plan in plans if plan.strategy in IN_ROUNDS]
    for plan, calls in runs:
        begin = time.monotonic()
        step = bind(plan, groups[plan.ranks], **calls)
        inputs = _inputs(step)
        exact = _layer(step, inputs, kernel)
        # Counted on the device: reading the result after each repeat would keep passes from following each other
        # closely.
        differ = torch.zeros(REPEATS, dtype=torch.int64, device="cuda")
        for repeat in range(REPEATS):
            for again, first in zip(_layer(step, inputs, kernel), exact, strict=True):
                differ[repeat] += (again != first).sum()
        found = [f"{plan.strategy} {calls} repeat {n}" for n in differ.nonzero().flatten().tolist()]
        if not all(bool(torch.isfinite(x).all()) for x in exact):
            found.append(f"{plan.strategy} {calls}: not finite")
        everywhere = torch.tensor([len(found)], device="cuda")
        dist.all_reduce(everywhere, group=groups[plan.ranks])
        if step.rank == 0:
            told = f"{REPEATS} repeats, {int(everywhere)} wrong over all ranks, {time.monotonic() - begin:.0f} s"
            print(f"{plan.ranks} ranks, {plan.strategy} {calls}: {told}", file=sys.stderr, flush=True)
        wrong += found
    return wrong


def _waits(groups: dict[int, Any], plans: Sequence[Plan], kernel: str | None) -> dict[str, list[str]]:
    found = {}
    for plan in plans:
        step = bind(plan, groups[plan.ranks])
        inputs = _inputs(step)
        _layer(step, inputs, kernel)
        torch.cuda.synchronize()
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profiler:
            _layer(step, inputs, kernel)
            # Leaving the profiler waits for the device, but not in a layer; that wait comes after this mark.
            with torch.profiler.record_function("layer ends"):
                pass
        events = profiler.events()
        end = min(e.time_range.start for e in events if e.name == "layer ends")
        found[plan.strategy] = [e.name for e in events if e.name in WAITS and e.time_range.start < end]
    return found


def _inputs(step: Step) -> tuple[Tensor, ...]:
    """Return this rank's q, k, v and output gradient, the same in every run."""
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

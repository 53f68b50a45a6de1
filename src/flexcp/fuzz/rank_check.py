"""Rank check: run a plan on real ranks, forward and backward under each mask, and compare with dense float64 attention.

Every rank makes the same stream (the documents laid end to end) from the seed; rank 0 gathers the results and this
process compares them. The passes of all masks share one step, as layers do, and the first mask runs twice: on a CPU the
same plan must give the same bits. Errors are max|x - ref| / max(1, max|ref|). Float64 may be off by 1e-10, lower
precisions by :data:`ROUNDINGS` of their own roundings, which is loose but finds a missing or doubled contribution.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from flexcp.executor.attention import attention
from flexcp.executor.bind import bind
from flexcp.executor.kernels import accumulator_dtype
from flexcp.executor.step import Step
from flexcp.fuzz.cases import Run
from flexcp.fuzz.dense_attention import Inputs, dense_attention
from flexcp.fuzz.token_machine import require
from flexcp.measure.ranks import RankPool
from flexcp.plan.plan import Plan

Bools = NDArray[np.bool_]
Stream = dict[str, torch.Tensor | None]
EXACT = 1e-10
LIMIT = 240.0
"""Seconds that ranks wait for each other."""
ROUNDINGS = 24
"""How many roundings of a low precision a result may be off.

Inputs, probabilities and results are each rounded, and gradients add these errors up.
"""


def check_ranks(plan: Plan, dense: list[list[Bools]], how: Run, pool: RankPool) -> None:
    """Run the plan on the first ranks of ``pool``, and check its results, that they repeat bit for bit, and bytes sent.

    ``dense[mask][document]`` are the (query, key) pairs that attend. Raises :class:`flexcp.fuzz.token_machine.Wrong`.
    """
    found = pool.run(run_plan, plan, how, ranks=plan.ranks)[0]
    require(found["again"], "the same plan gave other bits in its second pass")
    for backward, sent in enumerate(found["sent"]):
        wire = plan.bytes(bool(backward), 0) * 2  # the first mask runs twice
        for mask in range(1, len(plan.batch.masks)):
            wire = wire + plan.bytes(bool(backward), mask)
        require(sent == wire.tolist(), f"{'backward' if backward else 'forward'}: bytes on the wire are not the plan's")
    stream = made_stream(plan, how)
    x = {name: None if value is None else value.double().numpy() for name, value in stream.items()}
    inputs = Inputs(**x, softcap=how.softcap)  # type: ignore[arg-type]
    allowed = EXACT
    if plan.shape.dtype != "float64":
        allowed = ROUNDINGS * torch.finfo(getattr(torch, plan.shape.dtype)).eps
    for mask, results in enumerate(found["results"]):
        for name, exact in dense_attention(inputs, dense[mask]).items():
            error = _error(results[name].double().numpy(), exact)
            require(error <= allowed, f"mask {mask}: {name} is off by {error:.3g}, allowed {allowed:.3g}")


def made_stream(plan: Plan, how: Run) -> Stream:
    """Return the inputs of the whole stream, and the gradients of its outputs, drawn from the seed of ``how``.

    They are in the plan's dtype; the gradient of the LSE is in the accumulator dtype.
    """
    generator = torch.Generator().manual_seed(how.seed)
    shape, tokens = plan.shape, plan.batch.tokens
    dtype = getattr(torch, shape.dtype)

    def drawn(*size: int, factor: float = 1.0) -> torch.Tensor:
        x = torch.randn(*size, generator=generator, dtype=torch.float64) * factor
        return (torch.ones_like(x) * factor if how.values == "equal" else x).to(dtype)

    large = 12.0 if how.values == "large" else 1.0
    gradient = drawn(tokens, shape.heads).to(accumulator_dtype(dtype))
    return {
        "q": drawn(tokens, shape.heads, shape.head_dim, factor=large),
        "k": drawn(tokens, shape.kv_heads, shape.head_dim, factor=large),
        "v": drawn(tokens, shape.kv_heads, shape.v_head_dim),
        "do": drawn(tokens, shape.heads, shape.v_head_dim),
        "dlse": gradient if how.lse_gradient else torch.zeros_like(gradient),
        "sinks": drawn(shape.heads) if how.sinks else None,
    }


def run_plan(group: dist.ProcessGroup, plan: Plan, how: Run) -> dict[str, Any] | None:
    """Run all masks in one step, and the first once more; this function is called on every rank.

    On rank 0 it returns the results of each mask, whether the second run gave the same bits (``again``), and the bytes
    sent, by direction and rank; on other ranks None.
    """
    stream = made_stream(plan, how)
    step = bind(plan, group, LIMIT, rounds_per_call=how.rounds_per_call, chunk_bytes=how.chunk_bytes)
    masks = [mask.name for mask in plan.batch.masks]
    results = [_one_mask(step, stream, how, name) for name in masks]
    again = _one_mask(step, stream, how, masks[0])
    same = all(torch.equal(x, again[name]) for name, x in results[0].items())
    everyone: list[Any] = [None] * plan.ranks
    sent = [step.sent_bytes[way] for way in ("forward", "backward")]
    dist.all_gather_object(everyone, sent, group=group)
    if step.rank:
        return None
    return {"results": results, "again": same, "sent": [[each[way] for each in everyone] for way in (0, 1)]}


def _one_mask(step: Step, stream: Stream, how: Run, name: str) -> dict[str, torch.Tensor]:
    """Run the mask called ``name``, forward and backward, and return its results in stream order."""
    q, k, v = (step.shard(_not_none(stream[n])).requires_grad_() for n in "qkv")
    sinks = None if stream["sinks"] is None else stream["sinks"].clone().requires_grad_()
    out, lse = attention(q, k, v, step, mask=name, softcap=how.softcap, sinks=sinks, return_lse=True, kernel=how.kernel)
    outputs, gradients = [out], [step.shard(_not_none(stream["do"]))]
    if how.lse_gradient:
        outputs.append(lse)
        gradients.append(step.shard(_not_none(stream["dlse"])))
    torch.autograd.backward(outputs, gradients)
    local = {"out": out, "lse": lse, "dq": q.grad, "dk": k.grad, "dv": v.grad}
    found = {n: step.gather(_not_none(x).detach()) for n, x in local.items()}
    if sinks is not None:
        total = _not_none(sinks.grad).double()
        if step.group is not None:  # one rank has no group, and torch would take None for all processes of the pool
            dist.all_reduce(total, group=step.group)
        found["dsinks"] = total
    return found


def _not_none(x: torch.Tensor | None) -> torch.Tensor:
    assert x is not None
    return x


def _error(found: np.ndarray, exact: np.ndarray) -> float:
    """Return max|x - ref| / max(1, max|ref|).

    It is infinite if shapes or the rows without keys (-inf) differ, or a value is not finite.
    """
    empty = np.isneginf(exact)
    if found.shape != exact.shape or not np.array_equal(np.isneginf(found), empty):
        return float("inf")
    x, ref = np.where(empty, 0.0, found), np.where(empty, 0.0, exact)
    error = float(np.abs(x - ref).max(initial=0.0) / max(1.0, float(np.abs(ref).max(initial=0.0))))
    return error if np.isfinite(error) else float("inf")

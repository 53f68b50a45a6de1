"""Memory on a GPU: ``plan.memory(rank)`` compared with the peak of CUDA's allocator, and batches that fill a cap.

A layer is q, k and v, attention, and its backward from an existing gradient. ``torch.cuda.max_memory_allocated`` beyond
what was allocated before q was made is compared with the plan's total for the kernel that runs. On several NCCL ranks
of one GPU each rank reads its own allocator. Memory that NCCL takes outside of it (a communicator, and buffers for its
peers) is the change of the device's free memory around the first call and around connecting, over all ranks together.

For the cap, batches change and are cut so that the plan's total is just under 95 % of what the process may allocate;
every one of them must run.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import flexcp
from flexcp.data.lengths import parse_lengths
from flexcp.executor.step import Step
from flexcp.plan.plan import Plan
from lib.trust_ranks import Row, Setting, attempted, on_ranks, synchronize

WITHIN = 0.05
"""The largest relative error of a prediction that passes."""
FULL = 0.95
"""The part of the cap that batches are made to fill."""
MIB = 1 << 20


def rows(setting: Setting) -> Iterator[Row]:
    """Yield rows of one rank from few tokens to a million, of several ranks, then of the cap."""
    for name, lengths, heads, kv_heads in _one_rank_cases(setting.small):
        yield attempted(setting, name, 1, partial(_on_one, setting, lengths, heads, kv_heads))
    for ranks in (2,) if setting.small else (2, 4):
        cases = _several_rank_cases(setting.small)
        # The ranks are started once for all cases.
        found = attempted(setting, "several ranks", ranks, partial(_on_several, setting, ranks, cases), least=30)
        yield from found.get("rows") or [found]
    yield attempted(setting, "a cap", 1, partial(under_a_cap, setting))


def _on_one(setting: Setting, lengths: list[int], heads: int, kv_heads: int) -> Row:
    """Return the row of one case on a single rank."""
    planner = flexcp.Planner(heads, kv_heads, 128, dtype=setting.dtype, cluster=setting.cluster(1), strategy="dp")
    return measured(None, planner(lengths), setting.device)


def _on_several(setting: Setting, ranks: int, cases: list[tuple[str, str, list[int]]]) -> Row:
    """Return a row for each case, from the rank with the largest error."""
    plans = [_planner(setting, ranks, strategy)(lengths) for _, strategy, lengths in cases]
    answers: list[list[Row]] = on_ranks(setting, ranks, _measured_all, plans, setting.device, patience=150)
    worst = [max(of_case, key=lambda row: abs(row["off"] or 0.0)) for of_case in zip(*answers, strict=True)]
    return {
        "rows": [
            {"what": f"{name}, {strategy}", "ranks": ranks} | row
            for (name, strategy, _), row in zip(cases, worst, strict=True)
        ]
    }


def _planner(setting: Setting, ranks: int, strategy: str) -> flexcp.Planner:
    """Return a planner for this many ranks, with fewer heads if sizes are small."""
    heads = (4, 1) if setting.small else (32, 8)
    return flexcp.Planner(*heads, 128, dtype=setting.dtype, cluster=setting.cluster(ranks), strategy=strategy)


def _measured_all(group: dist.ProcessGroup, plans: list[Plan], device: str) -> list[Row]:
    """Return what :func:`measured` finds for each plan on this rank."""
    return [measured(group, plan, device) for plan in plans]


def measured(group: dist.ProcessGroup | None, plan: Plan, device: str) -> Row:
    """Return predicted and measured bytes of one layer on this rank, of tables, and of NCCL."""
    free = [_free(group, device)]
    if group is not None:
        dist.all_reduce(torch.zeros(1, device=device), group=group)  # NCCL makes its communicator at the first call
        free.append(_free(group, device))
    step = flexcp.bind(plan, group)
    free.append(_free(group, device))
    _layer(step, device)  # compiles kernels and makes one-time allocations
    step = flexcp.bind(plan, group)
    peak = _peak(step, device)
    kernel = next(iter(step.kernels))
    predicted = plan.memory(step.rank, kernel).total
    outside = [before - after for before, after in pairwise(free)]
    off = None if peak is None else predicted / peak - 1
    return {
        "tokens": step.local_tokens,
        "kernel": kernel,
        "predicted": predicted,
        "peak": peak,
        "off": off,
        "arena": plan.memory(step.rank).arena,
        "tables": sum(x.untyped_storage().nbytes() for x in step.tables.tensors()),
        "tables predicted": plan.memory(step.rank).tables,
        "communicators": outside[0] if group is not None else 0,
        "peer buffers": outside[1] if group is not None else 0,
        "ok": None if off is None else abs(off) <= WITHIN,
    }


def under_a_cap(setting: Setting, batches: int = 500) -> Row:
    """Run changing batches whose predicted memory is just under 95 % of what this process may allocate."""
    batches = 5 if setting.small else batches
    if setting.device != "cuda":
        cap = 4 * MIB
        done = _fill(setting, cap, batches)
        return {"cap": cap, "batches": done[0], "largest predicted": done[1], "ok": done[0] == batches}
    torch.cuda.empty_cache()
    whole = torch.cuda.get_device_properties(0).total_memory
    cap = 1024 * MIB
    torch.cuda.set_per_process_memory_fraction(cap / whole)
    torch.cuda.reset_peak_memory_stats()
    begin = time.monotonic()
    try:
        done = _fill(setting, cap, batches)
        why = None if done[0] == batches else f"{done[0]} batches in the time there was"
    except torch.cuda.OutOfMemoryError as error:
        done, why = (0, 0), f"out of memory: {error}"
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    return {
        "cap": cap,
        "batches": done[0],
        "largest predicted": done[1],
        "peak": torch.cuda.max_memory_reserved(),
        "seconds": round(time.monotonic() - begin, 1),
        "ok": why is None,
        "why": why,
    }


def _fill(setting: Setting, cap: int, batches: int) -> tuple[int, int]:
    """Return how many batches ran, and the largest prediction for one."""
    rng, most = random.Random(setting.seed), 0
    for number in range(batches):
        if setting.left < 5:
            return number, most
        plan = _filling(setting, rng, int(FULL * cap))
        step = flexcp.bind(plan)
        _layer(step, setting.device)
        most = max(most, plan.memory(0, next(iter(step.kernels))).total)
    synchronize(setting.device)
    return batches, most


def _filling(setting: Setting, rng: random.Random, limit: int) -> Plan:
    """Return the plan of a batch of random documents that needs as much of ``limit`` as possible, to one token."""
    mask = rng.choice((flexcp.causal(), flexcp.full(), flexcp.window(512, 0)))
    kernel = "hopper" if setting.device == "cuda" else None
    planner = _planner(setting, 1, "dp")
    each = planner([1024], mask).memory(0, kernel).total / 1024
    room, lengths = int(limit / each), list[int]()
    while room - sum(lengths) > 0:
        lengths.append(min(rng.randrange(1, rng.choice((64, 1024, 8192))), room - sum(lengths)))
    plan = planner(lengths, mask)
    while plan.memory(0, kernel).total > limit:
        lengths[-1:] = [lengths[-1] - 1] if lengths[-1] > 1 else []
        plan = planner(lengths, mask)
    return plan


def _layer(step: Step, device: str) -> None:
    """Run attention forward and backward once."""
    (q, k, v), do = _tensors(step, device)
    out = flexcp.attention(q, k, v, step)
    assert isinstance(out, Tensor)
    torch.autograd.grad(out, (q, k, v), do)


def _tensors(step: Step, device: str) -> tuple[list[Tensor], Tensor]:
    """Return ([q, k, v], gradient of the output) with random values for this rank."""
    shape, tokens = step.plan.shape, step.local_tokens
    assert len(step.indices) == tokens  # unread indices would make attention warn
    options: dict[str, Any] = {"device": device, "dtype": getattr(torch, shape.dtype)}
    q = torch.randn(tokens, shape.heads, shape.head_dim, **options).requires_grad_()
    k = torch.randn(tokens, shape.kv_heads, shape.head_dim, **options).requires_grad_()
    v = torch.randn(tokens, shape.kv_heads, shape.v_head_dim, **options).requires_grad_()
    return [q, k, v], torch.randn(tokens, shape.heads, shape.v_head_dim, **options)


def _peak(step: Step, device: str) -> int | None:
    """Return the peak bytes of the allocator during one layer, beyond what was allocated before; None on a CPU."""
    if device != "cuda":
        _layer(step, device)
        return None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    _layer(step, device)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _free(group: dist.ProcessGroup | None, device: str) -> int:
    """Return the free bytes of the device, read while all ranks wait here."""
    if device != "cuda":
        return 0
    torch.cuda.synchronize()
    _meet(group)
    found = int(torch.cuda.mem_get_info()[0])
    _meet(group)
    return found


def _meet(group: dist.ProcessGroup | None) -> None:
    """Wait for all ranks through the store, because a barrier of NCCL would make its communicator."""
    if group is None:
        return
    store, ranks = group.get_group_store(), dist.get_world_size(group)
    ticket = store.add("trust/meet", 1)
    last = f"trust/met/{(ticket - 1) // ranks}"
    if ticket % ranks == 0:
        store.set(last, "all")
    store.wait([last], timedelta(seconds=60))


def _one_rank_cases(small: bool) -> list[tuple[str, list[int], int, int]]:
    """Return (name, lengths, query heads, KV heads) of the cases on one rank."""
    if small:
        return [("one document", [200], 4, 1), ("packed web documents", parse_lengths("web:256:0"), 4, 1)]
    found = [(f"one document of {n:,}", [n], 32, 8) for n in (8192, 32_768, 131_072)]
    found += [(f"packed web documents, {n:,} tokens", parse_lengths(f"web:{n}:0"), 32, 8) for n in (262_144, 1_048_576)]
    return [*found, ("one document of 1,048,576, 4 heads", [1_048_576], 4, 1)]


def _several_rank_cases(small: bool) -> list[tuple[str, str, list[int]]]:
    """Return (name, strategy, lengths) of the cases on several ranks."""
    tokens = 128 if small else 16_384
    web = parse_lengths(f"web:{tokens}:0")
    return [("one document", name, [tokens]) for name in ("ring", "allgather")] + [("web documents", "blocks", web)]

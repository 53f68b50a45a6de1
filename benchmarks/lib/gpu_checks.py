"""GPU checks: functions that return numbers which must hold for the executor on a real GPU.

- :func:`verify_gpu`: strategies x masks on 1, 2 and 4 real NCCL ranks, all on one GPU, held to the rule of
  :mod:`flexcp.measure.verify`. Ranks can share the GPU because each has its own NCCL host id; this checks correctness,
  not speed.
- :func:`one_rank_overhead`: ``flexcp.attention`` on one rank against its bare kernel.
- :func:`host_waits`: host synchronisations that torch reported in a layer.
- :func:`peak_memory`: peak bytes of each of ten steps.
- :func:`wrong_merges`: outputs merged thousands of times.
- :func:`packing_times`: a stage's messages packed by rows and field by field.
- :func:`compiled_model`: ``slice_attention`` in a compiled model.

``run_all`` runs all of them. Cases can be made on another machine and passed in, so that the GPU machine need not plan.
"""

from __future__ import annotations

import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flexcp import masks
from flexcp.clusters import cluster
from flexcp.executor.attention import attention
from flexcp.executor.bind import bind
from flexcp.executor.exchange.arena import Buffers
from flexcp.executor.kernels import Settings, find_kernel, row_kernels
from flexcp.executor.run.message_layout import Shelves, new_inputs, new_own_results, new_results, types_of
from flexcp.executor.run.message_parts import message_bytes
from flexcp.executor.run.packing import FieldPacking, Packing
from flexcp.executor.run.rank_program import rank_program
from flexcp.executor.run.row_packing import RowPacking
from flexcp.executor.slice_attention import packed_slices, slice_attention
from flexcp.executor.step import Step
from flexcp.masks import Mask
from flexcp.measure.verify import Options, verify_on
from flexcp.plan.plan import Plan
from flexcp.planner import Planner
from flexcp.planners import strategies as planners
from lib.nccl_ranks import on_nccl_ranks

Leaves = tuple[Tensor, Tensor, Tensor]
LENGTHS = [700, 1, 260, 63, 128, 2]
STRATEGIES = tuple(n for n in planners.STRATEGIES if n not in planners.SLOW or find_spec("mtkahypar") is not None)
"""The strategies that can plan on this machine."""
RANKS = (1, 2, 4)
MASKS: dict[str, Callable[[int], Mask]] = {
    "full": lambda n: masks.full(),
    "causal": lambda n: masks.causal(),
    "window": lambda n: masks.window(150, 20),
    "lambda": lambda n: masks.lambda_(30, 110),
    "shared question": lambda n: masks.shared_question(3, 0.3),
    "blockwise": lambda n: masks.causal_blockwise(64, 2),
    "prefix": lambda n: masks.prefix(100),
    "modality": lambda n: masks.modality([(n // 4, n // 2), (n // 2, n - n // 5)], self_only=n % 2 == 0),
    # A staircase that leaves the first third of the rows without a key.
    "slices": lambda n: masks.from_slices(n, [(n // 3, n, 0, n // 2, None, -1), (n // 3, n, n // 2, n, -3, 5)]),
}


@dataclass(frozen=True)
class GpuCase:
    """A plan to verify, with the options of its attention call."""

    name: str
    plan: Plan
    options: Options


def gpu_cases(
    kernel: str | None = None, ranks_of: tuple[int, ...] = RANKS, strategies: tuple[str, ...] = STRATEGIES
) -> Iterator[GpuCase]:
    """Yield every strategy x mask on every number of ranks, in bfloat16.
    Softcap, sinks, LSE gradients and two nodes (with relays) are cycled through.
    From four ranks on, teams that divide keys follow, on two nodes and with fewer KV heads than ranks in a node.
    """
    every = [(ranks, name, 4, False) for ranks in ranks_of for name in strategies]
    every += [(ranks, "groups:split=keys", ranks // 4, True) for ranks in ranks_of if ranks >= 4]
    number = 0
    for ranks, strategy, kv_heads, several_nodes in every:
        for name, rule in MASKS.items():
            nodes = 2 if several_nodes or (ranks >= 4 and number % 2) else 1
            where = cluster("cpu", nodes, ranks // nodes)
            planner = Planner(8, kv_heads, 128, dtype="bfloat16", cluster=where, strategy=strategy)
            options = Options(
                seed=number,
                softcap=5.0 if number % 5 == 1 else None,
                sinks=number % 7 == 3,
                lse_gradient=number % 3 == 0,
                kernel=kernel,
                device="cuda",
            )
            plan = planner(LENGTHS, [rule(n) for n in LENGTHS])
            yield GpuCase(f"{strategy} {name} {nodes}x{ranks // nodes} ranks", plan, options)
            number += 1


# --- real NCCL ranks on one GPU ---------------------------------------------------------------------------------------


def _verify_cases(groups: dict[int, Any], cases: list[GpuCase]) -> list[tuple[str, bool, str]]:
    """Return names and verdicts on rank 0, which also prints progress:
    the first cases compile kernels, and a hang must be visible.
    """
    found = []
    begin = time.perf_counter()
    for number, case in enumerate(cases):
        ranks = case.plan.ranks
        if ranks not in groups:
            continue
        verdict = verify_on(groups[ranks], case.plan, case.options)
        if verdict is not None:
            found.append((case.name, verdict.passed, str(verdict)))
            what = "passed" if verdict.passed else "FAILED"
            print(
                f"{number + 1} of {len(cases)} {case.name}: {what}, {time.perf_counter() - begin:.1f} s",
                file=sys.stderr,
            )
    return found


def verify_gpu(cases: list[GpuCase], patience: float = 300.0) -> dict[str, Any]:
    """Return how many cases passed, and the failed ones with their verdicts."""
    results = _verify_cases({1: None}, cases)
    most = max(case.plan.ranks for case in cases)
    if most > 1:
        many = [case for case in cases if case.plan.ranks > 1]
        results += on_nccl_ranks(most, _verify_cases, many, patience=patience)[0]
    failed = {name: verdict for name, passed, verdict in results if not passed}
    return {"cases": len(results), "passed": len(results) - len(failed), "failed": failed}


# --- one rank ---------------------------------------------------------------------------------------------------------


def _layer(tokens: int, mask: Mask, lengths: list[int] | None = None) -> tuple[Step, tuple[Tensor, ...]]:
    """Return one rank's step, with bf16 tensors q, k, v, do of 32 query and 8 KV heads of size 128."""
    where = cluster("cpu", 1, 1)
    plan = Planner(32, 8, 128, dtype="bfloat16", cluster=where, strategy="dp")(lengths or [tokens], mask)
    generator = torch.Generator("cuda").manual_seed(0)
    made = [
        torch.randn(tokens, h, 128, device="cuda", dtype=torch.bfloat16, generator=generator) for h in (32, 8, 8, 32)
    ]
    return bind(plan), tuple(made)


def milliseconds(calls: Mapping[str, Callable[[], Any]], repeats: int = 20) -> dict[str, float]:
    """Return the median device time of each call after three to warm up;
    calls take turns, so that all run at the same clock.
    """
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in calls}
    for number in range(repeats + 3):
        for name, call in calls.items():
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            call()
            stop.record()
            if number >= 3:
                events[name].append((start, stop))
    torch.cuda.synchronize()
    return {n: float(statistics.median(a.elapsed_time(b) for a, b in pairs)) for n, pairs in events.items()}


def host_milliseconds(call: Callable[[], Any], repeats: int = 20) -> float:
    """Return the median time that the host takes to queue a call."""
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return 1e3 * statistics.median(times)


def one_rank_overhead(tokens: int = 16_384, kernel: str | None = None) -> dict[str, Any]:
    """Return the milliseconds of ``flexcp.attention`` and of its kernel's bare launches, forward and backward,
    on one causal document.
    """
    step, (q, k, v, do) = _layer(tokens, masks.causal())
    name = step.choose_kernel(q.device, kernel)
    module, settings = find_kernel(name), Settings(128**-0.5)
    types = types_of(q)
    work = step.prepared(0, False, name, types).work[0][0]
    out = torch.empty(do.shape, dtype=q.dtype if module.FRESH else torch.float32, device="cuda")
    lse, delta = (torch.zeros(do.shape[:2], device="cuda") for _ in range(2))
    grads = [torch.zeros(x.shape, dtype=d, device="cuda") for x, d in ((q, out.dtype), (k, None), (v, None))]
    fresh = replace(settings, fresh=module.FRESH)
    leaves = (q.clone().requires_grad_(), k.clone().requires_grad_(), v.clone().requires_grad_())
    kept = attention(*leaves, step, kernel=kernel)
    calls: dict[str, Callable[[], Any]] = {
        "bare forward": lambda: module.forward(q, k, v, work.list, fresh, out, lse),
        "attention forward": lambda: attention(q, k, v, step, kernel=kernel),
        "slice_attention forward": lambda: slice_attention(q, k, v, masks.causal(), kernel=kernel),
        "bare backward": lambda: module.backward(q, k, v, do, lse, delta, work.list, fresh, *grads),
        "attention backward": lambda: torch.autograd.grad(kept, leaves, do, retain_graph=True),
    }
    ms = milliseconds(calls)
    ours, bare = (ms[f"{who} forward"] + ms[f"{who} backward"] for who in ("attention", "bare"))
    return {
        "tokens": tokens,
        "kernel": f"{name}: {step.kernels[name]}",
        "ms": ms,
        "overhead %": {n: 100 * (ms[f"attention {n}"] / ms[f"bare {n}"] - 1) for n in ("forward", "backward")},
        "overhead % both": 100 * (ours / bare - 1),
        "host ms": {name: host_milliseconds(calls[name]) for name in ("attention forward", "attention backward")},
    }


def _steps(step: Step, leaves: Leaves, do: Tensor, kernel: str | None, **options: Any) -> list[Tensor]:
    out = attention(*leaves, step, kernel=kernel, **options)
    return list(torch.autograd.grad(out, leaves, do))


@contextmanager
def noting_waits() -> Iterator[list[str]]:
    """Collect torch's warnings about host synchronisations inside the block."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    found: list[str] = []
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield found
    finally:
        torch.cuda.set_sync_debug_mode("default")
        found += [str(warning.message) for warning in caught if "synchronizing" in str(warning.message)]


def host_waits(kernel: str | None = None) -> dict[str, list[str]]:
    """Return the host synchronisations in the first layer of a plan, and in a later one."""
    lengths = [5000, 3000, 100, 92]
    _steps(*_prepared_layer(lengths), kernel=kernel)  # compiles the kernels
    step, leaves, do = _prepared_layer(lengths)
    found = {}
    for name in ("first layer", "later layer"):
        with noting_waits() as waits:
            _steps(step, leaves, do, kernel)
        found[name] = waits
    return found


def _prepared_layer(lengths: list[int]) -> tuple[Step, Leaves, Tensor]:
    step, (q, k, v, do) = _layer(sum(lengths), masks.causal(), lengths)
    return step, (q.requires_grad_(), k.requires_grad_(), v.requires_grad_()), do


def _queueing(groups: dict[int, Any], plans: list[Plan], kernel: str | None) -> dict[str, Any]:
    """Return for each plan on NCCL ranks the host synchronisations of three layers, and the time of host and device."""
    found = {}
    for plan in plans:
        step = bind(plan, groups[plan.ranks])
        shape, tokens = plan.shape, step.local_tokens
        sizes = ((shape.heads, shape.head_dim), (shape.kv_heads, shape.head_dim), (shape.kv_heads, shape.v_head_dim))
        q, k, v = (torch.randn(tokens, *s, device="cuda", dtype=torch.bfloat16).requires_grad_() for s in sizes)
        do = torch.randn(tokens, shape.heads, shape.v_head_dim, device="cuda", dtype=torch.bfloat16)
        _steps(step, (q, k, v), do, kernel)
        with noting_waits() as waits:
            begin = time.perf_counter()
            for _ in range(3):
                _steps(step, (q, k, v), do, kernel)
            queued = time.perf_counter()
            torch.cuda.set_sync_debug_mode("default")
            torch.cuda.synchronize()
        done = time.perf_counter()
        found[plan.strategy] = {"waits": waits, "host ms": 1e3 * (queued - begin), "device ms": 1e3 * (done - begin)}
    return found


def peak_memory(steps: int = 10, layers: int = 3, kernel: str | None = None) -> list[int]:
    """Return the peak bytes allocated in each step; a step is a new plan and some layers, forward and backward."""
    peaks = []
    for _ in range(steps):
        step, leaves, do = _prepared_layer([5000, 3000, 100, 92])
        torch.cuda.reset_peak_memory_stats()
        for _ in range(layers):
            _steps(step, leaves, do, kernel)
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated())
        del step, leaves, do
    return peaks


def packing_times(plan: Plan) -> dict[str, Any]:
    """Return the milliseconds to pack and unpack all messages of the busiest rank, by rows and field by field,
    with blocks and bytes.
    """
    rank = int(plan.bytes().sum(axis=1).argmax())
    types = types_of(torch.empty(0, dtype=getattr(torch, plan.shape.dtype), device="cuda"))
    found: dict[str, Any] = {}
    for backward in (False, True):
        program = rank_program(plan, rank, 0, backward)
        new = (backward, plan.shape, types)
        shelves = {i: new_inputs(shelf, *new) | new_results(shelf, *new) for i, shelf in enumerate(program.shelves)}
        for side, areas in enumerate(program.laid):
            shelves[side] |= new_own_results(program.shelves[side], *new, areas, False, False)
        messages = [(slot.send, slot.receive) for slot in program.slots]
        sizes = [[[(m.peer, message_bytes(m, plan.shape)) for m in side] for side in pair] for pair in messages]
        buffers = [[Buffers.alone(side, types.device) for side in pair] for pair in sizes]
        ways: dict[str, Packing] = {
            "by rows": RowPacking(program, plan.shape, types),
            "by fields": FieldPacking(program, plan.shape, types),
        }
        runs = {name: partial(_pack_all, way, buffers, shelves) for name, way in ways.items()}
        found["backward" if backward else "forward"] = {
            "ms": milliseconds(runs),
            "host ms": {name: host_milliseconds(run) for name, run in runs.items()},
            "bytes": sum(size for pair in sizes for side in pair for _, size in side),
            "blocks": sum(len(m.blocks) for pair in messages for side in pair for m in side),
        }
    return found


def _pack_all(packing: Packing, buffers: list[list[Buffers]], shelves: Shelves) -> None:
    for slot, (leaving, arriving) in enumerate(buffers):
        packing.unpack(slot, arriving, shelves)
        packing.pack(slot, leaving, shelves)


def wrong_merges(launches: int = 4000, rows: int = 577, heads: int = 4, width: int = 128, run: int = 16) -> int:
    """Return in how many launches outputs that were merged into empty ones did not come out unchanged,
    as would happen if warps overtook each other.
    """
    first = np.arange(0, rows, run)
    columns: list[Any] = [np.minimum(run, rows - first), heads]
    for step, start in ((heads * width, 0), (2 * heads * width, heads * width), (heads, 0), (2 * heads, heads)):
        columns += [start + first * step, step]
    chain = 1
    table = torch.from_numpy(np.stack(np.broadcast_arrays(*columns, chain)).astype(np.int64)).cuda()
    source = torch.randn(rows, heads, width, device="cuda", dtype=torch.bfloat16)
    source_lse = torch.randn(rows, heads, device="cuda")
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(launches):
        out = torch.zeros(rows, 2 * heads, width, device="cuda")
        lse = torch.full((rows, 2 * heads), -torch.inf, device="cuda")
        row_kernels.merge_rows(source, out, source_lse, lse, table, heads, width)
        # exp(lse - lse) may be off by a rounding, but not by half of an output.
        wrong += ((out[:, heads:] - source.float()).abs() > 1e-3 * source.float().abs()).any()
    return int(wrong)


def compiled_model(batches: int = 6) -> dict[str, Any]:
    """Return the largest relative difference of gradients between a compiled and an eager model over batches of many
    sizes,
    and how often it compiled.
    """
    from torch._dynamo.testing import CompileCounterWithBackend

    def model(q: Tensor, k: Tensor, v: Tensor, slices: Tensor) -> Tensor:
        out: Any = slice_attention(q * 1.5, k, v, slices)
        return torch.tanh(out).square().sum()

    counter = CompileCounterWithBackend("inductor")
    models: list[Any] = [model, torch.compile(model, backend=counter, fullgraph=True)]
    worst = 0.0
    for number in range(batches):
        lengths = [100 + 37 * number, 300, 11 * (number + 1)] + [64] * number
        slices = packed_slices(lengths, masks.causal())
        leaves = [
            torch.randn(sum(lengths), h, 64, device="cuda", dtype=torch.bfloat16).requires_grad_() for h in (8, 2, 2)
        ]
        results = [torch.autograd.grad(call(*leaves, slices), leaves) for call in models]
        worst = max(worst, *(float((a - b).abs().max() / a.abs().max()) for a, b in zip(*results, strict=True)))
    return {"batches": batches, "compiled": counter.frame_count, "largest relative difference": worst}


def run_all(
    cases: list[GpuCase] | None = None, packed: Plan | None = None, kernel: str | None = None
) -> dict[str, Any]:
    """Run every check and return the results by name."""
    chosen = list(gpu_cases(kernel)) if cases is None else cases
    pair = [c.plan for c in chosen if c.plan.ranks == 2 and "causal" in c.name]
    found = {
        "overhead": one_rank_overhead(kernel=kernel),
        "host waits": host_waits(kernel),
        "peak memory": peak_memory(kernel=kernel),
        "compiled": compiled_model(),
        "wrong merges": wrong_merges(),
        "verified": verify_gpu(chosen),
        "queueing on 2 ranks": on_nccl_ranks(2, _queueing, pair, kernel) if pair else None,
    }
    if packed is not None:
        found["packing"] = packing_times(packed)
    return found

"""Benchmark of a step: strategies and other packages on the ranks at hand, with planning and predicted times.

All ranks plan each strategy (as they would in training), bind the plan, and run attention forward and backward, once to
warm up and then a few times, starting together. A time is that of the slowest rank in the fastest repeat; planning time
is that of the slowest rank too. The event simulator makes the prediction with the given cost model. Runs on gloo CPU
ranks and on NCCL ranks, with the kernel that the step chooses.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flexcp.batch import make_batch
from flexcp.calibration import TileTimes
from flexcp.clusters import Cluster
from flexcp.compare.compare import planned
from flexcp.cost import CostModel
from flexcp.executor.attention import attention
from flexcp.executor.bind import bind
from flexcp.executor.step import Step
from flexcp.masks import Mask
from flexcp.measure.baselines import Run, baselines
from flexcp.measure.tile_times import slot_times
from flexcp.planners.request import Refused, Request
from flexcp.shape import Shape
from flexcp.simulator.passes import Rules
from flexcp.simulator.training import simulate


@dataclass(frozen=True)
class BenchTask:
    """The documents, attention, cluster and strategies to measure.

    ``repeats`` is how often each is timed after a warm-up. With ``tokens_equal``, all ranks keep equally many tokens.
    """

    lengths: tuple[int, ...]
    mask: Mask
    shape: Shape
    cluster: Cluster
    cost: CostModel
    strategies: tuple[str, ...]
    device: str = "cpu"
    repeats: int = 3
    tokens_equal: bool = True
    tiles: TileTimes | None = None
    """Prices of kernel tiles, which predict kernel times instead of the cost model if given."""


@dataclass(frozen=True)
class Measured:
    """The milliseconds of one strategy or package and the bytes it moves, or in ``missing`` why it did not run.

    ``step_ms`` is forward and backward together, as are ``predicted_ms`` and ``bytes`` (of one layer, over all ranks).
    Other packages have no prediction.
    """

    name: str
    planning_ms: float | None = None
    forward_ms: float | None = None
    step_ms: float | None = None
    predicted_ms: float | None = None
    bytes: int | None = None
    missing: str | None = None

    @property
    def error(self) -> float | None:
        """Relative error of the prediction: predicted over measured, minus one."""
        if self.step_ms is None or self.predicted_ms is None:
            return None
        return self.predicted_ms / self.step_ms - 1


def bench(group: dist.ProcessGroup, task: BenchTask) -> Generator[str, None, list[Measured]]:
    """Measure every strategy of the task and every other package; collective, on every rank.

    Yield the name of each before it runs, and return all rows.
    """
    rows: list[Measured] = []
    for name in task.strategies:
        yield name
        rows.append(bench_strategy(group, task, name))
    for name, run in baselines(group, task.lengths, task.mask, task.shape, task.device).items():
        yield name
        rows.append(_foreign(group, task, name, run))
    return rows


def _foreign(group: dist.ProcessGroup, task: BenchTask, name: str, run: Run | str) -> Measured:
    """Measure another package; an error in it (on all ranks alike) becomes its row and does not end the benchmark."""
    if isinstance(run, str):
        return Measured(name, missing=run)
    try:
        forward, step = timed(group, run, task.repeats, task.device)
    except Exception as error:  # any exception of another package belongs into its row
        return Measured(name, missing=f"{type(error).__name__}: {error}".splitlines()[0])
    return Measured(name, 0.0, forward, step)


def bench_strategy(group: dist.ProcessGroup, task: BenchTask, name: str) -> Measured:
    """Plan, bind, time and predict one strategy; collective, with the same row on every rank.

    If the strategy refuses the task, the row has the reason in ``missing``.
    """
    batch = make_batch(task.lengths, task.mask)
    request = Request(batch, task.shape, task.cluster, task.cost, equal_tokens=task.tokens_equal)
    try:
        planned(request, name)  # loads compiled code before anything is timed
        dist.barrier(group)
        begin = time.perf_counter()
        name, plan = planned(request, name)
        _ = plan.hash
        planning = _slowest(group, 1000 * (time.perf_counter() - begin), task.device)
    except Refused as refusal:
        return Measured(name, missing=str(refusal))
    step = bind(plan, group)
    forward, whole = timed(group, _attention(step, task.device), task.repeats, task.device)
    compute = None if task.tiles is None else partial(slot_times, plan, times=task.tiles)
    predicted = simulate(plan, rules=Rules(contention=task.device != "cpu"), measured=compute).attention_ns / 1e6
    return Measured(
        name, planning, forward, whole, predicted, int(plan.bytes().sum() + plan.bytes(backward=True).sum())
    )


def _attention(step: Step, device: str) -> Callable[[], tuple[Tensor, Callable[[], Any]]]:
    """Return a function that runs the forward and returns the output and a function that runs the backward."""
    shape, dtype = step.plan.shape, getattr(torch, step.plan.shape.dtype)
    sizes = [(shape.heads, shape.head_dim), (shape.kv_heads, shape.head_dim), (shape.kv_heads, shape.v_head_dim)]
    sizes.append((shape.heads, shape.v_head_dim))
    # Only this rank's tokens are made: whole streams on all ranks of a large cluster would not fit into a host's
    # memory.
    q, k, v, grad = (torch.randn(step.local_tokens, *size, device=device).to(dtype) for size in sizes)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    _ = step.indices  # silences the warning about unread indices: random rows suit any plan

    def run() -> tuple[Tensor, Callable[[], Any]]:
        out = attention(q, k, v, step)
        assert isinstance(out, Tensor)
        return out, lambda: torch.autograd.grad(out, (q, k, v), grad)

    return run


def timed(
    group: dist.ProcessGroup, run: Callable[[], tuple[Any, Callable[[], Any]]], repeats: int, device: str
) -> tuple[float, float]:
    """Return the milliseconds of the forward, and of forward and backward together, of the slowest rank; collective.

    ``run`` runs the forward, and returns the output and a function that runs the backward. It is run once to warm up
    and ``repeats`` times; the fastest repeat counts.
    """
    samples = []
    for _ in range(repeats + 1):
        dist.barrier(group)
        _finish(device)
        begin = time.perf_counter()
        _, backward = run()
        _finish(device)
        middle = time.perf_counter()
        backward()
        _finish(device)
        times = [1000 * (middle - begin), 1000 * (time.perf_counter() - begin)]
        samples.append([_slowest(group, t, device) for t in times])
    best = min(samples[1:], key=lambda s: s[1])
    return best[0], best[1]


def _finish(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _slowest(group: dist.ProcessGroup, value: float, device: str) -> float:
    """Return the largest ``value`` of all ranks; collective."""
    found = torch.tensor([value], dtype=torch.float64, device=device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)
    return float(found)


def median_error(rows: Sequence[Measured]) -> float | None:
    """Return the median of |predicted / measured - 1| over the rows, or None if nothing was measured."""
    found = [abs(row.error) for row in rows if row.error is not None]
    return statistics.median(found) if found else None

"""Step time: the measured time of attention under a plan, forward and backward,
split into compute and communication.

Forward and backward are timed separately, with all ranks starting together in each, as in the simulator; a pass takes
as long as its slowest rank. A step is timed in three ways:

- *whole*: as it is.
- *compute*: over a group whose messages are never sent. The work is the same, on whatever the buffers hold.
- *communication*: with a kernel that does nothing. Messages, packing and reductions are the same.

With perfect overlap the whole step takes as long as the longer of the other two.

Ranks that share cores wait for each other's compute, which the devices of a cluster do not. With ``gflops`` every rank
has its own simulated device: its kernel computes nothing, and sleeps as long as that many GFLOP/s would take for its
pairs. Messages, and the host's work around them, stay real. With infinite GFLOP/s and messages that are never sent,
only the host's work is left.
"""

from __future__ import annotations

import importlib
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from flexcp.executor.attention import attention
from flexcp.executor.bind import bind
from flexcp.executor.exchange.pass_exchanges import Passes
from flexcp.executor.kernels import cpu
from flexcp.executor.step import Step
from flexcp.masks import area
from flexcp.plan.plan import Plan

StepPart = Literal["whole", "compute", "communication"]
Ints = NDArray[np.int64]
Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class Timed:
    """Seconds of forward and backward on one rank, for each repeat; the bytes it sent in all repeats;
    and the results of the last repeat in stream order, if requested.
    """

    seconds: list[tuple[float, float]]
    sent_bytes: int
    results: Arrays | None


def time_steps(
    group: dist.ProcessGroup,
    plan: Plan,
    part: StepPart,
    repeats: int,
    gflops: float | None = None,
    results: bool = False,
    rounds_per_call: int | None = None,
) -> Timed:
    """Run the plan on CPU ranks, once to warm up and then ``repeats`` times; collective over ``group``."""
    step = bind(plan, group, rounds_per_call=rounds_per_call)
    if part == "compute":
        step = Step(Passes(plan, step.rank, _silent(group), step.timeout))
    inputs = _inputs(step)
    seconds = []
    gflops = math.inf if part == "communication" else gflops
    with paced_kernel(None if gflops is None else math.inf):  # a paced device needs no warm-up
        _run(step, inputs, group)
    before = _sent(step)
    with paced_kernel(gflops):
        for _ in range(repeats):
            found, took = _run(step, inputs, group)
            seconds.append(took)
    gathered = {name: step.gather(x).numpy() for name, x in found.items()} if results else None
    return Timed(seconds, _sent(step) - before, gathered if step.rank == 0 else None)


def slowest_ms(ranks: list[Timed]) -> float:
    """Return the milliseconds of forward and backward: for each the slowest rank in the fastest repeat,
    because other load on the machine only adds time.
    """
    repeats = range(len(ranks[0].seconds))
    return 1000 * sum(min(max(rank.seconds[i][way] for rank in ranks) for i in repeats) for way in range(2))


def difference(one: Arrays, other: Arrays) -> float:
    """Return the largest max |x - y| / max(1, max |y|) of the results."""
    return max(float(np.abs(one[n] - y).max()) / max(1.0, float(np.abs(y).max())) for n, y in other.items())


def _inputs(step: Step) -> list[Tensor]:
    """Return this rank's rows of random q, k, v and output gradient; the stream is the same under every plan."""
    shape, tokens = step.plan.shape, step.plan.batch.tokens
    generator = torch.Generator().manual_seed(0)
    sizes = [(shape.heads, shape.head_dim), (shape.kv_heads, shape.head_dim), (shape.kv_heads, shape.v_head_dim)]
    sizes.append((shape.heads, shape.v_head_dim))
    dtype = getattr(torch, shape.dtype)
    return [step.shard(torch.randn(tokens, *size, generator=generator).to(dtype)) for size in sizes]


def _run(step: Step, inputs: list[Tensor], group: dist.ProcessGroup) -> tuple[dict[str, Tensor], tuple[float, float]]:
    """Return the results, and the seconds of each pass."""
    q, k, v = (x.detach().requires_grad_() for x in inputs[:3])
    dist.barrier(group)
    begin = time.perf_counter()
    out = attention(q, k, v, step, kernel="cpu")
    forward = time.perf_counter() - begin
    assert isinstance(out, Tensor)
    dist.barrier(group)
    begin = time.perf_counter()
    out.backward(inputs[3])
    backward = time.perf_counter() - begin
    found = {"out": out.detach(), "dq": q.grad, "dk": k.grad, "dv": v.grad}
    return {name: x for name, x in found.items() if x is not None}, (forward, backward)


def _sent(step: Step) -> int:
    return sum(sum(each) for each in step.sent_bytes.values())


def _silent(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return a group of the same ranks on torch's fake backend, whose operations end at once and move nothing."""
    importlib.import_module("torch.testing._internal.distributed.fake_pg")  # registers the backend
    ranks = dist.get_process_group_ranks(group)
    silent = dist.new_group(ranks, backend="fake", use_local_synchronization=True)
    assert isinstance(silent, dist.ProcessGroup)
    return silent


@contextmanager
def paced_kernel(gflops: float | None) -> Iterator[None]:
    """Use the CPU kernel as it is (None), or a paced one, inside the block."""
    if gflops is None:
        yield
        return
    pace = _Pace(gflops)
    with patch.object(cpu, "forward", pace.forward), patch.object(cpu, "backward", pace.backward):
        yield


@dataclass(frozen=True)
class _Pace:
    """A kernel that sleeps for the time of its FLOPs and computes nothing."""

    gflops: float

    def forward(self, q: Tensor, k: Tensor, v: Tensor, slices: Ints, *_: Any) -> None:
        self._sleep(2, q, v, slices)

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, do: Tensor, lse: Tensor, delta: Tensor, slices: Ints, *_: Any
    ) -> None:
        self._sleep(5, q, v, slices)

    def _sleep(self, products: int, q: Tensor, v: Tensor, slices: Ints) -> None:
        flops = products * int(area(slices).sum()) * q.shape[1] * (q.shape[2] + v.shape[2])
        time.sleep(flops / self.gflops / 1e9)

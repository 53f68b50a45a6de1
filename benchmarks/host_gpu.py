"""Host time of a pass on a GPU: how long the host takes to queue a layer's attention, and the GPU to compute it.

    python benchmarks/host_gpu.py --plans FOLDER --make-plans     on any machine
    python benchmarks/host_gpu.py --plans FOLDER                  on a GPU machine

One rank of each plan runs alone, in a process group of torch's that sends nothing ("fake"): messages hold what the
memory held before, messages are started one by one, and no call of NCCL is in the host's time. The check that messages
are of the right pass and the check of the group's backend are replaced, so this proves nothing about results. What the
host queues is timed while the GPU is busy with other work, the GPU's own time between events. Times are medians.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

import flexcp
from flexcp.clusters import cluster
from flexcp.data.lengths import draw_lengths
from flexcp.executor.attention import attention
from flexcp.executor.exchange.pass_exchanges import Passes
from flexcp.executor.step import Step
from flexcp.models.topology import topology
from flexcp.plan.file import load_plan, save_plan
from flexcp.plan.plan import Plan
from flexcp.shape import Shape

REPEATS = 15
BUSY_CYCLES = 60_000_000
"""How long the GPU is kept busy while the host queues a pass: some 30 ms."""
A_RANK = 8192
FOUR = Shape(32, 4, 128, 128)
"""A model of 4 KV heads, of which tensor parallelism of 4 leaves one to a rank."""
SETTINGS = (
    ("web, 64 ranks, auto", (32, 8), cluster("h100", 8, 8), "auto"),
    ("web, 64 ranks, blocks", (32, 8), cluster("h100", 8, 8), "blocks"),
    ("web, 16 x 2 ranks, 8 / 1 heads, auto", (8, 1), topology(cluster("h100", 16, 8), FOUR, tp=4).cluster, "auto"),
)


def make_plans(folder: Path) -> None:
    """Write the plans, as ``0.plan`` and so on."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, (_, heads, where, strategy) in enumerate(SETTINGS):
        planner = flexcp.Planner(*heads, 128, cluster=where, strategy=strategy)
        (folder / f"{number}.plan").write_bytes(save_plan(planner(draw_lengths("web", A_RANK * where.ranks, 0))))


def busiest(plan: Plan) -> int:
    """Return the rank that sends and receives the most messages."""
    counts = [sum(messages(plan, rank, backward) for backward in (False, True)) for rank in range(plan.ranks)]
    return counts.index(max(counts))


def messages(plan: Plan, rank: int, backward: bool) -> int:
    """Return how many messages a rank sends and receives in a pass, in whole messages as planned."""
    stages = Passes(plan, rank, None, timedelta(seconds=1)).calls(0, backward)
    return sum(len(call.sends) + len(call.receives) for stage in stages for call in stage)


def measure(plan: Plan, rank: int) -> list[dict[str, Any]]:
    """Return the milliseconds of host and GPU for the forward and the backward of a rank."""
    shape = plan.shape
    step = Step(Passes(plan, rank, dist.group.WORLD, timedelta(seconds=60)))
    heads = (shape.heads, shape.kv_heads, shape.kv_heads)
    leaves = [_random(step.local_tokens, each, shape.head_dim).requires_grad_() for each in heads]
    gradient = _random(step.local_tokens, shape.heads, shape.v_head_dim)

    def forward() -> Tensor:
        out = attention(leaves[0], leaves[1], leaves[2], step)
        assert isinstance(out, Tensor)
        return out

    found = []
    for backward in (False, True):
        times = []
        for _ in range(REPEATS + 3):  # the first ones compile, connect and upload
            out = forward()
            again: Callable[[], Any] = (lambda o=out: torch.autograd.grad(o, leaves, gradient)) if backward else forward
            times.append(_timed(again))
        host, device = (statistics.median(each) for each in zip(*times[3:], strict=True))
        found.append(
            {
                "way": "backward" if backward else "forward",
                "stages": plan.programs[0][backward].stages,
                "messages": messages(plan, rank, backward),
                "host ms": host,
                "GPU ms": device,
            }
        )
    return found


def _random(tokens: int, heads: int, size: int) -> Tensor:
    return torch.randn(tokens, heads, size, device="cuda", dtype=torch.bfloat16)


def _timed(work: Callable[[], Any]) -> tuple[float, float]:
    """Return the milliseconds that the host takes to queue work, and the GPU to run it."""
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(BUSY_CYCLES)
    begin = time.perf_counter()
    first.record()
    work()
    last.record()
    host = time.perf_counter() - begin
    torch.cuda.synchronize()
    return host * 1e3, first.elapsed_time(last)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", type=Path, required=True, help="the folder of the plans")
    parser.add_argument("--make-plans", action="store_true")
    asked = parser.parse_args()
    if asked.make_plans:
        make_plans(asked.plans)
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.autograd.set_multithreading_enabled(False)
    print("| plan | direction | stages | messages | host, ms | GPU, ms |\n| --- | --- | --- | --- | --- | --- |")
    for number, (name, *_) in enumerate(SETTINGS):
        plan = load_plan((asked.plans / f"{number}.plan").read_bytes())
        rank = busiest(plan)
        dist.init_process_group("fake", rank=rank, world_size=plan.ranks, store=FakeStore())
        # Nothing arrives, so stamps are wrong; and a group that sends nothing is none for tensors on a GPU.
        with (
            patch("torch._assert_async", lambda right, _: right.logical_not()),
            patch.object(Step, "_check_backend", lambda step, device: None),
        ):
            for row in measure(plan, rank):
                times = f"{row['host ms']:.2f} | {row['GPU ms']:.2f}"
                print(f"| {name} | {row['way']} | {row['stages']} | {row['messages']} | {times} |", flush=True)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

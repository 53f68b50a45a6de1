"""The cost of telemetry: attention with and without a Telemetry, in turns in one run, and its time stamps alone.

    python benchmarks/telemetry.py                        # 2 CPU ranks
    torchrun --nproc-per-node 8 benchmarks/telemetry.py   # NCCL; on one GPU: benchmarks/trust_gpu.py --only telemetry

Layers run forward and backward, alternately with and without a Telemetry; the ratio is that of the medians of the
slowest rank's time. The speed of a machine varies by more than a time stamp costs, so the second figure is the more
reliable one: the time to record a pass with as many slots in a loop of its own, over the time of a pass.
``--nan-check`` adds the check of every output.
"""

from __future__ import annotations

import argparse
import os
from statistics import median
from time import perf_counter

import torch
import torch.distributed as dist

import flexcp
from flexcp.data.lengths import parse_lengths
from flexcp.executor.step import Step
from flexcp.measure.ranks import RankPool
from flexcp.plan.plan import Plan


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--lengths", default="4096,1024,2048,300,700")
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--strategy", default="blocks")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--nan-check", action="store_true")
    asked = parser.parse_args()
    spread = "RANK" in os.environ
    ranks = int(os.environ["WORLD_SIZE"]) if spread else asked.ranks
    where = flexcp.cluster("h100" if spread else "cpu", 1, ranks)
    dtype = "bfloat16" if spread else "float32"
    planner = flexcp.Planner(
        asked.heads, asked.heads, asked.head_dim, dtype=dtype, cluster=where, strategy=asked.strategy
    )
    plan = planner(parse_lengths(asked.lengths), flexcp.causal())
    if spread:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl")
        group = dist.group.WORLD
        assert group is not None
        report(plan, [measure(group, plan, asked.rounds, asked.nan_check, "cuda")], dist.get_rank() == 0)
    else:
        with RankPool(ranks) as pool:
            report(plan, pool.run(measure, plan, asked.rounds, asked.nan_check, "cpu"), True)


Timed = tuple[list[float], list[float], float]


def measure(group: dist.ProcessGroup | None, plan: Plan, rounds: int, nan_check: bool, device: str) -> Timed:
    """Return the seconds of each layer without and with a Telemetry,
    and of recording a forward and backward that do nothing.
    """
    telemetry = flexcp.Telemetry(nan_check=nan_check)
    plain, watched = flexcp.bind(plan, group), flexcp.bind(plan, group, telemetry=telemetry)
    assert len(plain.indices) == len(watched.indices)  # unread indices would make attention warn
    inputs = [
        torch.randn(plain.local_tokens, heads, plan.shape.head_dim, device=device)
        .to(getattr(torch, plan.shape.dtype))
        .requires_grad_()
        for heads in (plan.shape.heads, plan.shape.kv_heads, plan.shape.kv_heads)
    ]
    for step in (plain, watched):
        layer(step, inputs)
    off, on = list[float](), list[float]()
    for turn in range(rounds):
        for step, times in [(plain, off), (watched, on)][:: 1 if turn % 2 else -1]:
            if group is not None:
                dist.barrier(group)
                wait_for(device)
            begin = perf_counter()
            layer(step, inputs)
            times.append(perf_counter() - begin)
    return off, on, stamps(telemetry, watched, inputs[0].device)


def layer(step: Step, inputs: list[torch.Tensor]) -> None:
    """Run one forward and backward, and wait for the device."""
    q, k, v = inputs
    out = flexcp.attention(q, k, v, step)
    assert isinstance(out, torch.Tensor)
    out.sum().backward()
    wait_for(out.device.type)


def wait_for(device: str) -> None:
    """Wait until a GPU has finished its queued work."""
    if device == "cuda":
        torch.cuda.synchronize()


def stamps(telemetry: flexcp.Telemetry, step: Step, device: torch.device) -> float:
    """Return the seconds to record a forward and a backward."""
    times = []
    for _ in range(200):
        begin = perf_counter()
        for backward in (False, True):
            watch = telemetry.watch(step, 0, backward, device)
            with watch.running():
                for _ in range(3 * watch.slots):
                    watch.mark()
        times.append(perf_counter() - begin)
    return median(times)


def figures(ranks: list[Timed]) -> tuple[float, float, float]:
    """Return the median seconds of the slowest rank without and with a Telemetry, and of recording a layer alone."""
    off, on = (median(max(times) for times in zip(*(rank[i] for rank in ranks), strict=True)) for i in (0, 1))
    return off, on, max(rank[2] for rank in ranks)


def report(plan: Plan, ranks: list[Timed], speak: bool) -> None:
    """Print both figures."""
    off, on, alone = figures(ranks)
    if speak:
        print(f"{plan!r}, {len(ranks[0][0])} layers forward and backward each way, in turns")
        print(f"without {off * 1e3:.2f} ms, with telemetry {on * 1e3:.2f} ms: ratio {on / off:.4f}")
        print(f"following a layer alone takes {alone * 1e6:.1f} us: {alone / off:.4%} of it")


if __name__ == "__main__":
    main()

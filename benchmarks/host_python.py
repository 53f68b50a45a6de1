"""Python's time for a pass on a GPU, measured without one: ``python benchmarks/host_python.py``.

One rank of each plan of :mod:`host_gpu` runs in a process group that sends nothing, with the exchange and the packing
of a GPU on CPU tensors. Kernels, launches that move rows, and filling memory are replaced by nothing, so what is left
is what the executor itself takes the host besides launches. Times are process times, medians of ``REPEATS``; compare
two checkouts on one machine (``PYTHONPATH=../other/src``), because another machine's processor is another speed.
"""

from __future__ import annotations

import statistics
import time
from contextlib import ExitStack
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

import flexcp
from flexcp.data.lengths import draw_lengths
from flexcp.executor.attention import Numbers, _runtime
from flexcp.executor.exchange.pass_exchanges import Passes
from flexcp.executor.exchange.transports import DeviceExchange
from flexcp.executor.kernels import row_kernels
from flexcp.executor.run import prepared
from flexcp.executor.run.executor import run_slots
from flexcp.executor.step import Step
from flexcp.plan.memory import KEYS, QUERIES
from flexcp.plan.plan import Plan
from host_gpu import A_RANK, SETTINGS, busiest, messages
from simulated import table

REPEATS = 40
NUMBERS = Numbers(0.1, None, False, None, None)


def _nothing(*_: Any, **__: Any) -> Any:
    return object()


KERNEL = SimpleNamespace(
    FINISHES=True, prepare=_nothing, forward=_nothing, backward=_nothing, open_dq=_nothing, close_dq=_nothing
)


def without_work() -> ExitStack:
    """Return the context in which kernels, row moves and fills do nothing, and tensors move as on a GPU."""
    found = ExitStack()
    found.enter_context(patch.object(prepared, "find_kernel", lambda _: KERNEL))
    found.enter_context(patch.object(prepared, "packs_by_rows", lambda _: True))
    for name in ("copy_rows", "convert_rows", "add_rows", "merge_rows"):
        found.enter_context(patch.object(row_kernels, name, _nothing))
    for name in ("zero_", "fill_"):
        found.enter_context(patch.object(Tensor, name, lambda x, *_: x))
    found.enter_context(patch("torch._assert_async", _nothing))
    return found


def measure(plan: Plan, rank: int, backward: bool) -> float:
    """Return the milliseconds of one pass of a rank."""
    passes = Passes(plan, rank, dist.group.WORLD, timedelta(seconds=60))
    passes.host_exchange = DeviceExchange  # type: ignore[assignment]
    step, shape = Step(passes), plan.shape
    q, k, v = (
        torch.zeros(step.local_tokens, heads, shape.head_dim, dtype=torch.bfloat16)
        for heads in (shape.heads, shape.kv_heads, shape.kv_heads)
    )
    row_numbers = torch.zeros(q.shape[:2])
    queries = {"q": q, "do": q, "lse": row_numbers, "delta": row_numbers} if backward else {"q": q}
    own = {QUERIES: queries, KEYS: {"k": k, "v": v}}
    ready = step.prepared(0, backward, "triton", _runtime(step, q, NUMBERS, 0, backward).types)
    kept = torch.empty(0, dtype=torch.uint8)
    times = []
    for _ in range(REPEATS + 5):  # the first ones make what later ones find
        begin = time.process_time()
        runtime = _runtime(step, q, NUMBERS, 0, backward)
        with runtime.watched(), runtime.exchange:
            run_slots(ready, runtime, kept, own, backward)
        times.append(time.process_time() - begin)
    return statistics.median(times[5:]) * 1e3


def main() -> None:
    """Print a row for each plan and direction."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.set_num_threads(1)
    rows = []
    for name, heads, where, strategy in SETTINGS:
        planner = flexcp.Planner(*heads, 128, cluster=where, strategy=strategy)
        plan = planner(draw_lengths("web", A_RANK * where.ranks, 0))
        rank = busiest(plan)
        dist.init_process_group("fake", rank=rank, world_size=plan.ranks, store=FakeStore())
        for backward in (False, True):
            with without_work():
                ms = measure(plan, rank, backward)
            stages, way = plan.programs[0][backward].stages, "backward" if backward else "forward"
            rows.append([name, way, str(stages), str(messages(plan, rank, backward)), f"{ms:.2f}"])
        dist.destroy_process_group()
    print("\n".join(table(["plan", "direction", "stages", "messages", "Python, ms"], rows)))


if __name__ == "__main__":
    main()

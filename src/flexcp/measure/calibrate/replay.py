"""Replay: the real kernels of every rank of a plan run on one device, and the simulator adds the communication.

The kernels of each slot are launched as the executor would launch them (the same work lists over shelves of the same
sizes, filled with random numbers) and timed alone. :func:`flexcp.simulator.training.simulate` then runs the plan with
these times instead of the cost model's. A plan for 64 ranks can so be judged on one GPU by kernels that really ran and
that did not influence the planner's choice. Packing, reductions and the slowdown of compute by transfers are still
those of the cost model. Replay also runs on a CPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flexcp.cost import CostModel
from flexcp.executor.kernels import Settings, accumulator_dtype, find_kernel
from flexcp.executor.kernels.choose import choose_kernel
from flexcp.executor.run.finished_rows import OwnRows
from flexcp.executor.run.pass_recipe import LaunchRecipe, pass_recipe
from flexcp.executor.run.rank_program import RankProgram, rank_program
from flexcp.measure.calibrate.kernels import keep_busy
from flexcp.plan.memory import KEYS
from flexcp.plan.plan import Plan
from flexcp.shape import Shape
from flexcp.simulator.passes import Rules
from flexcp.simulator.step_parts import Training
from flexcp.simulator.training import Simulation, simulate

Ints = NDArray[np.int64]
Fields = dict[str, Tensor]


def replay(
    plan: Plan,
    device: str = "cpu",
    cost: CostModel | None = None,
    rules: Rules = Rules(),  # noqa: B008 - immutable
    training: Training | None = None,
    repeats: int = 3,
    kernel: str | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Simulation:
    """Simulate the plan with kernel times that are measured here, each the median of ``repeats``.

    ``kernel`` names the kernel (None: chosen for the device), ``say`` is called with a message before each pass, and
    the other arguments are those of :func:`flexcp.simulator.training.simulate`.
    """
    found: dict[tuple[int, bool], Ints] = {}
    for mask in range(len(plan.programs)):
        for backward in (False, True):
            say(f"{plan.batch.masks[mask].name} {'backward' if backward else 'forward'}")
            found[mask, backward] = slot_times(plan, mask, backward, device, repeats, kernel)
    return simulate(plan, cost, rules, training, lambda mask, backward: found[mask, backward])


def slot_times(
    plan: Plan, mask: int, backward: bool, device: str = "cpu", repeats: int = 3, kernel: str | None = None
) -> Ints:
    """Measure the kernels of one pass here; return nanoseconds ``[rank, slot]``, each the median of ``repeats``."""
    shape = plan.shape
    dtype, where = getattr(torch, shape.dtype), torch.empty(0, device=device).device  # with its index
    module = find_kernel(choose_kernel(where, dtype, shape.head_dim, shape.v_head_dim, kernel).kernel)
    times = np.zeros((plan.ranks, plan.programs[mask][backward].stages), np.int64)
    for rank in range(plan.ranks):
        recipe = pass_recipe(rank_program(plan, rank, mask, backward), backward, shape)
        shelves = _shelves(recipe.program, shape, where)
        finished = recipe.finished_rows if getattr(module, "FINISHES", False) else None
        slots = [
            [
                _call(launch, None if finished is None else finished[at][i], shape, shelves, module, backward, where)
                for i, launch in enumerate(launches)
            ]
            for at, launches in enumerate(recipe.launches)
        ]
        times[rank, : len(slots)] = np.round(_timed(slots, () if backward else _statistics(shelves), repeats, device))
    return times


def _statistics(shelves: dict[int, Fields]) -> list[Tensor]:
    """Return the LSE tensors of all shelves (buffers of rows), which must be -inf at the start of a forward."""
    return [fields["lse"] for fields in shelves.values() if "lse" in fields]


def _shelves(program: RankProgram, shape: Shape, device: torch.device) -> dict[int, Fields]:
    """Return the tensors of every shelf (a buffer of own or received tokens): random inputs, zeros for results."""
    dtype = getattr(torch, shape.dtype)
    more = accumulator_dtype(dtype)
    found = {}
    for number, shelf in enumerate(program.shelves):
        rows, heads = shelf.rows, shelf.h1 - shelf.h0
        d, v = (rows, heads, shape.head_dim), (rows, heads, shape.v_head_dim)
        random = (("k", d), ("v", v)) if shelf.side == KEYS else (("q", d), ("do", v))
        zeros: dict[str, tuple[int, ...]] = {"dk": d, "dv": v}
        if shelf.side != KEYS:
            zeros = {"dq": d, "out": v, "lse": (rows, heads), "delta": (rows, heads)}
        found[number] = {name: torch.randn(size, device=device).to(dtype) for name, size in random}
        found[number] |= {name: torch.zeros(size, dtype=more, device=device) for name, size in zeros.items()}
        if shelf.side != KEYS:
            found[number]["finished"] = torch.empty(v, dtype=dtype, device=device)
    return found


def _call(
    launch: LaunchRecipe,
    own: OwnRows | None,
    shape: Shape,
    shelves: dict[int, Fields],
    module: Any,
    backward: bool,
    device: torch.device,
) -> Callable[[], Any]:
    """Return a function that makes one kernel launch; ``own`` are own rows that it begins and finishes, if known."""
    work, heads, groups = launch.work, launch.heads, launch.groups
    counts = (heads.stop - heads.start, groups.stop - groups.start)
    rows = {} if own is None else {"begins": own.begins, "finishes": own.finishes}
    listed = module.prepare(work.slices, *counts, shape.head_dim, shape.v_head_dim, device, **rows)
    q = {name: x[:, heads] for name, x in shelves[work.q_shelf].items()}
    kv = {name: x[:, groups] for name, x in shelves[work.kv_shelf].items()}
    settings = Settings(shape.head_dim**-0.5)
    if backward:
        inputs = (q["q"], kv["k"], kv["v"], q["do"], q["lse"], q["delta"])
        return lambda: module.backward(*inputs, listed, settings, q["dq"], kv["dk"], kv["dv"])
    rounded = {} if own is None else {"finished_THV": q["finished"]}
    return lambda: module.forward(q["q"], kv["k"], kv["v"], listed, settings, q["out"], q["lse"], **rounded)


def _timed(
    slots: list[list[Callable[[], Any]]], new: Sequence[Tensor], repeats: int, device: str
) -> NDArray[np.float64]:
    """Return the nanoseconds of each slot, the median over ``repeats`` passes after a warm-up.

    ``slots`` has the launches of each slot. The tensors of ``new`` are filled with -inf before every pass.
    """
    samples = []
    for _ in range(repeats + 1):
        for x in new:
            x.fill_(-torch.inf)
        samples.append(_pass_on_gpu(slots) if device == "cuda" else _pass_on_cpu(slots))
    return np.asarray(np.median(samples[1:], axis=0))


def _pass_on_cpu(slots: list[list[Callable[[], Any]]]) -> list[float]:
    """Run all launches and return the nanoseconds of each slot, by the host's clock."""
    stamps = [time.perf_counter_ns()]
    for calls in slots:
        for call in calls:
            call()
        stamps.append(time.perf_counter_ns())
    return [float(b - a) if calls else 0.0 for a, b, calls in zip(stamps, stamps[1:], slots, strict=False)]


def _pass_on_gpu(slots: list[list[Callable[[], Any]]]) -> list[float]:
    """Run all launches and return the nanoseconds of each slot, by events on the GPU."""
    stamps = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in slots]
    for calls, (first, last) in zip(slots, stamps, strict=True):
        if calls:
            keep_busy()
        first.record()
        for call in calls:
            call()
        last.record()
    torch.cuda.synchronize()
    between = zip(stamps, slots, strict=True)
    return [float(first.elapsed_time(last)) * 1e6 if calls else 0.0 for (first, last), calls in between]

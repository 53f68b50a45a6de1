"""Replay: the real kernels of every rank of a plan run on one device, and the simulator adds the communication.

The executor runs every rank's passes here, one after the other, with random numbers instead of the messages of other
ranks, and the work of each slot is timed: its kernel launches, with what the kernel does before the first of them and
after the last (clearing and finishing a dq that they share). A GPU lowers its clock under load, so ranks take turns,
every second round in the opposite order: what the load of one rank does to the clock does not always meet the same
other rank.

:func:`flexcp.simulator.training.simulate` then runs the plan with these times instead of the cost model's. A plan for
64 ranks can so be judged on one GPU by kernels that really ran and that did not influence the planner's choice.
Packing, reductions and the slowdown of compute by transfers are still those of the cost model. Replay also runs on a
CPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flexcp.cost import CostModel
from flexcp.executor.exchange.arena import Arena, Buffers
from flexcp.executor.exchange.transports import Exchange, PassLabel, Wire
from flexcp.executor.kernels import Settings
from flexcp.executor.kernels.choose import choose_kernel
from flexcp.executor.run.executor import Runtime, run_slots
from flexcp.executor.run.message_layout import Types, types_of
from flexcp.executor.run.pass_recipe import pass_recipe
from flexcp.executor.run.prepared import Prepared, prepare
from flexcp.executor.run.rank_program import rank_program
from flexcp.measure.calibrate.kernels import keep_busy
from flexcp.plan.memory import KEYS, QUERIES
from flexcp.plan.plan import Plan
from flexcp.shape import Shape
from flexcp.simulator.passes import Rules
from flexcp.simulator.step_parts import Training
from flexcp.simulator.training import Simulation, simulate

Ints = NDArray[np.int64]


def replay(
    plan: Plan,
    device: str = "cpu",
    cost: CostModel | None = None,
    rules: Rules = Rules(),
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
    shape, dtype = plan.shape, getattr(torch, plan.shape.dtype)
    types = types_of(torch.empty(0, dtype=dtype, device=device))
    name = choose_kernel(types.device, dtype, shape.head_dim, shape.v_head_dim, kernel).kernel
    ready = [
        prepare(pass_recipe(rank_program(plan, rank, mask, backward), backward, shape), shape, name, types, {})
        for rank in range(plan.ranks)
    ]
    tensors = _random_tensors(int(plan.placement.tokens.max()), backward, shape, types)
    own = [_first_rows(tensors, int(tokens)) for tokens in plan.placement.tokens]
    order, rounds = list(range(plan.ranks)), []
    for _ in range(repeats + 1):  # the first round is to warm up
        times = np.zeros((plan.ranks, plan.programs[mask][backward].stages))
        for rank in order:
            found = _timed_pass(ready[rank], own[rank], backward, shape, types)
            times[rank, : len(found)] = found
        rounds.append(times)
        order.reverse()
    return np.round(np.median(rounds[1:], axis=0)).astype(np.int64)


def _random_tensors(tokens: int, backward: bool, shape: Shape, types: Types) -> dict[int, dict[str, Tensor]]:
    """Return random tensors of so many tokens, by shelf and field."""

    def random(heads: int, width: int) -> Tensor:
        return torch.randn(tokens, heads, width, device=types.device).to(types.model)

    queries = {"q": random(shape.heads, shape.head_dim)}
    if backward:
        zeros = torch.zeros(tokens, shape.heads, dtype=types.statistics, device=types.device)
        queries |= {"lse": zeros, "delta": zeros}
        queries |= {"do": random(shape.heads, shape.v_head_dim)}
    keys = {"k": random(shape.kv_heads, shape.head_dim), "v": random(shape.kv_heads, shape.v_head_dim)}
    return {QUERIES: queries, KEYS: keys}


def _first_rows(tensors: dict[int, dict[str, Tensor]], tokens: int) -> dict[int, dict[str, Tensor]]:
    """Return the rows of the first ``tokens`` tokens, which a rank takes for its own."""
    return {shelf: {field: x[:tokens] for field, x in fields.items()} for shelf, fields in tensors.items()}


def _timed_pass(
    prepared: Prepared, own: dict[int, dict[str, Tensor]], backward: bool, shape: Shape, types: Types
) -> list[float]:
    """Run one pass and return the nanoseconds of each slot's work."""
    program = prepared.program
    kept = _fill(torch.empty(program.kept_size, dtype=torch.uint8, device=types.device), types)
    watch = _Stamps(types.device, [bool(work) for work in prepared.work])
    exchange = _RandomMessages(types, len(program.slots))
    runtime = Runtime(shape, types, Settings(shape.head_dim**-0.5), exchange, Arena(), watch, margin=0)
    run_slots(prepared, runtime, kept, own, backward)
    return watch.nanoseconds()


def _fill(memory: Tensor, types: Types) -> Tensor:
    """Fill bytes with random numbers of the model's dtype, and return them."""
    memory.view(types.model).normal_()
    return memory


class _RandomMessages(Exchange):
    """Sends nothing; every message that should arrive holds random numbers."""

    def __init__(self, types: Types, stages: int) -> None:
        wire = Wire(None, [], timedelta(0), None, lambda reason: None)
        super().__init__(wire, PassLabel(0, 0, 0, "replay", False, stages), ())
        self._types = types

    def post(self, stage: int, sends: Buffers, receives: Buffers) -> None:
        self._arriving[stage] = receives

    def arrived(self, stage: int) -> Buffers | None:
        found = self._arriving.pop(stage, None)
        if found is not None:
            _fill(found.memory, self._types)
        return found

    def finish(self) -> None:
        """Do nothing: no message has to leave."""


class _Stamps:
    """Notes the time before and after the work of every slot (a :class:`flexcp.executor.run.pass_watch.Watch`).

    A pass makes three marks in each slot, the last two around its work. ``works`` says which slots have any.
    """

    def __init__(self, device: torch.device, works: list[bool]) -> None:
        self._on_gpu, self._works = device.type == "cuda", works
        self._marks = 0
        self._host: list[int] = []
        self._device: list[torch.cuda.Event] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        """Do nothing around a pass."""
        yield

    def mark(self) -> None:
        """Note the time of the last two marks of a slot."""
        slot, which = divmod(self._marks, 3)
        self._marks += 1
        if which == 0 or not self._works[slot]:
            return
        if not self._on_gpu:
            self._host.append(time.perf_counter_ns())
            return
        if which == 1:
            keep_busy()
        self._device.append(torch.cuda.Event(enable_timing=True))
        self._device[-1].record()

    def nanoseconds(self) -> list[float]:
        """Return the nanoseconds of each slot's work, once the pass has ended; 0 for slots without work."""
        if self._on_gpu:
            torch.cuda.synchronize()
            pairs = zip(self._device[::2], self._device[1::2], strict=True)
            found = iter([1e6 * first.elapsed_time(last) for first, last in pairs])
        else:
            found = iter([float(b - a) for a, b in zip(self._host[::2], self._host[1::2], strict=True)])
        return [next(found) if works else 0.0 for works in self._works]

"""Prices of tiles for calibration, if the Hopper kernel runs: fitted to single calls and to slots of real plans.

Single calls are the workloads of ``kernels.py``, once with all heads and once with the heads of one KV head. Slots of
real plans add what these lack: many short work lists one after the other, and rows that already have results. Every
third single call (sorted by time) is held out, and so are whole plans of other strategies and lengths. Errors are
computed on what was held out; for plans, on the sum of a rank's slots.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import torch

from flexcp.calibration import CallPrices, Errors, TileTimes
from flexcp.clusters import cluster
from flexcp.data.lengths import draw_lengths
from flexcp.executor.kernels.choose import choose_kernel
from flexcp.measure.calibrate import replay
from flexcp.measure.calibrate.fit import Sample, errors, split
from flexcp.measure.calibrate.kernels import KernelTask
from flexcp.measure.kernels.work import workload
from flexcp.measure.tile_times import TimedCalls, call_ns, counted, fit_prices, plan_calls
from flexcp.plan.plan import Plan
from flexcp.planner import Planner
from flexcp.planners.request import Refused
from flexcp.shape import Shape

FITTED = (("web", 8, "zigzag"), ("web", 8, "blocks"))
"""(lengths, ranks, strategy) of the plans that are fitted."""
HELD_OUT = (
    ("web", 8, "groups"),
    ("web", 8, "allgather"),
    ("libra256k", 8, "auto"),
    ("libra256k", 8, "blocks"),
    ("longtail", 4, "zigzag"),
    ("longtail", 4, "ulysses"),
)
"""(lengths, ranks, strategy) of the plans that are not fitted."""
TOKENS_PER_RANK = 8192


@dataclass(frozen=True)
class PlanSlots:
    """Measured nanoseconds ``[rank][slot]`` of one pass of a plan for calibration (:func:`the_plan`)."""

    lengths: str
    ranks: int
    strategy: str
    backward: bool
    ns: tuple[tuple[int, ...], ...]

    @property
    def name(self) -> tuple[str, int, str]:
        return self.lengths, self.ranks, self.strategy


def has_tiles(shape: Shape) -> bool:
    """Return whether this GPU would run the Hopper kernel for this shape; only its tiles have prices."""
    dtype = getattr(torch, shape.dtype)
    where = torch.empty(0, device="cuda").device  # with its index
    return choose_kernel(where, dtype, shape.head_dim, shape.v_head_dim).kernel == "hopper"


def one_kv_head(shape: Shape) -> Shape:
    """Return the shape of a rank that has one KV head and its query heads."""
    return Shape(shape.queries_per_key, 1, shape.head_dim, shape.v_head_dim, shape.dtype)


def measure_plans(task: KernelTask) -> list[PlanSlots]:
    """Time the slots of every rank of the plans for calibration on this GPU.

    Plans that a strategy refuses for these heads are left out.
    """
    found = []
    for name in (*FITTED, *HELD_OUT):
        try:
            plan = the_plan(*name, task.shape)
        except Refused:
            continue
        for backward in (False, True):
            ns = replay.slot_times(plan, 0, backward, task.device, task.repeats)
            found.append(PlanSlots(*name, backward, tuple(map(tuple, ns.tolist()))))
    return found


@cache
def the_plan(lengths: str, ranks: int, strategy: str, shape: Shape) -> Plan:
    """Return a plan for calibration, which is the same on every machine.

    ``lengths`` is the name of a distribution of document lengths.
    """
    sizes = (shape.heads, shape.kv_heads, shape.head_dim, shape.v_head_dim)
    planner = Planner(*sizes, dtype=shape.dtype, cluster=cluster("h100", 1, ranks), strategy=strategy)
    return planner(draw_lengths(lengths, TOKENS_PER_RANK * ranks, 0))


def fit_tiles(
    shape: Shape, units: int, singles: Mapping[Shape, Sequence[Sample]], plans: Sequence[PlanSlots]
) -> tuple[TileTimes, dict[str, Errors]]:
    """Fit prices of tiles; return (prices, their errors on held-out single calls, ``tiles``, and on plans, ``plans``).

    ``units`` is the number of the GPU's multiprocessors, and ``singles`` are the measured single calls of each shape.
    """
    prices: list[CallPrices] = []
    pairs: dict[str, list[tuple[float, float]]] = {"tiles": [], "plans": []}
    for backward in (False, True):
        calls = [
            single_call(heads, s, units) for heads, found in singles.items() for s in found if s.backward == backward
        ]
        fitted, held = split(sorted(calls, key=lambda call: call.ns))
        passes = [p for p in plans if p.backward == backward]
        slots = [s for p in passes if p.name in FITTED for rank in _slots(p, shape, units) for s in rank if s.calls]
        prices.append(fit_prices([*fitted, *slots]))
        ranks = [_together(rank) for p in passes if p.name not in FITTED for rank in _slots(p, shape, units)]
        for name, timed in (("tiles", held), ("plans", ranks)):
            pairs[name] += [(sum(call_ns(c, prices[-1]) for c in t.calls), t.ns) for t in timed if t.ns]
    made = TileTimes(units, shape.head_dim, shape.v_head_dim, *prices)
    return made, {name: errors(*zip(*found, strict=True)) for name, found in pairs.items() if found}


def single_call(shape: Shape, sample: Sample, units: int) -> TimedCalls:
    """Return a measured workload with the counts of its programs; ``units`` is the number of multiprocessors."""
    name, tokens = sample.name.split()
    slices = workload(name, int(tokens)).slices()
    call = counted(slices, shape.heads, shape.kv_heads, shape, units, sample.backward, adds=False)
    return TimedCalls(sample.name, [call], sample.ns)


def _slots(found: PlanSlots, shape: Shape, units: int) -> list[list[TimedCalls]]:
    """Return the measured slots of a plan with the counts of their calls, ``[rank][slot]``."""
    plan = the_plan(*found.name, shape)
    return [
        [
            TimedCalls(f"{found.name} rank {rank} slot {number}", calls, found.ns[rank][number])
            for number, calls in enumerate(plan_calls(plan, rank, 0, found.backward, units))
        ]
        for rank in range(plan.ranks)
    ]


def _together(slots: list[TimedCalls]) -> TimedCalls:
    """Return all slots of a rank as one sample."""
    return TimedCalls(slots[0].name, [call for s in slots for call in s.calls], sum(s.ns for s in slots))

"""Prices of tiles for calibration, where the Hopper kernel runs: fitted to single calls and to slots of real plans.

Single calls are the workloads of :mod:`calibrate_kernels`, with all heads and with one KV head's. Slots of real plans
bring what those lack: many short lists one after the other, and rows that have results already. Every third single
call, sorted by time, and whole plans of other strategies and lengths are held out; errors are those on what was held
out, of plans a rank's slots together.
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
HELD_OUT = (
    ("web", 8, "groups"),
    ("web", 8, "allgather"),
    ("libra256k", 8, "auto"),
    ("libra256k", 8, "blocks"),
    ("longtail", 4, "zigzag"),
    ("longtail", 4, "ulysses"),
)
"""(lengths, ranks, strategy)."""
TOKENS_PER_RANK = 8192


@dataclass(frozen=True)
class PlanSlots:
    """Measured nanoseconds ``[rank][slot]`` of one pass of a plan."""

    lengths: str
    ranks: int
    strategy: str
    backward: bool
    ns: tuple[tuple[int, ...], ...]

    @property
    def name(self) -> tuple[str, int, str]:
        return self.lengths, self.ranks, self.strategy


def has_tiles(shape: Shape) -> bool:
    """Whether the kernel that would run here is one whose launches can be counted."""
    dtype = getattr(torch, shape.dtype)
    where = torch.empty(0, device="cuda").device  # with its number
    return choose_kernel(where, dtype, shape.head_dim, shape.v_head_dim).kernel == "hopper"


def one_kv_head(shape: Shape) -> Shape:
    """The heads that a rank has of these when each KV head is another's."""
    return Shape(shape.queries_per_key, 1, shape.head_dim, shape.v_head_dim, shape.dtype)


def measure_plans(task: KernelTask) -> list[PlanSlots]:
    """Every rank's slots of the plans, one after the other on this GPU;
    what a strategy refuses with these heads is left out.
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
    """The plan of a name: the same on every machine."""
    sizes = (shape.heads, shape.kv_heads, shape.head_dim, shape.v_head_dim)
    planner = Planner(*sizes, dtype=shape.dtype, cluster=cluster("h100", 1, ranks), strategy=strategy)
    return planner(draw_lengths(lengths, TOKENS_PER_RANK * ranks, 0))


def fit_tiles(
    shape: Shape, units: int, singles: Mapping[Shape, Sequence[Sample]], plans: Sequence[PlanSlots]
) -> tuple[TileTimes, dict[str, Errors]]:
    """Prices, and their errors on single calls (``tiles``) and on ranks of plans (``plans``) that were held out."""
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
    """A measured workload with what its programs walk."""
    name, tokens = sample.name.split()
    slices = workload(name, int(tokens)).slices()
    call = counted(slices, shape.heads, shape.kv_heads, shape, units, sample.backward, adds=False)
    return TimedCalls(sample.name, [call], sample.ns)


def _slots(found: PlanSlots, shape: Shape, units: int) -> list[list[TimedCalls]]:
    plan = the_plan(*found.name, shape)
    return [
        [
            TimedCalls(f"{found.name} rank {rank} slot {number}", calls, found.ns[rank][number])
            for number, calls in enumerate(plan_calls(plan, rank, 0, found.backward, units))
        ]
        for rank in range(plan.ranks)
    ]


def _together(slots: list[TimedCalls]) -> TimedCalls:
    return TimedCalls(slots[0].name, [call for s in slots for call in s.calls], sum(s.ns for s in slots))

"""Tile times: the predicted time of the Hopper kernel for a work list, from counts of what its programs do.

A launch lasts as long as its busiest program (a block of threads). A program pays for each block without a mask, each
block with one, each tile, and in the forward for each tile whose rows already have results that it has to read. The
counts follow from the work list alone (:mod:`flexcp.executor.kernels.hopper.tiles`). The prices are fitted to measured
calls by relative error: the time is linear in the counts of the busiest program, but which program is busiest depends
on the prices, so the fit is repeated. With the prices, the slots of a plan can be timed on any machine
(:func:`slot_times`), without replay.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from flexcp.calibration import CallPrices, TileTimes
from flexcp.clusters import NOMINAL_SPEED
from flexcp.executor.kernels.hopper.tiles import launches
from flexcp.executor.run.rank_program import rank_program
from flexcp.plan.plan import Plan
from flexcp.shape import Shape

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Call = list[Ints]
"""The counts of one call of the kernel: for each of its launches an array ``[program, kind of count]``."""
ROUNDS = 15
FIRST_PRICES = (1.0, 1.2, 2.0, 0.5)
"""The prices with which the fit begins, by kind of count."""


@dataclass(frozen=True, eq=False)
class TimedCalls:
    """Calls made one after the other, with the total nanoseconds that were measured for them."""

    name: str
    calls: list[Call]
    ns: float


def counted(slices: Ints, heads: int, kv_heads: int, shape: Shape, units: int, backward: bool, adds: bool) -> Call:
    """Return the counts of the programs (blocks of threads) of a call of the Hopper kernel on these slices.

    ``units`` is the number of the GPU's multiprocessors. ``adds`` says that the rows of a forward already have results,
    which it has to read.
    """
    found = launches(slices, heads, kv_heads, 2 * (shape.head_dim + shape.v_head_dim), units, backward)
    return found if backward else [np.concatenate([x, x[:, 2:] * adds], axis=1) for x in found]


def plan_calls(plan: Plan, rank: int, mask: int, backward: bool, units: int) -> list[list[Call]]:
    """Return the kernel calls of each slot of a rank in one pass, ``[slot][call]``, as counts.

    ``units`` is the number of the GPU's multiprocessors.
    """
    program = rank_program(plan, rank, mask, backward)
    share = plan.shape.queries_per_key
    adds = iter(adding((work.q_shelf, work.h0, work.h1) for slot in program.slots for work in slot.work))
    slots = []
    for slot in program.slots:
        calls = []
        for work in slot.work:
            kv_heads = -(-work.h1 // share) - work.h0 // share
            calls.append(counted(work.slices, work.h1 - work.h0, kv_heads, plan.shape, units, backward, next(adds)))
        slots.append(calls)
    return slots


def adding(lists: Iterable[tuple[int, int, int]]) -> list[bool]:
    """Return for each of a rank's work lists, in order, whether its rows already have results of an earlier one.

    A list is given as (query shelf, first head, last head + 1); a shelf is a buffer of rows.
    """
    seen: list[tuple[int, int, int]] = []
    found = []
    for shelf, h0, h1 in lists:
        found.append(any(shelf == other and h0 < last and first < h1 for other, first, last in seen))
        seen.append((shelf, h0, h1))
    return found


def call_ns(call: Call, prices: CallPrices) -> float:
    """Return the predicted nanoseconds of a call; a call without (query, key) pairs launches nothing and takes none."""
    if not call:
        return 0.0
    return prices.call_ns + sum(float((x @ np.array(p)).max()) for x, p in zip(call, prices.launches, strict=True))


def slot_times(plan: Plan, mask: int, backward: bool, times: TileTimes) -> Ints:
    """Return the predicted nanoseconds ``[rank, slot]`` of the kernels of one pass.

    Raise ValueError if the prices were fitted for other head sizes than the plan's.
    """
    refuse_other_heads(plan.shape, times)
    prices = times.backward if backward else times.forward
    found = np.zeros((plan.ranks, plan.programs[mask][backward].stages), np.int64)
    for rank, speed in enumerate(plan.cluster.rank_speeds):
        for number, calls in enumerate(plan_calls(plan, rank, mask, backward, times.multiprocessors)):
            found[rank, number] = round(sum(call_ns(call, prices) for call in calls) * NOMINAL_SPEED / speed)
    return found


def refuse_other_heads(shape: Shape, times: TileTimes) -> None:
    """Raise ValueError if the prices were fitted for other head sizes."""
    if (shape.head_dim, shape.v_head_dim) != (times.head_dim, times.v_head_dim):
        raise ValueError(
            f"this calibration is of heads of {times.head_dim} and {times.v_head_dim}; got {shape.head_dim} and "
            f"{shape.v_head_dim}: calibrate with --head-dim {shape.head_dim}"
        )


def fit_prices(samples: Sequence[TimedCalls]) -> CallPrices:
    """Return the non-negative prices that fit these samples best, by relative error.

    Raise ValueError if no sample has a call.
    """
    samples = [s for s in samples if any(s.calls)]
    if not samples:
        raise ValueError("prices of tiles need at least one timed call")
    ns = np.array([s.ns for s in samples])
    widths = [x.shape[1] for x in next(call for s in samples for call in s.calls if call)]
    prices = CallPrices(tuple(FIRST_PRICES[:width] for width in widths), 0.0)
    for _ in range(ROUNDS):
        table = np.array([_busiest(s.calls, prices) for s in samples])
        found = _not_negative(table / ns[:, None], np.ones(len(ns)))
        at = np.cumsum([0, *widths])
        each = tuple(tuple(map(float, found[a:b])) for a, b in pairwise(at))
        prices = CallPrices(each, float(found[-1]))
    return prices


def _busiest(calls: list[Call], prices: CallPrices) -> Floats:
    """Return the counts of each launch's busiest program, then the number of calls, all summed over the calls."""
    total = np.zeros(sum(map(len, prices.launches)) + 1)
    for call in filter(None, calls):
        rows = [x[np.argmax(x @ np.array(p))] for x, p in zip(call, prices.launches, strict=True)]
        total += np.concatenate([*rows, [1.0]])
    return total


def _not_negative(table: Floats, wanted: Floats) -> Floats:
    """Solve least squares without negative values: columns that would get one are dropped and get 0."""
    kept = np.arange(table.shape[1])
    while True:
        found, *_ = np.linalg.lstsq(table[:, kept], wanted, rcond=None)
        if found.min() >= 0 or len(kept) == 1:
            break
        kept = kept[found > 0]
    prices = np.zeros(table.shape[1])
    prices[kept] = np.maximum(found, 0)
    return prices

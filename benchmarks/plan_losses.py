"""Where the time of real plans' work lists goes on an H200,
by the prices that ``kernel_fit.py`` fits (nothing is measured here).

    python benchmarks/plan_losses.py        # plans 200 ranks' lists first, half a minute

The lists are those of ``gpu.py --only plans``. *Share* is the predicted time of the same number of pairs in one full
square over that of the lists, to be compared with the measured share. The other columns say where the time goes: blocks
that need no mask, blocks that need one (at the same price), the extra cost of masks, the fixed price of tiles, programs
that wait for the busiest one, and the start of calls.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import numpy as np
from numpy.typing import NDArray

import kernel_fit
from flexcp import masks
from flexcp.calibration import CallPrices, TileTimes
from flexcp.measure.calibrate.tiles import fit_tiles
from flexcp.measure.kernels.lists import Listed
from flexcp.measure.kernels.work import workload
from flexcp.measure.tile_times import Call, adding, counted
from flexcp.shape import Shape
from gpu import DATA, PACKS, RANKS_TIMED, TOKENS_PER_RANK, plan_work, rank_lists

Floats = NDArray[np.float64]
SHAPE = Shape(32, 8, 128, 128)
PARTS = ("clear blocks", "edge blocks", "their masks", "tiles", "waiting for the busiest", "calls")


def prices() -> TileTimes:
    """Return the prices fitted to the raw times."""
    raw = json.loads(kernel_fit.RAW.read_text())
    singles = {shape: kernel_fit.short(found) for shape, found in kernel_fit.singles(raw).items()}
    return fit_tiles(SHAPE, raw["multiprocessors"], singles, kernel_fit.plan_slots(raw))[0]


def spent(calls: list[Call], price: CallPrices, units: int) -> Floats:
    """Return the nanoseconds of each of ``PARTS``."""
    found = np.zeros(len(PARTS))
    for call in filter(None, calls):
        for counts, each in zip(call, map(np.array, price.launches), strict=True):
            clear, edge = counts[:, :2].sum(axis=0) / units
            busy = counts @ each
            tiles = (counts[:, 2:].sum(axis=0) * each[2:]).sum() / units
            mean = busy.sum() / units
            found += [clear * each[0], edge * each[0], edge * (each[1] - each[0]), tiles, busy.max() - mean, 0]
        found[-1] += price.call_ns
    return found


def rank_calls(lists: list[Listed], backward: bool, units: int) -> tuple[list[Call], int]:
    """Return a rank's calls, and its pairs x heads."""
    calls, pairs = [], 0
    for x, adds in zip(lists, adding((x.shelf, x.h0, x.h1) for x in lists), strict=True):
        heads = x.h1 - x.h0
        kv_heads = max(1, heads // SHAPE.queries_per_key)
        calls.append(counted(x.slices, heads, kv_heads, SHAPE, units, backward, adds))
        pairs += int(masks.area(x.slices).sum()) * heads
    return calls, pairs


def table(made: dict[str, Any], times: TileTimes) -> list[str]:
    """Return a table with a row for each kind of plan and direction."""
    lines = ["| documents | ranks | direction | share | " + " | ".join(PARTS) + " |", "| --- " * (4 + len(PARTS)) + "|"]
    units, square = times.multiprocessors, workload("full", TOKENS_PER_RANK)
    for data, ranks in DATA:
        for backward, price in ((False, times.forward), (True, times.backward)):
            whole = counted(square.slices(), SHAPE.heads, SHAPE.kv_heads, SHAPE, units, backward, adds=False)
            dense = spent([whole], price, units).sum() / (square.pairs() * SHAPE.heads)
            shares, parts = [], []
            for seed in range(PACKS):
                for rank in range(0, ranks, ranks // RANKS_TIMED):
                    lists = rank_lists(made, f"{data}/{ranks}/{seed}/{rank}/{int(backward)}/")
                    calls, pairs = rank_calls(lists, backward, units)
                    ns = spent(calls, price, units)
                    shares.append(dense * pairs / ns.sum())
                    parts.append(ns / ns.sum())
            cells = " | ".join(f"{x:.0%}" for x in np.mean(parts, axis=0))
            way = "backward" if backward else "forward"
            lines.append(f"| {data} | {ranks} | {way} | {np.mean(shares):.2f} | {cells} |")
    return lines


def main() -> None:
    """Print the table."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    times = prices()
    print("\n".join(table(plan_work(), times)))
    print(
        f"\nnanoseconds of a clear block, an edge block, a tile, one that adds: {times.forward}; backward: "
        f"{times.backward}"
    )


if __name__ == "__main__":
    main()

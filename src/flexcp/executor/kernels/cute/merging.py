"""How the CuTe forward adds a tile to results that are there: by their LSEs, and, of a part of a tile,
when its turn has come.

Parts of a tile (:mod:`levelled`) add to the same rows one after the other. A counter in memory for each warp group of
such a tile says how many have; the last part leaves it as it was before the launch.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, cute

from flexcp.executor.kernels.cute.parts import LOG2E, by_rows


@cute.jit
def read_lse(lse, l_at, there):
    """LSEs of the results that are there, as they are: nothing that would wait for them is done here."""
    for r in cutlass.range_constexpr(2):
        there[r] = (lse + l_at[r]).load()


@cute.jit
def in_base_2(there, row0, row1, m, pack: cutlass.Constexpr[int]):
    """LSEs that were read, in base 2; -inf in rows that are not of the tile."""
    for r in cutlass.range_constexpr(2):
        there[r] = there[r] * LOG2E if row0 + m[r] // pack < row1 else -Float32.inf


@cute.jit
def read_results(out, o_at, column0, there, width: cutlass.Constexpr[int], results):
    """The results that are there. Rows that have seen no key are not read: they may be anything."""
    rows = by_rows(results)
    for r in cutlass.range_constexpr(2):
        for c in cutlass.range_constexpr(width // 8):
            pair = cute.make_rmem_tensor(2, Float32)
            pair.fill(0.0)
            if there[r] != -Float32.inf:
                at = (out + (o_at[r] + column0 + 8 * c)).align(8)
                cute.autovec_copy(cute.make_tensor(at, cute.make_layout(2)), pair)
            rows[r, 2 * c] = pair[0]
            rows[r, 2 * c + 1] = pair[1]


@cute.jit
def weigh(whole, top, there, share, old_share, r: cutlass.Constexpr[int]):
    """What new and old results of a row are worth: the old ones 2 ** there beside the new 2 ** top * whole.
    Returns the sum of both.
    """
    both = cute.arch.fmax(top[r], there[r])
    base = Float32(0.0) if both == -Float32.inf else both
    share[r] = cute.math.exp2(top[r] - base, fastmath=True)
    old_share[r] = cute.math.exp2(there[r] - base, fastmath=True)
    top[r] = both
    return whole * share[r] + old_share[r]


@cute.jit
def add_scaled(results, more, factor):
    """Add ``more``, of which each row is worth its ``factor``."""
    rows, more_rows = by_rows(results), by_rows(more)
    for r in cutlass.range_constexpr(2):
        rows[r, None].store(rows[r, None].load() + more_rows[r, None].load() * factor[r])


@cute.jit
def wait_for_turn(counter, number, thread, barrier):
    """Until the parts of this tile before this one have added their results."""
    if thread == 0:
        done = cute.arch.load(counter, Int32, sem="acquire", scope="gpu")
        while done < number:
            done = cute.arch.load(counter, Int32, sem="acquire", scope="gpu")
    cute.arch.barrier(barrier_id=barrier, number_of_threads=128)


@cute.jit
def pass_turn(counter, place, thread, barrier):
    """Of a part: say that it has added its results."""
    if place >= 0:
        cute.arch.fence_acq_rel_gpu()
        cute.arch.barrier(barrier_id=barrier, number_of_threads=128)
        if thread == 0:
            done = Int32(0) if place % 2 == 1 else place // 2 + 1
            cute.arch.store(counter, done, sem="release", scope="gpu")

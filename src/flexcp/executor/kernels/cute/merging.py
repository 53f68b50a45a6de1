"""Merging: how the CuTe forward kernel adds a tile to existing results, by their LSEs.

"Existing" are results in memory that earlier work lists, or earlier parts of the same tile, have written. Parts of a
tile (:mod:`flexcp.executor.kernels.cute.levelled`) add to the same rows one after the other. Each such tile has a
counter in memory for each warp group, which says how many parts have added; the last part sets it back to 0.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, cute

from flexcp.executor.kernels.cute.parts import LOG2E, by_rows


@cute.jit
def read_lse(lse, l_at, there):
    """Start to load the existing LSEs into ``there``; they are not used here, because that would wait for the loads."""
    for r in cutlass.range_constexpr(2):
        there[r] = (lse + l_at[r]).load()


@cute.jit
def in_base_2(there, row0, row1, m, pack: cutlass.Constexpr[int]):
    """Convert loaded LSEs to base 2, and set them to -inf in rows that are not in the tile."""
    for r in cutlass.range_constexpr(2):
        there[r] = there[r] * LOG2E if row0 + m[r] // pack < row1 else -Float32.inf


@cute.jit
def read_results(out, o_at, column0, there, width: cutlass.Constexpr[int], results):
    """Load the existing results into ``results``; rows whose LSE (``there``) is -inf are set to 0.

    Such rows are not read, since they may hold anything.
    """
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
    """Compute the weights of the new and the existing results of row ``r``, in ``share`` and ``old_share``.

    New results have the softmax sum ``2 ** top * whole``, existing ones ``2 ** there``. ``top`` becomes the larger of
    the two exponents. Returns the sum of both, relative to that.
    """
    both = cute.arch.fmax(top[r], there[r])
    base = Float32(0.0) if both == -Float32.inf else both
    share[r] = cute.math.exp2(top[r] - base, fastmath=True)
    old_share[r] = cute.math.exp2(there[r] - base, fastmath=True)
    top[r] = both
    return whole * share[r] + old_share[r]


@cute.jit
def add_scaled(results, more, factor):
    """Add ``more`` to ``results``, each row times its ``factor``."""
    rows, more_rows = by_rows(results), by_rows(more)
    for r in cutlass.range_constexpr(2):
        rows[r, None].store(rows[r, None].load() + more_rows[r, None].load() * factor[r])


@cute.jit
def wait_for_turn(counter, number, thread, barrier):
    """Wait until the ``number`` parts of this tile that come before this one have added their results."""
    if thread == 0:
        done = cute.arch.load(counter, Int32, sem="acquire", scope="gpu")
        while done < number:
            done = cute.arch.load(counter, Int32, sem="acquire", scope="gpu")
    cute.arch.barrier(barrier_id=barrier, number_of_threads=128)


@cute.jit
def pass_turn(counter, place, thread, barrier):
    """If the item is a part of a tile (``place >= 0``), tell the next part that this one has added its results.

    ``place`` is twice the number of the part, plus 1 for the last part, which sets the counter back to 0.
    """
    if place >= 0:
        cute.arch.fence_acq_rel_gpu()
        cute.arch.barrier(barrier_id=barrier, number_of_threads=128)
        if thread == 0:
            done = Int32(0) if place % 2 == 1 else place // 2 + 1
            cute.arch.store(counter, done, sem="release", scope="gpu")

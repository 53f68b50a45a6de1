"""Rings: how a loading warp of the Hopper kernels hands buffers to two computing warp groups, and how they share work.

A *ring* is a row of buffers with two barriers each: *full*, on which the computing groups wait for the copy engine, and
*free*, on which the loading warp waits for both groups. Each side keeps its slot in the ring and the phase of the
slot's barriers. The loading warp begins with phase 1, because a new barrier counts as passed for that phase.

A program takes items of the list in a *zigzag*, alternately from the front and the back of each round. An item is a
tile of rows with a group of heads. The blocks of a tile lie in segments of eight numbers each, which begin with the
first row and the number of blocks (:mod:`flexcp.executor.kernels.tiles`).
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

# Loads a box of a tensor by the copy engine; the function has different names in Triton 3.6 and 3.9.
load_box = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared


@gluon.jit
def ring_barriers(SLOTS: gl.constexpr, FULL: gl.constexpr):
    """Allocate and initialise the barriers of a ring of ``SLOTS`` buffers.

    First come ``FULL`` full barriers for every slot, then a free one for each slot.
    """
    bars = gl.allocate_shared_memory(gl.int64, [(FULL + 1) * SLOTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(FULL * SLOTS):
        mbarrier.init(bars.index(i), count=1)
    for i in gl.static_range(SLOTS):
        mbarrier.init(bars.index(FULL * SLOTS + i), count=2)
    return bars


@gluon.jit
def next_slot(slot, phase, SLOTS: gl.constexpr):
    """Return the next slot of a ring, and the phase of its barriers."""
    slot += 1
    if slot == SLOTS:
        slot = 0
        phase ^= 1
    return slot, phase


@gluon.jit
def first_item():
    """Return this program's first item, and the step to its next item; items are taken in a zigzag."""
    item = gl.program_id(0)
    return item, 2 * (gl.num_programs(0) - item) - 1


@gluon.jit
def next_item(item, step):
    """Return the next item of this program, and the step to the one after it."""
    return item + step, 2 * gl.num_programs(0) - step


@gluon.jit
def next_block(at, left, segment, segments, ROWS: gl.constexpr):
    """Return the first row of the next block, how many blocks are left in its segment, and the segment."""
    at += ROWS
    left -= 1
    if left == 0:
        segment += 1
        at = gl.load(segments + segment * 8)
        left = gl.load(segments + segment * 8 + 1)
    return at, left, segment


@gluon.jit
def load_slot(tensor, at, bars, buffers, slot, phase, SLOTS: gl.constexpr, BYTES: gl.constexpr):
    """Start to fill a slot with a box of a tensor once the slot is free: ``BYTES`` bytes from coordinates ``at`` on."""
    mbarrier.wait(bars.index(SLOTS + slot), phase)
    mbarrier.expect(bars.index(slot), BYTES)
    load_box(tensor, at, bars.index(slot), buffers.index(slot))


@gluon.jit
def load_keys(
    k,
    v,
    head,
    key,
    left,
    segment,
    segments,
    blocks,
    k_smem,
    v_smem,
    k_bars,
    v_bars,
    slot,
    phase,
    N: gl.constexpr,
    D: gl.constexpr,
    V: gl.constexpr,
    SLOTS: gl.constexpr,
):
    """Fill the rings of keys and values with the blocks of a tile, beginning at ``key``.

    Returns the slot and phase after them.
    """
    size: gl.constexpr = k.dtype.primitive_bitwidth // 8
    for _ in range(blocks):
        load_slot(k, [key, head, 0], k_bars, k_smem, slot, phase, SLOTS, N * D * size)
        load_slot(v, [key, head, 0], v_bars, v_smem, slot, phase, SLOTS, N * V * size)
        slot, phase = next_slot(slot, phase, SLOTS)
        key, left, segment = next_block(key, left, segment, segments, N)
    return slot, phase

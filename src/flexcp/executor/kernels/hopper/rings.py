"""What the Hopper kernels' warps share: how a loading warp hands buffers to two computing warp groups,
and how all walk the work list.

A *ring* is a row of buffers with two barriers each: *full*, on which the computing groups wait for the copy engine, and
*free*, on which the loading warp waits for both groups. Who walks a ring keeps a slot and the phase of its barriers;
the loading warp begins with phase 1, because new barriers count as passed.

A program takes the items of its list there and back (*zigzag*). An item has a tile of rows, and the tile has blocks,
which lie in segments: eight numbers each, the first row and the number of blocks before the others (see :mod:`tiles`).
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

# A box of a tensor through the copy engine: Triton 3.6 and 3.9 have two names for it.
load_box = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared


@gluon.jit
def ring_barriers(SLOTS: gl.constexpr, FULL: gl.constexpr):
    """Barriers of a ring: ``FULL`` full ones of every slot, then the free ones."""
    bars = gl.allocate_shared_memory(gl.int64, [(FULL + 1) * SLOTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(FULL * SLOTS):
        mbarrier.init(bars.index(i), count=1)
    for i in gl.static_range(SLOTS):
        mbarrier.init(bars.index(FULL * SLOTS + i), count=2)
    return bars


@gluon.jit
def next_slot(slot, phase, SLOTS: gl.constexpr):
    """The slot after one of a ring, and the phase of its barriers."""
    slot += 1
    if slot == SLOTS:
        slot = 0
        phase ^= 1
    return slot, phase


@gluon.jit
def first_item():
    """The first item of this program, and how far its next is."""
    item = gl.program_id(0)
    return item, 2 * (gl.num_programs(0) - item) - 1


@gluon.jit
def next_item(item, step):
    """The item after one, and how far the next is."""
    return item + step, 2 * gl.num_programs(0) - step


@gluon.jit
def next_block(at, left, segment, segments, ROWS: gl.constexpr):
    """First row of the next block, how many are left of its segment, and the segment."""
    at += ROWS
    left -= 1
    if left == 0:
        segment += 1
        at = gl.load(segments + segment * 8)
        left = gl.load(segments + segment * 8 + 1)
    return at, left, segment


@gluon.jit
def load_slot(tensor, at, bars, buffers, slot, phase, SLOTS: gl.constexpr, BYTES: gl.constexpr):
    """Fill a slot with a box of a tensor, once it is free."""
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
    """Fill the rings of keys and values with the blocks of a tile, the first at ``key``;
    returns the slot and phase after them.
    """
    size: gl.constexpr = k.dtype.primitive_bitwidth // 8
    for _ in range(blocks):
        load_slot(k, [key, head, 0], k_bars, k_smem, slot, phase, SLOTS, N * D * size)
        load_slot(v, [key, head, 0], v_bars, v_smem, slot, phase, SLOTS, N * V * size)
        slot, phase = next_slot(slot, phase, SLOTS)
        key, left, segment = next_block(key, left, segment, segments, N)
    return slot, phase

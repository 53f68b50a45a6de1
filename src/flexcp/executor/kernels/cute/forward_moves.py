"""The warps of the forward kernel that move data: one loads queries, keys and values, one prefetches existing results.

Both go over tiles in the order of the warp groups that compute (:mod:`flexcp.executor.kernels.cute.forward`), and wait
for these, or for the loads, at barriers in shared memory.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, const_expr, cute

from flexcp.executor.kernels.cute.items import RECORD
from flexcp.executor.kernels.cute.parts import (
    ROWS,
    expect,
    fetch_line,
    load_box,
    next_buffer,
    read_record,
    record_fields,
    segment_start,
)

TILES = 2  # tiles whose queries are in shared memory: the current one and the next


class ForwardMoves:
    """The sizes of a forward kernel, as its own class describes them, and the work of the warps that move its data."""

    def __init__(
        self, dtype, out_dtype, share, pack, head_dim, v_head_dim, block, stages, softcap, fresh, finishes, zeroes
    ):
        self.dtype, self.out_dtype, self.share, self.pack = dtype, out_dtype, share, pack
        self.D, self.V, self.N, self.stages = head_dim, v_head_dim, block, stages
        self.softcap, self.fresh, self.finishes, self.zeroes = softcap, fresh, finishes, zeroes
        self.rounds = finishes or out_dtype is not Float32

    @cute.jit
    def load(self, mQ, mK, mV, q_atom, k_atom, v_atom, sQ, sK, sV, rings, records, segments):
        """Load the queries, keys and values of this program's tiles as buffers become free; run by one warp."""
        D, V, N, P = self.D, self.V, self.N, self.pack
        q_full, q_free, k_full, k_free, v_full, v_free = rings
        size = self.dtype.width // 8
        # Phases of the free barriers begin with 1, because a new barrier counts as passed for that phase.
        stage, phase, q_stage, q_phase = Int32(0), Int32(1), Int32(0), Int32(1)
        turn = cute.arch.block_idx()[0]
        ahead = cute.make_rmem_tensor(RECORD, Int32)
        read_record(records, turn, ahead)
        while ahead[0] >= 0:
            row0, _row1, segment, blocks, key, left, _edge, group, _counter, _place, _last, _first = record_fields(
                ahead
            )
            turn += cute.arch.grid_dim()[0]
            read_record(records, turn, ahead)
            head = group * P // self.share
            cute.arch.mbarrier_wait(q_free + q_stage, q_phase)
            expect(q_full + q_stage, 2 * ROWS * D * size)
            for w in cutlass.range_constexpr(2):
                at = cute.domain_offset(((0, row0 + w * (ROWS // P)), 0), mQ[None, None, group])
                load_box(
                    q_atom, cute.local_tile(at, (ROWS, D), (0, 0)), sQ[None, None, 2 * q_stage + w], q_full + q_stage
                )
            q_stage, q_phase = next_buffer(q_stage, q_phase, TILES)
            for _ in cutlass.range(blocks, unroll=1):
                cute.arch.mbarrier_wait(k_free + stage, phase)
                expect(k_full + stage, N * D * size)
                at_k = cute.domain_offset((key, 0), mK[None, None, head])
                load_box(k_atom, cute.local_tile(at_k, (N, D), (0, 0)), sK[None, None, stage], k_full + stage)
                cute.arch.mbarrier_wait(v_free + stage, phase)
                expect(v_full + stage, N * V * size)
                at_v = cute.domain_offset((key, 0), mV[None, None, head])
                load_box(v_atom, cute.local_tile(at_v, (N, V), (0, 0)), sV[None, None, stage], v_full + stage)
                stage, phase = next_buffer(stage, phase, self.stages)
                key += N
                left -= 1
                if left == 0:
                    segment += 1
                    key, left, _edge = segment_start(segments, segment)

    @cute.jit
    def rows_there(self, row0, row1, first):
        """Return the end of the tile's rows that may have existing results: ``row1``, or ``row0`` (none).

        It is ``row0`` if the kernel has ``finishes`` and the tile is the first to add to its rows.
        """
        if const_expr(self.finishes):
            row1 = row0 if first != 0 else row1
        return row1

    @cute.jit
    def fetch_results(self, out, lse, strides, rings, records):
        """Prefetch a tile's existing results into the L2 when the tile begins; they are read at its end.

        In one piece: the function is short, and deep only because each thread checks which of its rows have results.
        """
        o_row, o_head, l_row, l_head = strides
        lane = cute.arch.lane_idx()
        stage, phase = Int32(0), Int32(0)
        turn = cute.arch.block_idx()[0]
        ahead = cute.make_rmem_tensor(RECORD, Int32)
        read_record(records, turn, ahead)
        while ahead[0] >= 0:
            row0, row1, _segment, _blocks, _key, _left, _edge, group, _counter, _place, _last, first = record_fields(
                ahead
            )
            turn += cute.arch.grid_dim()[0]
            read_record(records, turn, ahead)
            cute.arch.mbarrier_wait(rings[0] + stage, phase)
            stage, phase = next_buffer(stage, phase, TILES)
            row1 = self.rows_there(row0, row1, first)
            for i in cutlass.range_constexpr(2 * ROWS // 32):
                m = lane + 32 * i
                row, head = row0 + m // self.pack, group * self.pack + m % self.pack
                if row < row1:
                    there = (lse + (row * l_row + head * l_head)).load()
                    if there != -Float32.inf:
                        for j in cutlass.range_constexpr(self.V // 32):
                            fetch_line(out + (row * o_row + head * o_head + 32 * j))

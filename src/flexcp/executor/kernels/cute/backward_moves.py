"""The two warps of the backward kernel that move data: one loads what is computed with, one adds dq to memory.

Both go over tiles, chunks of heads and blocks of queries in the order of the warp groups that compute
(:mod:`flexcp.executor.kernels.cute.backward`), and wait for these at barriers in shared memory.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, Int64, const_expr, cute
from cutlass.cute.nvgpu import cpasync

from flexcp.executor.kernels.cute.parts import expect, load_box, next_buffer
from flexcp.executor.kernels.cute.results import M, add_run
from flexcp.executor.kernels.cute.rows import SPARE

KEYS, HALF = 128, 64  # keys of a tile and of a warp group
DS_READY, DQ_FREE, DQ_FULL, OWN = 2, 3, 5, 7  # named barriers; all but DS_READY have one for each warp group


class BackwardMoves:
    """The sizes of a backward kernel, as its own class describes them, and the work of the warps that move its data."""

    def __init__(self, dtype, share, pack, head_dim, v_head_dim, stages, softcap, order, zeroes):
        self.dtype, self.share, self.pack = dtype, share, pack
        self.D, self.V, self.stages, self.softcap = head_dim, v_head_dim, stages, softcap
        self.order, self.zeroes = order, zeroes

    @cute.jit
    def load(self, tensors, atoms, buffers, sStat, rings, statistics, rows, mT, mG, mI, groups):
        """Load the data of this program's tiles as buffers become free; run by one warp.

        In one piece: it must go over tiles, chunks of heads and blocks of queries in the order of ``compute``, as
        ``store`` does; both are written as the same nest of loops, so that this is easy to see.
        """
        D, V, P = self.D, self.V, self.pack
        mQ, mK, mV, mdO = tensors
        q_atom, k_atom, v_atom, do_atom = atoms
        sQ, sK, sV, sdO = buffers
        kv_full, kv_free, q_full, q_free, do_full, do_free = rings
        size = self.dtype.width // 8
        chunks = self.share // P
        lane = cute.arch.lane_idx()
        copy_number = cute.make_copy_atom(cpasync.CopyG2SOp(), Float32, num_bits_per_copy=32)
        stage, phase, kv_phase = Int32(0), Int32(1), Int32(1)  # a new free barrier counts as passed for phase 1
        turn = cute.arch.block_idx()[0]
        item = mI[turn]
        while item >= 0:
            tile, group = item // groups, item % groups
            key0, begin, blocks = mT[tile, 0], mT[tile, 2], mT[tile, 3]
            cute.arch.mbarrier_wait(kv_free, kv_phase)
            kv_phase = kv_phase ^ 1
            expect(kv_full, KEYS * (D + V) * size)
            for w in cutlass.range_constexpr(2):
                at_k = cute.domain_offset((key0 + w * HALF, 0), mK[None, None, group])
                load_box(k_atom, cute.local_tile(at_k, (HALF, D), (0, 0)), sK[None, None, w], kv_full)
                at_v = cute.domain_offset((key0 + w * HALF, 0), mV[None, None, group])
                load_box(v_atom, cute.local_tile(at_v, (HALF, V), (0, 0)), sV[None, None, w], kv_full)
            for chunk in cutlass.range(chunks, unroll=1):
                number = group * chunks + chunk
                segment = begin
                query, left = self.last_block(mG, segment)
                for _ in cutlass.range(blocks, unroll=1):
                    cute.arch.mbarrier_wait(q_free + stage, phase)
                    first = statistics + (Int64(number) * 2 * rows + query) * P
                    for which in cutlass.range_constexpr(2):
                        for i in cutlass.range_constexpr(M // 32):
                            here = first + (which * rows * P + i * 32 + lane)
                            there = sStat.iterator + (i * 32 + lane + M * which + 2 * M * stage)
                            one = cute.make_layout(1)
                            cute.copy(copy_number, cute.make_tensor(here, one), cute.make_tensor(there, one))
                    cute.arch.cp_async_mbarrier_arrive_noinc(q_full + stage)
                    expect(q_full + stage, M * D * size)
                    at_q = cute.domain_offset(((0, query), 0), mQ[None, None, number])
                    load_box(q_atom, cute.local_tile(at_q, (M, D), (0, 0)), sQ[None, None, stage], q_full + stage)
                    cute.arch.mbarrier_wait(do_free + stage, phase)
                    expect(do_full + stage, M * V * size)
                    at_do = cute.domain_offset(((0, query), 0), mdO[None, None, number])
                    load_box(do_atom, cute.local_tile(at_do, (M, V), (0, 0)), sdO[None, None, stage], do_full + stage)
                    stage, phase = next_buffer(stage, phase, self.stages)
                    query -= M // P
                    left -= 1
                    if left == 0:
                        segment += 1
                        query, left = self.last_block(mG, segment)
            turn += cute.arch.grid_dim()[0]
            item = mI[turn]
        # The next launch may take this multiprocessor as soon as it is free; it waits for this one by itself.
        cute.arch.griddepcontrol_launch_dependents()

    @cute.jit
    def store(self, mdQ, dq_atom, sdQ, dq, dq_memory, rows, mT, mG, mI, groups):
        """Add each block's dq to memory, one half of the columns after the other; run by one warp.

        In one piece: it must go over tiles, chunks of heads and blocks of queries in the order of ``compute``, as
        ``load`` does; both are written as the same nest of loops, so that this is easy to see.
        """
        D, P = self.D, self.pack
        chunks = self.share // P
        turn = cute.arch.block_idx()[0]
        item = mI[turn]
        while item >= 0:
            tile, group = item // groups, item % groups
            begin, blocks = mT[tile, 2], mT[tile, 3]
            for chunk in cutlass.range(chunks, unroll=1):
                number = group * chunks + chunk
                segment = begin
                query, left = self.last_block(mG, segment)
                for _ in cutlass.range(blocks, unroll=1):
                    for w in cutlass.range_constexpr(2):
                        # Wait until this buffer has been read; the other of the two may still be in use.
                        cute.arch.cp_async_bulk_wait_group(1, read=True)
                        cute.arch.barrier_arrive(barrier_id=DQ_FREE + w, number_of_threads=160)
                        if const_expr(self.order == "alone"):
                            to = ((Int64(number) * 2 + w) * (rows * P + SPARE) + query * P) * (D // 2)
                            cute.arch.barrier(barrier_id=DQ_FULL + w, number_of_threads=160)
                            with cute.arch.elect_one():
                                add_run(dq_memory + w * (M * D // 2), dq + to, M * D // 2 * 4)
                        else:
                            at = cute.domain_offset(((0, query), 0), mdQ[None, None, number])
                            here, there = cpasync.tma_partition(
                                dq_atom,
                                0,
                                cute.make_layout(1),
                                cute.group_modes(sdQ[None, None, w], 0, 2),
                                cute.group_modes(cute.local_tile(at, (M, D // 2), (0, w)), 0, 2),
                            )
                            cute.arch.barrier(barrier_id=DQ_FULL + w, number_of_threads=160)
                            cute.copy(dq_atom, here, there)
                        cute.arch.cp_async_bulk_commit_group()
                    query -= M // P
                    left -= 1
                    if left == 0:
                        segment += 1
                        query, left = self.last_block(mG, segment)
            turn += cute.arch.grid_dim()[0]
            item = mI[turn]
        cute.arch.cp_async_bulk_wait_group(0)

    @cute.jit
    def last_block(self, mG, segment):
        """Return the first query of a segment's last block, and the number of the segment's blocks."""
        left = mG[segment, 1]
        return mG[segment, 0] + (left - 1) * (M // self.pack), left

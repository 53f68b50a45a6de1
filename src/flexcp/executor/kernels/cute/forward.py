"""The forward kernel in the CuTe DSL for Hopper (sm90).

There is one persistent program for each multiprocessor. It takes tiles of 128 packed query rows from a table of records
(:mod:`flexcp.executor.kernels.cute.items`). Every warp reads the next record while it works on the current one, because
nothing would hide a read between two tiles. One warp loads the queries of a tile, then its keys and values block by
block, by the copy engine into rings of buffers. Two warp groups compute 64 rows each.

A warp group starts the logits of block j + 1 and the product with the values of block j together, and computes the
softmax of block j + 1 while the tensor cores multiply the values. The two groups take turns in starting products, so
that the softmax of one runs beside the products of the other.

Blocks come in segments (:mod:`flexcp.executor.kernels.tiles`) with and without a mask. Each kind has a loop of its own,
because with a branch between the products and the wait for them the compiler would wait at the branch. Keys past the
end of a slice may hold anything: their logits are masked, and their values are zeroed in the buffer, unless all rows of
the tensor are known to be in some slice.

If results are added to, the existing ones are read at the end of a tile, into the registers of its last logits, and
merged by their LSEs (:mod:`flexcp.executor.kernels.cute.merging`). A tile may be a part of a larger one; it then waits
until the part before it has added its results (:mod:`flexcp.executor.kernels.cute.levelled`). If several lists add to a
row, the last one may write it in the model's dtype; the record of a tile says so.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Float32, Int32, Int64, const_expr, cute
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup

from flexcp.executor.kernels.cute.forward_moves import TILES, ForwardMoves
from flexcp.executor.kernels.cute.items import RECORD
from flexcp.executor.kernels.cute.merging import (
    add_scaled,
    in_base_2,
    pass_turn,
    read_lse,
    read_results,
    wait_for_turn,
    weigh,
)
from flexcp.executor.kernels.cute.outputs import write_rounded, write_sums
from flexcp.executor.kernels.cute.parts import (
    COMPUTE_REGISTERS,
    LN2,
    LOAD_REGISTERS,
    LOG2E,
    ROWS,
    THREADS,
    arrive,
    as_operand,
    bounded,
    by_rows,
    init_bars,
    next_buffer,
    packed_heads_view,
    product,
    read_record,
    record_fields,
    round_to,
    seen_bits,
    segment_limits,
    segment_start,
    shared_layout,
    shared_tensor,
    tiled_product,
    transposed,
    zero_from,
)

TURN, OWN = 2, 4  # first named barriers, one for each warp group: its turn to start products, and its own threads
LAZY = 8.0
"""By how much the largest logit of a row (in base 2) may grow before older results are rescaled to it."""
K, MN = OperandMajorMode.K, OperandMajorMode.MN


class Forward(ForwardMoves):
    """The forward kernel of a model, with ``share`` query heads for each KV head and ``pack`` of them in a tile.

    Sizes and strides are arguments of the call. With ``fresh`` results are written and not added to. With ``finishes``
    rows that no later work list adds to are written in the model's dtype, to another tensor. With ``zeroes`` values
    past the end of a slice may be anything, also NaN.
    """

    @cute.jit
    def __call__(
        self,
        q: cute.Pointer,
        k: cute.Pointer,
        v: cute.Pointer,
        out: cute.Pointer,
        lse: cute.Pointer,
        finished: cute.Pointer,
        records: cute.Pointer,
        segments: cute.Pointer,
        counters: cute.Pointer,
        rows: Int32,
        keys: Int32,
        heads: Int32,
        kv_heads: Int32,
        q_row: Int64,
        q_head: Int64,
        k_row: Int64,
        k_head: Int64,
        v_row: Int64,
        v_head: Int64,
        o_row: Int64,
        o_head: Int64,
        l_row: Int64,
        l_head: Int64,
        f_row: Int64,
        f_head: Int64,
        scale: Float32,
        softcap: Float32,
        programs: Int32,
        stream: cuda.CUstream,
    ):
        """Launch the kernel. Strides of rows and heads are in elements; those of q, k and v are multiples of 16 bytes.

        A kernel with ``finishes`` writes results in the model's dtype to ``finished``; others ignore that pointer.
        """
        D, V, N, P = self.D, self.V, self.N, self.pack
        q_row, q_head, k_row, k_head, v_row, v_head = [
            cute.assume(x, divby=8) for x in (q_row, q_head, k_row, k_head, v_row, v_head)
        ]
        mQ = cute.make_tensor(q, cute.make_layout(((heads, rows), D), stride=((q_head, q_row), 1)))
        mK = cute.make_tensor(k, cute.make_layout((keys, D, kv_heads), stride=(k_row, 1, k_head)))
        mV = cute.make_tensor(v, cute.make_layout((keys, V, kv_heads), stride=(v_row, 1, v_head)))
        sQ, sO = shared_layout(self.dtype, ROWS, D, 2 * TILES), shared_layout(self.dtype, ROWS, V, 2)
        sK, sV = shared_layout(self.dtype, N, D, self.stages), shared_layout(self.dtype, N, V, self.stages)
        load = cpasync.CopyBulkTensorTileG2SOp()
        q_atom, mQ = cpasync.make_tiled_tma_atom(load, mQ, cute.select(sQ, mode=[0, 1]), ((P, ROWS // P), D))
        k_atom, mK = cpasync.make_tiled_tma_atom(load, mK, cute.select(sK, mode=[0, 1]), (N, D), 1)
        v_atom, mV = cpasync.make_tiled_tma_atom(load, mV, cute.select(sV, mode=[0, 1]), (N, V), 1)
        self.kernel(
            packed_heads_view(mQ, P),
            mK,
            mV,
            q_atom,
            k_atom,
            v_atom,
            sQ,
            sK,
            sV,
            sO,
            tiled_product(self.dtype, N, K, K),
            tiled_product(self.dtype, V, K, MN, from_registers=True),
            out,
            lse,
            finished,
            records,
            segments,
            counters,
            o_row,
            o_head,
            l_row,
            l_head,
            f_row,
            f_head,
            scale,
            softcap,
        ).launch(grid=(programs, 1, 1), block=(THREADS, 1, 1), stream=stream, min_blocks_per_mp=1)

    @cute.kernel
    def kernel(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        q_atom: cute.CopyAtom,
        k_atom: cute.CopyAtom,
        v_atom: cute.CopyAtom,
        sQ_layout: cute.ComposedLayout,
        sK_layout: cute.ComposedLayout,
        sV_layout: cute.ComposedLayout,
        sO_layout: cute.ComposedLayout,
        mma_S: cute.TiledMma,
        mma_O: cute.TiledMma,
        out: cute.Pointer,
        lse: cute.Pointer,
        finished: cute.Pointer,
        records: cute.Pointer,
        segments: cute.Pointer,
        counters: cute.Pointer,
        o_row: Int64,
        o_head: Int64,
        l_row: Int64,
        l_head: Int64,
        f_row: Int64,
        f_head: Int64,
        scale: Float32,
        softcap: Float32,
    ):
        S = self.stages
        smem = cutlass.memory.SmemAllocator()
        bars = smem.allocate_array(cutlass.Int64, num_elems=2 * TILES + 4 * S)
        sQ, sK, sV = (shared_tensor(smem, self.dtype, x) for x in (sQ_layout, sK_layout, sV_layout))
        sO = shared_tensor(smem, self.dtype, sO_layout) if const_expr(self.rounds) else None
        # Full and free barriers of the rings of queries, keys and values.
        keys = bars + 2 * TILES
        rings = (bars, bars + TILES, keys, keys + S, keys + 2 * S, keys + 3 * S)
        warp_id = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp_id == 0:
            for atom in (q_atom, k_atom, v_atom):
                cpasync.prefetch_descriptor(atom)
            with cute.arch.elect_one():
                init_bars(bars, (1,) * TILES + (8,) * TILES + ((1,) * S + (8,) * S) * 2)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        if warp_id < 4:
            cute.arch.setmaxregister_decrease(LOAD_REGISTERS)
            if warp_id == 0:
                self.load(mQ, mK, mV, q_atom, k_atom, v_atom, sQ, sK, sV, rings, records, segments)
            if const_expr(not self.fresh) and warp_id == 1:
                self.fetch_results(out, lse, (o_row, o_head, l_row, l_head), rings, records)
        else:
            cute.arch.setmaxregister_increase(COMPUTE_REGISTERS)
            strides = (o_row, o_head, l_row, l_head)
            tables = (records, segments, counters)
            rounded = (finished, f_row, f_head) if const_expr(self.finishes) else (out, o_row, o_head)
            self.compute(mma_S, mma_O, sQ, sK, sV, sO, out, lse, strides, rounded, rings, tables, scale, softcap)

    @cute.jit
    def compute(self, mma_S, mma_O, sQ, sK, sV, sO, out, lse, strides, rounded, rings, tables, scale, softcap):
        """Compute one warp group's rows of every tile of this program.

        In one piece: accumulators, running maxima and the positions in the rings live in registers from the first block
        of keys to the last, and each part of the loop changes most of them, so a separate function would have to take
        and return them all.
        """
        records, segments, counters = tables
        V, N, P = self.V, self.N, self.pack
        q_full, q_free, k_full, k_free, v_full, v_free = rings
        o_row, o_head, l_row, l_head = strides
        thread = cute.arch.thread_idx()[0] - 128
        wg = cute.arch.make_warp_uniform(thread // 128)
        thread = thread % 128
        lane = thread % 32
        s_thr, o_thr = mma_S.get_slice(0), mma_O.get_slice(0)
        rQ = s_thr.make_fragment_A(s_thr.partition_A(sQ))
        rK = s_thr.make_fragment_B(s_thr.partition_B(sK))
        rV = o_thr.make_fragment_B(o_thr.partition_B(transposed(sV)))
        rP = o_thr.make_fragment_A(o_thr.partition_shape_A((ROWS, N)))
        acc = cute.make_rmem_tensor(o_thr.partition_shape_C((ROWS, V)), Float32)
        s = cute.make_rmem_tensor(s_thr.partition_shape_C((ROWS, N)), Float32)
        top, total = cute.make_rmem_tensor(2, Float32), cute.make_rmem_tensor(2, Float32)
        there = cute.make_rmem_tensor(2, Float32)  # LSEs of existing results
        m = cute.make_rmem_tensor(2, Int32)  # this thread's rows of the tile
        for r in cutlass.range_constexpr(2):
            m[r] = wg * ROWS + (thread // 32) * 16 + lane // 4 + 8 * r
        column0 = (lane % 4) * 2
        factors = (softcap * LOG2E, scale / softcap) if const_expr(self.softcap) else (scale * LOG2E, scale)
        registers = (mma_S, mma_O, s, acc, rK, rV, rP, top, total, factors)
        if wg == 0:
            cute.arch.barrier_arrive(barrier_id=TURN, number_of_threads=256)
        stage, phase, q_stage, q_phase = Int32(0), Int32(0), Int32(0), Int32(0)
        turn = cute.arch.block_idx()[0]
        ahead = cute.make_rmem_tensor(RECORD, Int32)
        read_record(records, turn, ahead)
        while ahead[0] >= 0:
            row0, row1, segment, blocks, key, left, edge, group, counter, place, last, first = record_fields(ahead)
            turn += cute.arch.grid_dim()[0]
            read_record(records, turn, ahead)
            next_key, next_left, next_edge = segment_start(segments, segment + 1)
            o_at, l_at = cute.make_rmem_tensor(2, Int64), cute.make_rmem_tensor(2, Int64)
            for r in cutlass.range_constexpr(2):
                row, head = row0 + m[r] // P, group * P + m[r] % P
                o_at[r] = row * o_row + head * o_head
                # For a row past the tile's last one, the address of the last: it is read but never written.
                l_at[r] = cutlass.min(row, row1 - 1) * l_row + head * l_head
            top.fill(-Float32.inf)
            total.fill(0.0)
            acc.fill(0.0)
            if const_expr(not self.fresh):
                read_lse(lse, l_at, there)

            # Logits and softmax of the first block.
            cute.arch.mbarrier_wait(q_full + q_stage, q_phase)
            rQ_tile = rQ[None, None, None, 2 * q_stage + wg]
            state = (rQ_tile, *registers)
            cute.arch.mbarrier_wait(k_full + stage, phase)
            product(mma_S, s, [(rQ_tile, rK[None, None, None, stage])], True)
            warpgroup.wait_group(0)
            arrive(k_free + stage)
            if edge != 0:
                limits = segment_limits(segments, segment)
                self.mask(s, limits, key + column0, row0, m)
                self.clean(sV, v_full, stage, phase, limits[2] - key, thread, wg)
            self.softmax(s, top, total, factors)
            round_to(as_operand(s), rP)

            key += N
            left -= 1
            blocks -= 1
            while blocks > 0:
                if left == 0:
                    segment += 1
                    key, left, edge = next_key, next_left, next_edge
                    next_key, next_left, next_edge = segment_start(segments, segment + 1)
                count = cutlass.min(left, blocks)
                if edge != 0:
                    limits = segment_limits(segments, segment)
                    for i in cutlass.range(count, unroll=1):
                        stage, phase = self.issue(state, rings, stage, phase, wg)
                        self.mask(s, limits, key + i * N + column0, row0, m)
                        self.finish(state, v_free, stage)
                        self.clean(sV, v_full, stage, phase, limits[2] - key - i * N, thread, wg)
                else:
                    for _i in cutlass.range(count, unroll=1):
                        stage, phase = self.issue(state, rings, stage, phase, wg)
                        self.finish(state, v_free, stage)
                key += count * N
                left -= count
                blocks -= count

            # Free the queries for the next tile, then multiply the values of the last block.
            arrive(q_free + q_stage)
            q_stage, q_phase = next_buffer(q_stage, q_phase, TILES)
            if const_expr(not self.fresh):
                if place > 1:
                    wait_for_turn(counters + 2 * counter + wg, place // 2, thread, OWN + wg)
                    read_lse(lse, l_at, there)
                in_base_2(there, row0, self.rows_there(row0, row1, first), m, P)
            cute.arch.mbarrier_wait(v_full + stage, phase)
            product(mma_O, acc, [(rP, rV[None, None, None, stage])], False)
            if const_expr(not self.fresh):
                adds = cute.arch.vote_any_sync(cutlass.max(there[0], there[1]) != -Float32.inf)
                if adds:
                    # Reuse the registers of the logits; the results arrive while the values are multiplied.
                    read_results(out, o_at, column0, there, V, s)
            warpgroup.wait_group(0)
            arrive(v_free + stage)
            stage, phase = next_buffer(stage, phase, self.stages)

            share, old_share = cute.make_rmem_tensor(2, Float32), cute.make_rmem_tensor(2, Float32)
            for r in cutlass.range_constexpr(2):
                whole = total[r] + cute.arch.shuffle_sync_bfly(total[r], offset=1)
                whole += cute.arch.shuffle_sync_bfly(whole, offset=2)
                share[r] = Float32(1.0)
                if const_expr(not self.fresh):
                    whole = weigh(whole, top, there, share, old_share, r)
                inverse = cute.arch.rcp_approx(whole if whole != 0.0 else Float32(1.0))
                share[r] *= inverse
                old_share[r] *= inverse
                if row0 + m[r] // P < row1 and lane % 4 == 0:
                    (lse + l_at[r]).store((top[r] + cute.math.log2(whole, fastmath=True)) * LN2)
            self.rescale(acc, share)
            if const_expr(not self.fresh):  # noqa: SIM102  (this is known at compile time, the next is not)
                if adds:
                    add_scaled(acc, s, old_share)
            if const_expr(not self.rounds):
                write_sums(acc, out, o_at, row0, row1, m, column0, P)
            elif const_expr(not self.finishes):  # noqa: SIM114  (this is known at compile time, the next is not)
                write_rounded(mma_O, acc, sO, rounded, thread, wg, row0, row1, group, OWN + wg, P)
            elif last != 0:
                write_rounded(mma_O, acc, sO, rounded, thread, wg, row0, row1, group, OWN + wg, P)
            else:
                write_sums(acc, out, o_at, row0, row1, m, column0, P)
            if const_expr(not self.fresh):
                pass_turn(counters + 2 * counter + wg, place, thread, OWN + wg)

    @cute.jit
    def issue(self, state, rings, stage, phase, wg):
        """Start the next block's logits and the product with the last block's values, and wait for the logits only.

        Returns the buffer of the next block and the phase of its barriers.
        """
        rQ, mma_S, mma_O, s, acc, rK, rV, rP, _top, _total, _factors = state
        _q_full, _q_free, k_full, k_free, v_full, _v_free = rings
        v_stage, v_phase = stage, phase
        stage, phase = next_buffer(stage, phase, self.stages)
        cute.arch.mbarrier_wait(k_full + stage, phase)
        cute.arch.barrier(barrier_id=TURN + wg, number_of_threads=256)
        product(mma_S, s, [(rQ, rK[None, None, None, stage])], True)
        cute.arch.mbarrier_wait(v_full + v_stage, v_phase)
        product(mma_O, acc, [(rP, rV[None, None, None, v_stage])], False)
        cute.arch.barrier_arrive(barrier_id=TURN + 1 - wg, number_of_threads=256)
        warpgroup.wait_group(1)
        arrive(k_free + stage)
        return stage, phase

    @cute.jit
    def finish(self, state, v_free, stage):
        """Compute the softmax of a block while the values of the block before it are multiplied, and wait for both."""
        _rQ, _mma_S, _mma_O, s, acc, _rK, _rV, rP, top, total, factors = state
        decay = self.softmax(s, top, total, factors)
        warpgroup.wait_group(0)
        arrive(v_free + (stage - 1 if stage > 0 else self.stages - 1))
        round_to(as_operand(s), rP)
        if cute.arch.vote_any_sync(cutlass.min(decay[0], decay[1]) != 1.0):
            self.rescale(acc, decay)

    @cute.jit
    def clean(self, sV, v_full, stage, phase, valid, thread, wg):
        """Zero a block's values past the end of its slice, if the block reaches past it.

        Both warp groups do this; they write the same zeros. Without ``zeroes`` every row of the tensor is in a slice,
        and zeros are read past its end.
        """
        if const_expr(self.zeroes) and valid < self.N:
            cute.arch.mbarrier_wait(v_full + stage, phase)
            zero_from(sV[None, None, stage], valid, thread)
            cute.arch.barrier(barrier_id=OWN + wg, number_of_threads=128)

    @cute.jit
    def mask(self, s, limits, column, row0, m):
        """Set logits to -inf where the segment's band or rows hide the pair."""
        lo, hi, end, q0, q1 = limits
        rows = by_rows(s)
        for r in cutlass.range_constexpr(2):
            row = row0 + m[r] // self.pack
            first, past = row + lo - column, cutlass.min(row + hi + 1, end) - column
            if row < q0 or row >= q1:
                past = Int32(0)
            bits = seen_bits(self.columns_before(first), self.columns_before(past) - 1)
            for c in cutlass.range_constexpr(self.N // 4):
                rows[r, c] = rows[r, c] if (bits & Int32(1 << c if c < 31 else -(1 << 31))) != 0 else -Float32.inf

    @cute.jit
    def columns_before(self, column):
        """Return how many of this thread's columns (two out of every eight) lie before ``column``.

        ``column`` is counted from this thread's first column.
        """
        column = cutlass.min(cutlass.max(column, 0), self.N)
        return column // 8 * 2 + cutlass.min(column % 8, 2)

    @cute.jit
    def softmax(self, s, top, total, factors):
        """Turn logits into probabilities relative to a running maximum, in place; return the factor of older results.

        Maximum and exponents are in base 2. The running maximum is only replaced by one that is larger by more than
        ``LAZY``, so that older results seldom have to be rescaled; probabilities are at most ``2 ** LAZY`` then. Each
        thread keeps its own part of the sum until the end of the tile.
        """
        scale_log2, inner = factors
        rows = by_rows(s)
        decay = cute.make_rmem_tensor(2, Float32)
        if const_expr(self.softcap):
            for i in cutlass.range_constexpr(cute.size(s)):
                s[i] = bounded(s[i], inner)
        for r in cutlass.range_constexpr(2):
            # Four independent chains of maxima, because one chain would be as long as the row.
            best = [rows[r, i] for i in range(4)]
            for c in cutlass.range_constexpr(4, self.N // 4):
                best[c % 4] = cute.arch.fmax(best[c % 4], rows[r, c])
            most = cute.arch.fmax(cute.arch.fmax(best[0], best[1]), cute.arch.fmax(best[2], best[3]))
            most = cute.arch.fmax(most, cute.arch.shuffle_sync_bfly(most, offset=1))
            most = cute.arch.fmax(most, cute.arch.shuffle_sync_bfly(most, offset=2))
            new = cute.arch.fmax(top[r], most * scale_log2)
            new = top[r] if new - top[r] <= LAZY else new
            base = Float32(0.0) if new == -Float32.inf else new
            p = cute.math.exp2(rows[r, None].load() * scale_log2 - base, fastmath=True)
            # A row that saw no key yet has nothing to rescale.
            decay[r] = Float32(1.0) if top[r] == -Float32.inf else cute.math.exp2(top[r] - base, fastmath=True)
            top[r] = new
            total[r] = p.reduce(cute.ReductionOp.ADD, total[r] * decay[r], 0)
            rows[r, None].store(p)
        return decay

    @cute.jit
    def rescale(self, acc, factor):
        rows = by_rows(acc)
        for r in cutlass.range_constexpr(2):
            rows[r, None].store(rows[r, None].load() * factor[r])

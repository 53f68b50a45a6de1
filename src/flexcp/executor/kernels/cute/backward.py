"""The backward kernel in the CuTe DSL for Hopper (sm90): dq, dk and dv in one pass, with five products per block.

There is one persistent program for each multiprocessor. It takes tiles of 128 keys in the order of
:mod:`flexcp.executor.kernels.cute.items` and walks the blocks of 64 packed queries that see them, from the last to the
first. One warp loads by the copy engine, another adds dq to memory by the copy engine's reduction. Two warp groups
compute, each with 64 of the keys as rows of its products:

    S = K Q'    dP = V dO'    P = exp(S - LSE)    dS = P (dP - delta)    dV += P dO    dK += dS Q      (keys are rows)
    dQ = dS' K      each group has half of the columns, over all keys; the groups exchange dS through shared memory

The product of dV is started before the wait for dP, so that the exponentials run beside the product of dP, and dS is
computed beside that of dV; blocks with a mask lack the registers for that. dk and dv of a tile stay in registers until
its end (:mod:`flexcp.executor.kernels.cute.results` writes results). Sums have no fixed order. There are no registers
for more products in flight: if the next block's logits are started early, the compiler serialises all products.

Blocks come in segments (:mod:`flexcp.executor.kernels.tiles`) with and without a mask. Each kind has a loop of its own,
because with a branch between the products and the wait for them the compiler would wait at the branch. A mask is a word
of bits for each of a thread's two keys; P and dS are zeroed by it when they are rounded, two numbers at a time. Memory
past the end of a slice or a tile may hold anything, and is zeroed in the buffers, unless all rows and keys of the
tensors are known to be in some slice.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Float32, Int32, Int64, const_expr, cute
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warp, warpgroup

from flexcp.executor.kernels.cute.backward_moves import DQ_FREE, DQ_FULL, DS_READY, HALF, KEYS, OWN, BackwardMoves
from flexcp.executor.kernels.cute.parts import (
    COMPUTE_REGISTERS,
    FAR,
    LOAD_REGISTERS,
    LOG2E,
    THREADS,
    arrive,
    as_operand,
    bounded,
    by_rows,
    init_bars,
    kept,
    next_buffer,
    packed_heads_view,
    product,
    round_to,
    seen_bits,
    shared_layout,
    shared_tensor,
    tiled_product,
    transposed,
    zero_from,
)
from flexcp.executor.kernels.cute.results import (
    M,
    add_rows,
    open_addresses,
    save_open,
    save_sums,
    save_tensor,
    sums_addresses,
    tensor_addresses,
    write_rows,
)

K_MODE, MN_MODE = OperandMajorMode.K, OperandMajorMode.MN


class Backward(BackwardMoves):
    """The backward kernel of a model, with ``share`` query heads for each KV head and ``pack`` of them in a block.

    Sizes and strides are arguments of the call. ``order`` is the order of dq in memory: "rows", "open" or "alone"
    (:mod:`flexcp.executor.kernels.cute.results`). With ``zeroes`` rows and keys past the end of a slice may hold
    anything, also NaN.
    """

    @cute.jit
    def __call__(
        self,
        q: cute.Pointer,
        k: cute.Pointer,
        v: cute.Pointer,
        do: cute.Pointer,
        statistics: cute.Pointer,
        dq: cute.Pointer,
        dk: cute.Pointer,
        dv: cute.Pointer,
        tiles: cute.Pointer,
        segments: cute.Pointer,
        items: cute.Pointer,
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
        do_row: Int64,
        do_head: Int64,
        dq_row: Int64,
        dq_head: Int64,
        dk_row: Int64,
        dk_head: Int64,
        dv_row: Int64,
        dv_head: Int64,
        scale: Float32,
        softcap: Float32,
        whole_tiles: Int32,
        programs: Int32,
        stream: cuda.CUstream,
    ):
        """Launch the kernel. Strides of rows and heads are in elements, multiples of 16 bytes.

        ``statistics`` are LSEs and deltas as :mod:`flexcp.executor.kernels.cute.rows` packs them. With ``whole_tiles``
        dk and dv are written in the dtype of the keys; else they are float32 and are added to.

        In one piece: most lines are the names of arguments that it takes or passes on; between them it describes each
        tensor once.
        """
        D, V, P, S = self.D, self.V, self.pack, self.stages
        q_row, q_head, k_row, k_head, v_row, v_head, do_row, do_head = [
            cute.assume(x, divby=8) for x in (q_row, q_head, k_row, k_head, v_row, v_head, do_row, do_head)
        ]
        mQ = cute.make_tensor(q, cute.make_layout(((heads, rows), D), stride=((q_head, q_row), 1)))
        mdO = cute.make_tensor(do, cute.make_layout(((heads, rows), V), stride=((do_head, do_row), 1)))
        mK = cute.make_tensor(k, cute.make_layout((keys, D, kv_heads), stride=(k_row, 1, k_head)))
        mV = cute.make_tensor(v, cute.make_layout((keys, V, kv_heads), stride=(v_row, 1, v_head)))
        sK, sV = shared_layout(self.dtype, HALF, D, 2), shared_layout(self.dtype, HALF, V, 2)
        sQ, sdO = shared_layout(self.dtype, M, D, S), shared_layout(self.dtype, M, V, S)
        sdS = shared_layout(self.dtype, HALF, M, 4)  # keys of one group x queries, for two groups, twice
        sdQ = shared_layout(Float32, M, D // 2, 2)
        load = cpasync.CopyBulkTensorTileG2SOp()
        box = (P, M // P)
        q_atom, mQ = cpasync.make_tiled_tma_atom(load, mQ, cute.select(sQ, mode=[0, 1]), (box, D))
        do_atom, mdO = cpasync.make_tiled_tma_atom(load, mdO, cute.select(sdO, mode=[0, 1]), (box, V))
        dq_atom, mdQ = None, None
        if const_expr(self.order != "alone"):
            dq_row, dq_head = [cute.assume(x, divby=4) for x in (dq_row, dq_head)]
            mdQ = cute.make_tensor(dq, cute.make_layout(((heads, rows), D), stride=((dq_head, dq_row), 1)))
            add = cpasync.CopyReduceBulkTensorTileS2GOp()
            dq_atom, mdQ = cpasync.make_tiled_tma_atom(add, mdQ, cute.select(sdQ, mode=[0, 1]), (box, D // 2))
            mdQ = packed_heads_view(mdQ, P)
        k_atom, mK = cpasync.make_tiled_tma_atom(load, mK, cute.select(sK, mode=[0, 1]), (HALF, D), 1)
        v_atom, mV = cpasync.make_tiled_tma_atom(load, mV, cute.select(sV, mode=[0, 1]), (HALF, V), 1)
        mQ, mdO = (packed_heads_view(x, P) for x in (mQ, mdO))
        self.kernel(
            mQ,
            mK,
            mV,
            mdO,
            mdQ,
            q_atom,
            k_atom,
            v_atom,
            do_atom,
            dq_atom,
            sQ,
            sK,
            sV,
            sdO,
            sdS,
            sdQ,
            tiled_product(self.dtype, M, K_MODE, K_MODE),
            tiled_product(self.dtype, V, K_MODE, MN_MODE, from_registers=True),
            tiled_product(self.dtype, D, K_MODE, MN_MODE, from_registers=True),
            tiled_product(self.dtype, D // 2, MN_MODE, MN_MODE),
            statistics,
            dq,
            dk,
            dv,
            tiles,
            segments,
            items,
            rows,
            kv_heads,
            dk_row,
            dk_head,
            dv_row,
            dv_head,
            scale,
            softcap,
            whole_tiles,
        ).launch(grid=(programs, 1, 1), block=(THREADS, 1, 1), stream=stream, min_blocks_per_mp=1, use_pdl=True)

    @cute.kernel
    def kernel(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mdO: cute.Tensor,
        mdQ: cute.Tensor | None,
        q_atom: cute.CopyAtom,
        k_atom: cute.CopyAtom,
        v_atom: cute.CopyAtom,
        do_atom: cute.CopyAtom,
        dq_atom: cute.CopyAtom | None,
        sQ_layout: cute.ComposedLayout,
        sK_layout: cute.ComposedLayout,
        sV_layout: cute.ComposedLayout,
        sdO_layout: cute.ComposedLayout,
        sdS_layout: cute.ComposedLayout,
        sdQ_layout: cute.ComposedLayout,
        mma_S: cute.TiledMma,
        mma_dV: cute.TiledMma,
        mma_dK: cute.TiledMma,
        mma_dQ: cute.TiledMma,
        statistics: cute.Pointer,
        dq: cute.Pointer,
        dk: cute.Pointer,
        dv: cute.Pointer,
        tiles: cute.Pointer,
        segments: cute.Pointer,
        items: cute.Pointer,
        rows: Int32,
        kv_heads: Int32,
        dk_row: Int64,
        dk_head: Int64,
        dv_row: Int64,
        dv_head: Int64,
        scale: Float32,
        softcap: Float32,
        whole_tiles: Int32,
    ):
        """Allocate the buffers, and start ``load``, ``store`` or ``compute`` in every warp.

        In one piece: most lines are the names of arguments that it takes or passes on.
        """
        S = self.stages
        smem = cutlass.memory.SmemAllocator()
        bars = smem.allocate_array(cutlass.Int64, num_elems=2 + 4 * S)
        layouts = (sQ_layout, sK_layout, sV_layout, sdO_layout, sdS_layout)
        sQ, sK, sV, sdO, sdS = (shared_tensor(smem, self.dtype, x) for x in layouts)
        dq_memory = smem.allocate_array(Float32, num_elems=M * self.D, byte_alignment=1024)
        sdQ = cute.make_tensor(cute.recast_ptr(dq_memory, sdQ_layout.inner, dtype=Float32), sdQ_layout.outer)
        sStat = smem.allocate_tensor(Float32, cute.make_layout((M, 2, S)), byte_alignment=128)
        # Full and free barriers of keys and values, of the ring of queries (with statistics), and of gradients.
        rings = (bars, bars + 1, bars + 2, bars + 2 + S, bars + 2 + 2 * S, bars + 2 + 3 * S)
        warp_id = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp_id == 0:
            for atom in (q_atom, k_atom, v_atom, do_atom):
                cpasync.prefetch_descriptor(atom)
            with cute.arch.elect_one():
                # 33 arrivals fill a buffer of queries: the copy engine, and 32 lanes that copy statistics.
                init_bars(bars, (1, 8) + (33,) * S + (8,) * S + (1,) * S + (8,) * S)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        # What runs before this launch may still run until here; it is what filled or cleared all that is read below.
        cute.arch.griddepcontrol_wait()
        mT = cute.make_tensor(tiles, cute.make_layout((FAR, 4), stride=(4, 1)))
        mG = cute.make_tensor(segments, cute.make_layout((FAR, 8), stride=(8, 1)))
        mI = cute.make_tensor(items, cute.make_layout(FAR))
        if warp_id < 4:
            cute.arch.setmaxregister_decrease(LOAD_REGISTERS)
            if warp_id == 0:
                atoms = (q_atom, k_atom, v_atom, do_atom)
                self.load(
                    (mQ, mK, mV, mdO),
                    atoms,
                    (sQ, sK, sV, sdO),
                    sStat,
                    rings,
                    statistics,
                    rows,
                    mT,
                    mG,
                    mI,
                    kv_heads,
                )
            if warp_id == 1:
                self.store(mdQ, dq_atom, sdQ, dq, dq_memory, rows, mT, mG, mI, kv_heads)
        else:
            cute.arch.setmaxregister_increase(COMPUTE_REGISTERS)
            strides = (dk_row, dk_head, dv_row, dv_head)
            self.compute(
                (mma_S, mma_dV, mma_dK, mma_dQ),
                sQ,
                sK,
                sV,
                sdO,
                sdS,
                dq_memory,
                sStat,
                rings,
                dk,
                dv,
                strides,
                mT,
                mG,
                mI,
                kv_heads,
                scale,
                softcap,
                whole_tiles,
            )

    @cute.jit
    def compute(
        self,
        mmas,
        sQ,
        sK,
        sV,
        sdO,
        sdS,
        dq_memory,
        sStat,
        rings,
        dk,
        dv,
        strides,
        mT,
        mG,
        mI,
        groups,
        scale,
        softcap,
        whole_tiles,
    ):
        """Compute one warp group's keys of every tile of this program.

        In one piece: accumulators and the positions in the rings live in registers across tiles, chunks of heads and
        blocks of queries, so an inner loop in a separate function would have to take and return them all. Only the work
        of one block is a function (``block``).
        """
        D, V, P = self.D, self.V, self.pack
        mma_S = mmas[0]
        kv_full, kv_free, q_full, _q_free, do_full, _do_free = rings
        dk_row, dk_head, dv_row, dv_head = strides
        chunks = self.share // P
        thread = cute.arch.thread_idx()[0] - 128
        wg = cute.arch.make_warp_uniform(thread // 128)
        thread = thread % 128
        lane = thread % 32
        s_thr, dv_thr, dk_thr, dq_thr = (mma.get_slice(0) for mma in mmas)
        half_sK = cute.local_tile(transposed(sK), (D // 2, HALF, 2), (wg, 0, 0))
        fragments = (
            s_thr.make_fragment_A(s_thr.partition_A(sK))[None, None, None, wg],
            s_thr.make_fragment_B(s_thr.partition_B(sQ)),
            s_thr.make_fragment_A(s_thr.partition_A(sV))[None, None, None, wg],
            s_thr.make_fragment_B(s_thr.partition_B(sdO)),
            dv_thr.make_fragment_B(dv_thr.partition_B(transposed(sdO))),
            dk_thr.make_fragment_B(dk_thr.partition_B(transposed(sQ))),
            dq_thr.make_fragment_A(dq_thr.partition_A(transposed(sdS))),
            dq_thr.make_fragment_B(dq_thr.partition_B(half_sK)),
        )
        acc_dV = cute.make_rmem_tensor(dv_thr.partition_shape_C((HALF, V)), Float32)
        acc_dK = cute.make_rmem_tensor(dk_thr.partition_shape_C((HALF, D)), Float32)
        acc_dQ = cute.make_rmem_tensor(dq_thr.partition_shape_C((M, D // 2)), Float32)
        s = cute.make_rmem_tensor(s_thr.partition_shape_C((HALF, M)), Float32)
        dp = cute.make_rmem_tensor(s_thr.partition_shape_C((HALF, M)), Float32)
        rP = cute.make_rmem_tensor(as_operand(s).shape, self.dtype)
        rdS = cute.make_rmem_tensor(as_operand(s).shape, self.dtype)
        cap = cute.make_rmem_tensor(s.shape, Float32) if const_expr(self.softcap) else None
        stat = cute.make_rmem_tensor((2, M // 8), Float32)
        save_atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(transpose=False, num_matrices=4), self.dtype)
        save = cute.make_tiled_copy_C(save_atom, mma_S).get_slice(thread)
        registers = (acc_dV, acc_dK, acc_dQ, s, dp, rP, rdS, cap, stat, save)
        row = (thread // 32) * 16 + lane // 4
        column0 = (lane % 4) * 2
        addresses = {"rows": tensor_addresses, "open": open_addresses, "alone": sums_addresses}
        dq_at = addresses[self.order](dq_memory, wg, row, lane, D // 2)
        buffers = (sdS, dq_at, sStat)
        factors = (softcap * LOG2E, scale / softcap) if const_expr(self.softcap) else (scale * LOG2E, scale)
        constants = (mmas, fragments, registers, buffers, rings, wg, row, column0, factors, scale, mG)
        stage, phase, kv_phase, copy = Int32(0), Int32(0), Int32(0), Int32(0)
        turn = cute.arch.block_idx()[0]
        item = mI[turn]
        while item >= 0:
            tile, group = item // groups, item % groups
            key0, key1, begin, blocks = mT[tile, 0], mT[tile, 1], mT[tile, 2], mT[tile, 3]
            acc_dK.fill(0.0)
            acc_dV.fill(0.0)
            cute.arch.mbarrier_wait(kv_full, kv_phase)
            kv_phase = kv_phase ^ 1
            if const_expr(self.zeroes) and key1 - key0 < KEYS:
                # Both groups read all keys: each zeroes its own half, then they synchronise.
                zero_from(sK[None, None, wg], key1 - key0 - wg * HALF, thread)
                cute.arch.barrier(barrier_id=DS_READY, number_of_threads=256)
            key = key0 + wg * HALF + row
            for _ in cutlass.range(chunks, unroll=1):
                segment, todo = begin, blocks
                while todo > 0:
                    query, edge, end = mG[segment, 0], mG[segment, 2], mG[segment, 5]
                    last, count = self.last_block(mG, segment)
                    # Only the last block, which is walked first, may reach past the end of the slice.
                    if const_expr(self.zeroes) and (end - last) * P < M:
                        cute.arch.mbarrier_wait(q_full + stage, phase)
                        cute.arch.mbarrier_wait(do_full + stage, phase)
                        zero_from(sQ[None, None, stage], (end - last) * P, thread)
                        zero_from(sdO[None, None, stage], (end - last) * P, thread)
                        cute.arch.barrier(barrier_id=OWN + wg, number_of_threads=128)
                    if edge != 0:
                        for i in cutlass.range(count, unroll=1):
                            at = last - i * (M // P)
                            stage, phase, copy = self.block(True, constants, stage, phase, copy, segment, at, key)
                    else:
                        for _i in cutlass.range(count, unroll=1):
                            stage, phase, copy = self.block(False, constants, stage, phase, copy, segment, query, key)
                    segment += 1
                    todo -= count
            arrive(kv_free)
            if whole_tiles != 0:
                write_rows(dk, acc_dK, key, key1, group, dk_row, dk_head, column0, scale, self.dtype)
                write_rows(dv, acc_dV, key, key1, group, dv_row, dv_head, column0, Float32(1.0), self.dtype)
            else:
                add_rows(dk, acc_dK, key, key1, group, dk_row, dk_head, column0, scale)
                add_rows(dv, acc_dV, key, key1, group, dv_row, dv_head, column0, Float32(1.0))
            turn += cute.arch.grid_dim()[0]
            item = mI[turn]

    @cute.jit
    def block(self, masked: cutlass.Constexpr[bool], constants, stage, phase, copy, segment, query, key):
        """Compute one block of queries: add its part to dk and dv, and hand its dq to ``store``."""
        mmas, fragments, registers, buffers, rings, wg, row, column0, factors, scale, mG = constants
        early = const_expr(not masked and not self.softcap)
        mma_S, mma_dV, mma_dK, mma_dQ = mmas
        rK, rQ, rV, rdO, rdOt, rQt, rdSt, rKt = fragments
        acc_dV, acc_dK, acc_dQ, s, dp, rP, rdS, cap, stat, save = registers
        sdS, dq_at, sStat = buffers
        _kv_full, _kv_free, q_full, q_free, do_full, do_free = rings
        scale_log2, inner = factors
        s_rows, dp_rows = by_rows(s), by_rows(dp)
        cute.arch.mbarrier_wait(q_full + stage, phase)
        product(mma_S, s, [(rK, rQ[None, None, None, stage])], True)
        cute.arch.mbarrier_wait(do_full + stage, phase)
        product(mma_S, dp, [(rV, rdO[None, None, None, stage])], True)
        self.statistics(sStat, 0, stage, column0, stat)
        warpgroup.wait_group(1)
        if const_expr(self.softcap):
            for i in cutlass.range_constexpr(cute.size(s)):
                cap[i] = bounded(s[i], inner)
                s[i] = cap[i]
        for r in cutlass.range_constexpr(2):
            for c in cutlass.range_constexpr(M // 4):
                logit = s_rows[r, c] * scale_log2 - stat[c % 2, c // 2]
                s_rows[r, c] = cute.math.exp2(logit, fastmath=True)
        round_to(as_operand(s), rP)
        if const_expr(masked):
            seen = self.seen(mG, segment, query, column0, key)
            self.keep(rP, seen)
        if const_expr(early):
            product(mma_dV, acc_dV, [(rP, rdOt[None, None, None, stage])], False)
        self.statistics(sStat, 1, stage, column0, stat)
        warpgroup.wait_group(1 if early else 0)
        for r in cutlass.range_constexpr(2):
            for c in cutlass.range_constexpr(M // 4):
                dp_rows[r, c] = s_rows[r, c] * (dp_rows[r, c] - stat[c % 2, c // 2])
        if const_expr(self.softcap):
            for i in cutlass.range_constexpr(cute.size(s)):
                dp[i] = dp[i] * (1.0 - cap[i] * cap[i])
        round_to(as_operand(dp), rdS)
        if const_expr(masked):
            self.keep(rdS, seen)
        mine = cute.make_tensor(rdS.iterator, cute.make_layout(s.shape))
        cute.copy(save, save.retile(mine), save.partition_D(sdS[None, None, 2 * copy + wg]))
        if const_expr(not early):
            product(mma_dV, acc_dV, [(rP, rdOt[None, None, None, stage])], False)
        cute.arch.fence_view_async_shared()
        cute.arch.barrier(barrier_id=DS_READY, number_of_threads=256)
        halves = [(rdSt[None, None, None, 2 * copy + h], rKt[None, None, None, h]) for h in range(2)]
        product(mma_dQ, acc_dQ, halves, True)
        warpgroup.wait_group(1)
        arrive(do_free + stage)
        product(mma_dK, acc_dK, [(rdS, rQt[None, None, None, stage])], False)
        warpgroup.wait_group(1)
        cute.arch.barrier(barrier_id=DQ_FREE + wg, number_of_threads=160)
        if const_expr(self.order == "open"):
            save_open(dq_at, acc_dQ, self.D // 2)
        elif const_expr(self.order == "alone"):
            save_sums(dq_at, acc_dQ, self.D // 2, (row if const_expr(self.pack % 2 == 0) else query + row) % 2)
        else:
            save_tensor(dq_at, acc_dQ, self.D // 2, scale)
        cute.arch.fence_view_async_shared()
        cute.arch.barrier_arrive(barrier_id=DQ_FULL + wg, number_of_threads=160)
        warpgroup.wait_group(0)
        arrive(q_free + stage)
        stage, phase = next_buffer(stage, phase, self.stages)
        return stage, phase, copy ^ 1

    @cute.jit
    def statistics(self, sStat, which: cutlass.Constexpr[int], stage, column0, stat):
        """Read the LSEs (``which`` 0) or deltas (1) of this thread's queries, two adjacent ones out of every eight."""
        for j in cutlass.range_constexpr(M // 8):
            pair = cute.local_tile(sStat[None, which, stage], (2,), (j * 4 + column0 // 2,))
            cute.autovec_copy(pair, stat[None, j])

    @cute.jit
    def seen(self, mG, segment, query, column0, key):
        """Return which queries of a block see this thread's two keys, as bits.

        There is one bit per query, counted from this thread's first query.
        """
        lo, hi, end, q0, q1 = mG[segment, 3], mG[segment, 4], mG[segment, 5], mG[segment, 6], mG[segment, 7]
        origin = query + (column0 // self.pack if const_expr(self.pack < 8) else 0)
        words = const_expr(2 if self.pack == 1 else 1)
        bits = cute.make_rmem_tensor((words, 2), Int32)
        for r in cutlass.range_constexpr(2):
            row = key + 8 * r  # in these transposed segments rows are keys and columns are queries
            first, last = row + lo - origin, cutlass.min(row + hi, end - 1) - origin
            if row < q0 or row >= q1:
                last = Int32(-1)
            for w in cutlass.range_constexpr(words):
                bits[w, r] = seen_bits(first - 32 * w, last - 32 * w)
        return bits

    @cute.jit
    def keep(self, operand, seen):
        """Zero the rounded numbers of hidden (key, query) pairs, two at a time, even if they are infinite or NaN."""
        P, pairs = self.pack, cute.recast_tensor(operand, Int32)
        for i in cutlass.range_constexpr(cute.size(pairs)):
            r, at = i % 2, i // 2 * 8 // P
            bits = seen[at // 32, r]
            if const_expr(P > 1):
                pairs[i] = kept(pairs[i], bits, at % 32)
            else:
                pairs[i] = pairs[i] & (kept(0xFFFF, bits, at % 32) | kept(-0x10000, bits, at % 32 + 1))

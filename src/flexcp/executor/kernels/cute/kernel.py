"""The CuTe kernel: head size 128 in bf16 or fp16 on sm90, in NVIDIA's CuTe DSL (``flexcp[cute]``).

It has the interface of :mod:`flexcp.executor.kernels`. A function is compiled once for a model (dtype, heads that share
a KV head, softcap), which takes some seconds, and kept on disk (:mod:`flexcp.executor.kernels.cute.kept`). It takes
addresses, sizes and strides as numbers, so no batch makes it compile again, and a launch costs the host about ten
microseconds. ``deterministic`` gradients are computed by the hopper kernel, because here dq is added to memory in any
order.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import numpy as np
import torch
import tvm_ffi  # noqa: F401  (compiled functions are called through it; without it this kernel cannot be imported)
from cutlass import Float32, Int32, Int64, Uint8, cute
from cutlass.cute.runtime import make_ptr
from torch import Tensor

from flexcp.executor.kernels import NO_ROWS, Ints, Settings, uploaded
from flexcp.executor.kernels.cute.backward import Backward
from flexcp.executor.kernels.cute.forward import Forward
from flexcp.executor.kernels.cute.items import (
    ADDED_KEY_PRICE,
    dealt,
    group_by_group,
    in_turns,
    longest_program,
    records,
    tiles_together,
)
from flexcp.executor.kernels.cute.kept import kept
from flexcp.executor.kernels.cute.levelled import levelled
from flexcp.executor.kernels.cute.parts import FAR
from flexcp.executor.kernels.cute.rows import SPARE, After, Before, Close, Open
from flexcp.executor.kernels.dq_states import ADDED, EMPTY
from flexcp.executor.kernels.hopper import kernel as hopper_kernel
from flexcp.executor.kernels.hopper.kernel import STAGES, HopperWork, Segments, programs_of
from flexcp.executor.kernels.hopper.tiles import (
    BEYOND_L2,
    BLOCK,
    QUERIES,
    TILE,
    key_tiles,
    longest_part,
    packed_heads,
    query_tiles,
)
from flexcp.executor.kernels.sinks_and_delta import OutputGradient
from flexcp.executor.kernels.tiles import SegmentList, segment_list, useful
from flexcp.executor.kernels.triton.arguments import ALIGNMENT, aligned
from flexcp.executor.kernels.triton.work import check, multiprocessors
from flexcp.masks import Q0, Q1

FRESH = True
FINISHES = True
HEAD_SIZE = 128
TYPES = {torch.bfloat16: cutlass.BFloat16, torch.float16: cutlass.Float16, torch.float32: cutlass.Float32}
LISTS_IN_STEP = 96 << 20
"""From how many bytes of dq on programs add to it in step (:attr:`CuteWork.in_step`), if other lists may add to it too.

On an H200 this took up to 12 % less time with 96 to 128 MiB of dq and long documents. A launch to whose dq nothing else
adds took 0 to 14 % more time in step.
"""
LONGEST_PART = 1024
"""The most blocks of a part of a tile of keys, if programs add to dq in step."""
PARTS_IN_STEP = (6, 9, 12)
"""About how many parts of tiles a multiprocessor gets if programs add to dq in step: whichever balances best."""
PARTS, SHORTEST_PART = 2, 64
"""For tiles of keys that are levelled afterwards: about how many parts a multiprocessor gets, and the fewest blocks.

``SHORTEST_PART`` is the fewest blocks of a part. Levelling is described in
:mod:`flexcp.executor.kernels.cute.levelled`.
"""


def useful_share(slices: Ints, share: int, backward: bool) -> float:
    """Return the fraction of the (query, key) pairs in computed blocks that attend.

    It is an upper bound of the kernel's efficiency. ``share`` is the number of query heads per KV head.
    """
    pack = packed_heads(share)
    if backward:
        return useful(slices, key_tiles(slices, share), QUERIES // pack * BLOCK)
    return useful(slices, query_tiles(slices, share, compact=True), TILE // pack * BLOCK)


def supports(device: torch.device, dtype: torch.dtype, head_dim: int, v_head_dim: int) -> str | None:
    """Return why this kernel cannot run tensors like these, naming what it can run; None if it can."""
    reason = hopper_kernel.supports(device, dtype, head_dim, v_head_dim)
    if reason is None and (head_dim, v_head_dim) != (HEAD_SIZE, HEAD_SIZE):
        reason = f"the cute kernel has head size {HEAD_SIZE}; got {head_dim} and {v_head_dim}"
    return reason


class CuteWork(HopperWork):
    """A work list whose items (a tile with a group of heads) are dealt to GPU programs.

    Tiles of keys are walked from their last queries to their first, because under a causal mask all of them end with
    the same queries. ``begins`` and ``finishes`` are ranges of rows (``[n, 2]``, ascending) to which no earlier list,
    and no later list, adds.
    """

    def __init__(self, *arguments: Any, begins: Ints, finishes: Ints) -> None:
        super().__init__(*arguments)
        self.begins, self.finishes = begins, finishes

    @cached_property
    def forward_segments(self) -> Segments:
        """Tiles of packed query rows; the list begins all rows of a tile or none of them, and finishes all or none."""
        borders = np.unique(np.concatenate([self.begins, self.finishes]))
        return Segments.of(query_tiles(self.slices, self.share, borders, compact=True), BLOCK, self.device)

    def split_tiles(self, programs: int, in_step: bool) -> Segments:
        """Return tiles of keys with blocks of packed query rows, long ones split, for at most ``programs`` programs.

        If programs add to dq in step, the number of parts is the one that leaves the busiest program the least work.
        """
        key = (programs, in_step)
        if key not in self._split_tiles:
            made, block = self._key_tiles, QUERIES // self.pack
            sizes = (self.kv_heads, self.share, multiprocessors(self.device))
            longest = longest_part(made, *sizes)
            if in_step:
                longest = min(
                    (min(longest_part(made, *sizes, parts), LONGEST_PART) for parts in PARTS_IN_STEP),
                    key=lambda most: self._busiest(segment_list(made, block, most, descending=True), programs, True),
                )
            self._split_tiles[key] = Segments.of(made, block, self.device, longest, descending=True)
        return self._split_tiles[key]

    @cached_property
    def _split_tiles(self) -> dict[tuple[int, bool], Segments]:
        return {}

    def _busiest(self, made: SegmentList, programs: int, in_step: bool) -> int:
        """Return the work of the busiest of ``programs`` programs in a backward over these tiles, in blocks."""
        blocks = made.tiles[:, 3].astype(np.int64)
        items = dealt(self._backward_order(made, in_step), blocks, self.kv_heads, programs)
        return longest_program(items, blocks, self.kv_heads)

    @cached_property
    def whole_segments(self) -> Segments:
        """Tiles of keys with blocks of packed query rows, none of them split."""
        return Segments.of(self._key_tiles, QUERIES // self.pack, self.device, descending=True)

    def own_segments(self, programs: int) -> tuple[Segments, bool]:
        """Return tiles of keys for a backward to whose results nothing else adds, and whether they are whole.

        Parts of a tile must be added up in float32 and rounded afterwards. So tiles stay whole unless splitting saves
        the busiest program more than that costs, or a long tile would keep programs from adding to dq in step.
        """
        if programs not in self._own:
            made, parts = self.whole_segments, self.split_tiles(programs, self.in_step)
            busiest, busiest_of_parts = (self._busiest(x.made, programs, self.in_step) for x in (made, parts))
            whole = busiest <= busiest_of_parts + ADDED_KEY_PRICE * self._key_tiles.rows * self.kv_heads
            whole = whole and not (self.in_step and made.blocks.max(initial=0) > LONGEST_PART)
            self._own[programs] = (made, True) if whole else (parts, False)
        return self._own[programs]

    @cached_property
    def _own(self) -> dict[int, tuple[Segments, bool]]:
        return {}

    @cached_property
    def fitting(self) -> set[tuple[Any, ...]]:
        """Layouts of tensors that are known to need no copy."""
        return set()

    @cached_property
    def covered_keys(self) -> int:
        """The number of keys that at least one query sees."""
        return self._key_tiles.rows

    @cached_property
    def in_step(self) -> bool:
        """Whether dq is too large for the L2 cache, if nothing else adds to it.

        If so, programs should add to the same part of dq at the same time (*in step*).
        """
        return self._dq_bytes > BEYOND_L2

    @cached_property
    def _dq_bytes(self) -> int:
        """The bytes from the first to the last row of dq that the slices touch, in float32."""
        rows = int(self.slices[:, Q1].max(initial=0)) - int(self.slices[:, Q0].min(initial=0))
        return rows * self.heads * self.head_dim * 4

    @cached_property
    def lists_in_step(self) -> bool:
        """Whether programs add to dq in step, if other lists may add to it too.

        Up to ``BEYOND_L2``, tiles of short documents are dealt together instead and levelled: in step, the busiest
        program of such a list would have up to 10 % more work.
        """
        if self.in_step or self._dq_bytes < LISTS_IN_STEP:
            return self.in_step
        order = self._tiles_together(self._tiles_to_level)
        return np.array_equal(order, np.arange(len(order)))

    def backward_tables(self, programs: int) -> tuple[int, list[Tensor]]:
        """Return the launch of a backward that adds to its results: (number of programs, [tiles, segments, items]).

        It has at most ``programs`` programs. The tables are on the device, and are made once for each number of
        programs, because launches must not make the host wait. Tiles are cut so that all programs end at about the same
        time, unless programs add to dq in step.
        """
        if programs not in self._backward_tables:
            if self.lists_in_step:
                made = self.split_tiles(programs, True)
                used = min(programs, made.count * self.kv_heads)
                tables = [made.tiles, made.segments, self.items(made, used, True)]
            else:
                used, tables = self._levelled_backward(programs)
            self._backward_tables[programs] = used, tables
        return self._backward_tables[programs]

    def _levelled_backward(self, programs: int) -> tuple[int, list[Tensor]]:
        """Return the launch of a backward whose tiles are cut so that all programs end at about the same time.

        It is (number of programs, [tiles, segments, items]).
        """
        made = self._tiles_to_level
        blocks = made.tiles[:, 3].astype(np.int64)
        order = self._backward_order(made, False)
        items = dealt(order, blocks, self.kv_heads, min(programs, len(order)))
        level = levelled(made, items, self.kv_heads, programs, QUERIES // self.pack, descending=True)
        tables = (level.made.tiles, level.made.segments, level.items)
        return level.items.shape[1], [uploaded(x.reshape(-1), self.device) for x in tables]

    @cached_property
    def _tiles_to_level(self) -> SegmentList:
        """Tiles of keys with blocks of packed query rows, split into about ``PARTS`` parts a multiprocessor."""
        units = multiprocessors(self.device)
        longest = longest_part(self._key_tiles, self.kv_heads, self.share, units, PARTS, SHORTEST_PART)
        return segment_list(self._key_tiles, QUERIES // self.pack, longest, descending=True)

    @cached_property
    def _backward_tables(self) -> dict[int, tuple[int, list[Tensor]]]:
        return {}

    def items(self, made: Segments, programs: int, in_step: bool) -> Tensor:
        """Return the table of the items that each of ``programs`` programs computes in a backward, on the device.

        It is made once for each number of programs, because launches must not make the host wait.
        """
        key = (id(made), programs, in_step)
        if key not in self._items:
            table = dealt(self._backward_order(made.made, in_step), made.blocks, self.kv_heads, programs)
            self._items[key] = uploaded(table.reshape(-1), self.device)
        return self._items[key]

    @cached_property
    def _items(self) -> dict[tuple[int, int, bool], Tensor]:
        return {}

    def forward_tables(self, programs: int, fresh: bool) -> tuple[int, list[Tensor]]:
        """Return the launch of a forward: (number of programs, [records, segments, counters]).

        It has at most ``programs`` programs. The tables are on the device, and are made once for each number of
        programs, because launches must not make the host wait. Tiles are cut for balance only if results are added to;
        with ``fresh`` they are written, so parts could not be added.
        """
        key = (programs, fresh)
        if key not in self._forward_tables:
            made, groups = self.forward_segments, self.heads // self.pack
            used = min(programs, made.count * groups)
            items = dealt(in_turns(made.count, groups, self.in_turn(used)), made.blocks, groups, used)
            level = None if fresh else levelled(made.made, items, groups, programs, BLOCK)
            if level is None or not level.counters:
                segments, counters = made.segments, made.segments
                table = records(items, made.made, groups, None, self.begins, self.finishes)
            else:
                table = records(level.items, level.made, groups, level.parts, self.begins, self.finishes)
                segments = uploaded(level.made.segments.reshape(-1), self.device)
                counters = torch.zeros(level.counters, dtype=torch.int32, device=self.device)
            there = [uploaded(table.reshape(-1), self.device), segments, counters]
            self._forward_tables[key] = table.shape[1], there
        return self._forward_tables[key]

    @cached_property
    def _forward_tables(self) -> dict[tuple[int, bool], tuple[int, list[Tensor]]]:
        return {}

    def _backward_order(self, made: SegmentList, in_step: bool) -> Ints:
        """Return the items of a backward in the order in which they are dealt."""
        if not in_step:
            order = self._tiles_together(made)
            return (order[:, None] * self.kv_heads + np.arange(self.kv_heads)).reshape(-1)
        first = made.segments[made.tiles[:, 2]]
        begin = first[:, 0] + first[:, 1] * (QUERIES // self.pack)
        return group_by_group(np.lexsort((made.tiles[:, 0], -begin)), self.kv_heads)

    def _tiles_together(self, made: SegmentList) -> Ints:
        """Return the order in which tiles are dealt if programs do not add to dq in step."""
        return tiles_together(made, QUERIES // self.pack, max(1, multiprocessors(self.device) // self.kv_heads))


def prepare(
    slices: Ints,
    heads: int,
    kv_heads: int,
    head_dim: int,
    v_head_dim: int,
    device: torch.device,
    begins: Ints = NO_ROWS,
    finishes: Ints = NO_ROWS,
) -> CuteWork:
    """Make the work list of ``slices``, for every layer and for forward and backward.

    Raises NotImplementedError if the kernel does not support the device or head sizes.
    """
    reason = supports(device, torch.bfloat16, head_dim, v_head_dim)
    if reason:
        raise NotImplementedError(reason)
    return CuteWork(slices, heads, kv_heads, head_dim, v_head_dim, device, begins=begins, finishes=finishes)


def forward(
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGV: Tensor,
    work: CuteWork,
    settings: Settings,
    out_THV: Tensor,
    lse_TH: Tensor,
    finished_THV: Tensor | None = None,
) -> None:
    """Add the slices' attention to ``out`` and ``lse``; with ``settings.fresh`` overwrite them.

    Rows that the list finishes (no later list adds to them) are written to ``finished`` instead of ``out``, if it is
    given.
    """
    made = work.forward_segments
    if not made.count:
        return
    finishes = finished_THV is not None and len(work.begins) + len(work.finishes) > 0
    rounded = finished_THV if finished_THV is not None and finishes else q_THD
    q, k, v = _fitting(work, (q_THD, k_TGD, v_TGV), (out_THV, lse_TH, rounded))
    programs, tables = work.forward_tables(programs_of(FAR, settings, work), settings.fresh)
    model = (q.dtype, out_THV.dtype, work.share, work.pack, settings.softcap is not None)
    zeroes = not (settings.fresh and work.covered_keys == len(k))
    compiled_forward(*model, settings.fresh, finishes, zeroes)(
        *_addresses(q, k, v, out_THV, lse_TH, rounded, *tables),
        len(q),
        len(k),
        work.heads,
        work.kv_heads,
        *_strides(q, k, v, out_THV, lse_TH, rounded),
        *_numbers(settings),
        programs,
        _stream(q.device),
    )


def backward(
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGV: Tensor,
    do_THV: Tensor,
    lse_TH: Tensor,
    delta_TH: Tensor,
    work: CuteWork,
    settings: Settings,
    dq_THD: Tensor,
    dk_TGD: Tensor,
    dv_TGV: Tensor,
    opened: OpenRows | None = None,
    first_head: int = 0,
) -> None:
    """Add the slices' gradients to ``dq``, ``dk`` and ``dv``.

    With ``settings.fresh`` dq is overwritten. With ``settings.open_dq`` it is left open, for :func:`close_dq` to
    finish. ``opened`` is the result of :func:`open_dq` for a dq of which this one is all rows and the heads from
    ``first_head`` on.
    """
    if not work.forward_segments.count:
        return
    if settings.deterministic:
        inputs = (q_THD, k_TGD, v_TGV, do_THV, lse_TH, delta_TH, work, settings)
        hopper_kernel.backward(*inputs, dq_THD, dk_TGD, dv_TGV)
        return
    q, k, v, do = _fitting(work, (q_THD, k_TGD, v_TGV, do_THV), (lse_TH, delta_TH, dq_THD, dk_TGD, dv_TGV))
    programs, tables = work.backward_tables(programs_of(FAR, settings, work))
    order = "open" if settings.open_dq or settings.fresh else "rows"
    run = compiled_backward(q.dtype, work.share, work.pack, settings.softcap is not None, order, True)
    sums = torch.empty(dq_THD.shape, dtype=torch.float32, device=q.device) if settings.fresh else dq_THD
    if opened is None or opened.pack != work.pack or first_head % work.pack:
        opened, first_head = _opened(sums, lse_TH, delta_TH, work.pack, settings.fresh), 0
    statistics = opened.statistics[first_head * 2 * len(q) :]
    run(
        *_addresses(q, k, v, do, statistics, sums, dk_TGD, dv_TGV, *tables),
        len(q),
        len(k),
        work.heads,
        work.kv_heads,
        *_strides(q, k, v, do, sums, dk_TGD, dv_TGV),
        *_numbers(settings),
        0,
        programs,
        _stream(q.device),
    )
    if settings.fresh:
        _close(sums, dq_THD, settings)


@dataclass(frozen=True)
class OpenRows:
    """What the work lists of an open dq share.

    ``statistics`` are the LSEs and deltas of its rows in all heads, in the order of
    :mod:`flexcp.executor.kernels.cute.rows` for ``pack`` query heads in a block.
    """

    statistics: Tensor
    pack: int


def open_dq(
    dq_THD: Tensor, lse_TH: Tensor, delta_TH: Tensor, work: CuteWork, states_TH: Tensor | None = None
) -> OpenRows:
    """Set a dq to 0 and return what the lists that leave it open share; ``work`` is one of them.

    With ``states`` (:mod:`flexcp.executor.kernels.dq_states`) only what lists add to is set to 0.
    """
    if not work.heads or dq_THD.shape[1] % work.pack:
        raise ValueError(f"the heads of dq must be a multiple of {work.pack}; got {dq_THD.shape[1]}")
    return _opened(dq_THD, lse_TH, delta_TH, work.pack, True, states_TH)


def _opened(
    dq_THD: Tensor, lse_TH: Tensor, delta_TH: Tensor, pack: int, clears: bool, states_TH: Tensor | None = None
) -> OpenRows:
    """Pack the statistics of all rows of dq; with ``clears``, set dq, or what lists add to of it, to 0."""
    rows, heads = lse_TH.shape
    statistics = torch.empty(2 * rows * heads + SPARE, dtype=torch.float32, device=lse_TH.device)
    if rows * heads:
        run = compiled_open(pack, clears)
        tensors = (dq_THD, lse_TH, delta_TH)
        where = _addresses(*tensors, statistics, lse_TH if states_TH is None else states_TH)
        some = int(states_TH is not None)
        run(*where, rows, heads, some, *_strides(*tensors), _stream(lse_TH.device))
    return OpenRows(statistics, pack)


def close_dq(
    dq_THD: Tensor, settings: Settings, states_TH: Tensor | None = None, finished_THD: Tensor | None = None
) -> None:
    """Turn an open dq into the gradient, in place, or write the gradient to ``finished`` in that tensor's dtype.

    With ``states`` (:mod:`flexcp.executor.kernels.dq_states`) what lists do not add to is not read; nor is it written,
    except that results that nothing adds to are set to 0 in ``finished``.
    """
    _close(dq_THD, dq_THD if finished_THD is None else finished_THD, settings, states_TH)


def _close(open_THD: Tensor, dq_THD: Tensor, settings: Settings, states_TH: Tensor | None = None) -> None:
    """Write the gradient of an open dq to ``dq_THD``, which may be the same tensor."""
    rows, heads = dq_THD.shape[:2]
    if rows * heads:
        close = compiled_close(dq_THD.dtype)
        zeroes = ADDED if open_THD is dq_THD else EMPTY
        numbers = (rows, heads, 0 if states_TH is None else zeroes, *_strides(open_THD, dq_THD), settings.scale)
        where = _addresses(open_THD, dq_THD, dq_THD if states_TH is None else states_TH)
        close(*where, *numbers, _stream(dq_THD.device))


def backward_alone(
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGV: Tensor,
    lse_TH: Tensor,
    back: OutputGradient,
    work: CuteWork,
    settings: Settings,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk and dv in the model's dtype, by three launches; the slices must touch every query row."""
    assert back.out is not None
    q, k, v, do, out = _fitting(work, (q_THD, k_TGD, v_TGV, back.do, back.out), (lse_TH,))
    rows, heads, pack, stream = len(q), work.heads, work.pack, _stream(q.device)
    programs = programs_of(work.whole_segments.count * work.kv_heads, settings, work)
    made, whole = work.own_segments(programs)
    programs = programs_of(made.count * work.kv_heads, settings, work)
    statistics, sums = (
        torch.empty(size, dtype=torch.float32, device=q.device)
        for size in (2 * rows * heads + SPARE, heads // pack * (rows * pack + SPARE) * HEAD_SIZE)
    )
    dlse = lse_TH if back.dlse is None else back.dlse
    before = compiled_before(q.dtype, pack, back.dlse is not None)
    before(*_addresses(do, out, lse_TH, dlse, statistics, sums), rows, heads, *_strides(do, out, lse_TH, dlse), stream)
    dq = torch.empty_like(q, memory_format=torch.contiguous_format)
    empty = torch.empty if whole and work.covered_keys == len(k) else torch.zeros
    dk, dv = (empty(x.shape, dtype=x.dtype if whole else torch.float32, device=x.device) for x in (k, v))
    zeroes = work.covered_keys < len(k)
    run = compiled_backward(q.dtype, work.share, pack, settings.softcap is not None, "alone", zeroes)
    tables = (made.tiles, made.segments, work.items(made, programs, work.in_step))
    run(
        *_addresses(q, k, v, do, statistics, sums, dk, dv, *tables),
        rows,
        len(k),
        heads,
        work.kv_heads,
        *_strides(q, k, v, do, dq, dk, dv),
        *_numbers(settings),
        int(whole),
        programs,
        stream,
    )
    compiled_after(q.dtype, pack)(*_addresses(sums, dq), rows, heads, *_strides(dq), settings.scale, stream)
    return dq, dk.to(k.dtype), dv.to(v.dtype)


@cache
def compiled_before(dtype: torch.dtype, pack: int, has_dlse: bool) -> Any:
    """Return the compiled :class:`Before`, which runs before a backward whose launch alone adds to dq."""
    kind = TYPES[dtype]
    pointers = [_pointer(kind)] * 2 + [_pointer(Float32, 4)] * 3 + [_pointer(Float32)]
    numbers = [Int32(1)] * 2 + [Int64(8)] * 8
    return _compiled(Before(kind, pack, has_dlse), pointers, numbers, "before", dtype, pack, has_dlse)


@cache
def compiled_after(dtype: torch.dtype, pack: int) -> Any:
    """Return the compiled :class:`After`, which runs after a backward whose launch alone adds to dq."""
    pointers = [_pointer(Float32), _pointer(TYPES[dtype])]
    numbers = [Int32(1)] * 2 + [Int64(8)] * 2 + [Float32(1.0)]
    return _compiled(After(TYPES[dtype], pack), pointers, numbers, "after", dtype, pack)


@cache
def compiled_open(pack: int, clears: bool) -> Any:
    """Return the compiled :class:`Open`, which packs the statistics of rows; with ``clears`` it sets their dq to 0."""
    pointers = [_pointer(Float32)] + [_pointer(Float32, 4)] * 3 + [_pointer(Uint8, 1)]
    numbers = [Int32(1)] * 3 + [Int64(8)] * 6
    return _compiled(Open(pack, clears), pointers, numbers, "open", pack, clears)


@cache
def compiled_close(dtype: torch.dtype) -> Any:
    """Return the compiled :class:`Close`, which closes an open dq and writes it in this dtype."""
    pointers = [_pointer(Float32), _pointer(TYPES[dtype]), _pointer(Uint8, 1)]
    numbers = [Int32(1)] * 3 + [Int64(8)] * 4 + [Float32(1.0)]
    return _compiled(Close(TYPES[dtype]), pointers, numbers, "close", dtype)


@cache
def compiled_forward(
    dtype: torch.dtype,
    out_dtype: torch.dtype,
    share: int,
    pack: int,
    softcap: bool,
    fresh: bool,
    finishes: bool,
    zeroes: bool,
) -> Any:
    """Return the compiled forward kernel of a model; the arguments mean what they do in :class:`Forward`."""
    kind, out = TYPES[dtype], TYPES[out_dtype]
    key = (dtype, out_dtype, share, pack, softcap, fresh, finishes, zeroes)
    kernel = Forward(kind, out, share, pack, HEAD_SIZE, HEAD_SIZE, BLOCK, STAGES, softcap, fresh, finishes, zeroes)
    pointers = [_pointer(kind)] * 3 + [_pointer(out), _pointer(Float32, 4), _pointer(kind)] + [_pointer(Int32)] * 3
    numbers = [Int32(1)] * 4 + [Int64(8)] * 12 + [Float32(1.0), Float32(1.0), Int32(1)]
    return _compiled(kernel, pointers, numbers, "forward", *key)


@cache
def compiled_backward(dtype: torch.dtype, share: int, pack: int, softcap: bool, order: str, zeroes: bool) -> Any:
    """Return the compiled backward kernel of a model; the arguments mean what they do in :class:`Backward`."""
    kind = TYPES[dtype]
    kernel = Backward(kind, share, pack, HEAD_SIZE, HEAD_SIZE, STAGES, softcap, order, zeroes)
    pointers = [_pointer(kind)] * 4 + [_pointer(Float32, 4)] + [_pointer(Float32)] * 3 + [_pointer(Int32)] * 3
    numbers = [Int32(1)] * 4 + [Int64(8)] * 14 + [Float32(1.0), Float32(1.0), Int32(1), Int32(1)]
    return _compiled(kernel, pointers, numbers, "backward", dtype, share, pack, softcap, order, zeroes)


def _compiled(kernel: Any, pointers: list[Any], numbers: list[Any], *key: Any) -> Any:
    """Compile a kernel for such arguments, or load it from disk.

    ``key`` holds what tells it from other kernels of this package.
    """
    arguments = (*pointers, *numbers, cuda.CUstream(0))
    name = "-".join(str(x).removeprefix("torch.") for x in key)
    return kept(name, lambda: cute.compile(kernel, *arguments, options="--enable-tvm-ffi"))


def _fitting(work: CuteWork, inputs: tuple[Tensor, ...], others: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return the inputs, copied if the copy engine cannot load them as they are.

    Raises ValueError or NotImplementedError for tensors that this work list cannot run. Layouts that need no copy are
    remembered with the list, because another check would take the host longer than the launch.
    """
    layout = tuple((x.device, x.dtype, x.shape[1:], x.stride(), x.data_ptr() % ALIGNMENT) for x in (*inputs, *others))
    if layout in work.fitting:
        return inputs
    fitting = tuple(aligned(x) for x in inputs)
    check(work, supports, *fitting, *others)
    if all(map(operator.is_, fitting, inputs)):
        work.fitting.add(layout)
    return fitting


def _pointer(kind: Any, alignment: int = 16) -> Any:
    return make_ptr(kind, 0, cute.AddressSpace.gmem, assumed_align=alignment)


def _addresses(*tensors: Tensor) -> list[int]:
    return [x.data_ptr() for x in tensors]


def _strides(*tensors: Tensor) -> list[int]:
    """Return the strides of rows and heads of each tensor, in elements."""
    return [stride for x in tensors for stride in x.stride()[:2]]


def _numbers(settings: Settings) -> tuple[float, float]:
    """Return scale and softcap (0 for none); raise ValueError for a scale that is not above 0."""
    if not settings.scale > 0:
        raise ValueError(f"the scale of logits must be above 0; got {settings.scale}")
    return settings.scale, settings.softcap or 0.0


def _stream(device: torch.device) -> int:
    # The same as torch.cuda.current_stream, without making an object.
    return int(torch._C._cuda_getCurrentRawStream(device.index))

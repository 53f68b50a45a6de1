"""The work list of the CuTe kernel: tiles with groups of heads, dealt to GPU programs and kept on the device.

A launch starts one program for each multiprocessor it may use, and each program walks the items that were dealt to it
(:mod:`flexcp.executor.kernels.cute.items`). A forward computes tiles of packed query rows. A backward computes tiles of
keys, and adds dq to memory as it goes: in step if dq is larger than the L2 cache, and otherwise with tiles cut until
all programs end at about the same time (:mod:`flexcp.executor.kernels.cute.levelled`). A table is made when a launch
first asks for it, and kept for all layers of a step.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flexcp.executor.kernels import Ints, uploaded
from flexcp.executor.kernels.cute.items import (
    ADDED_KEY_PRICE,
    dealt,
    group_by_group,
    in_turns,
    longest_program,
    records,
    tiles_together,
)
from flexcp.executor.kernels.cute.levelled import levelled
from flexcp.executor.kernels.hopper.kernel import HopperWork, Segments
from flexcp.executor.kernels.hopper.tiles import BEYOND_L2, BLOCK, QUERIES, longest_part, query_tiles
from flexcp.executor.kernels.tiles import SegmentList, segment_list
from flexcp.executor.kernels.triton.work import multiprocessors
from flexcp.masks import Q0, Q1

LISTS_IN_STEP = 96 << 20
"""From how many bytes of dq on programs add to it in step (:attr:`CuteWork.in_step`), if other lists may add to it too.

On an H200 this took up to 12 % less time with 96 to 128 MiB of dq and long documents. A launch to whose dq nothing else
adds took up to 16 % more time in step.
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

"""Row packing: a :class:`flexcp.executor.run.packing.Packing` for GPUs, which needs only a few launches per stage.

:mod:`flexcp.executor.run.row_moves` makes the tables that say which rows each launch moves; they are uploaded once per
program.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flexcp.executor.exchange.arena import Buffers
from flexcp.executor.kernels import row_kernels, uploaded
from flexcp.executor.run.message_layout import Shelves, Types
from flexcp.executor.run.rank_program import RankProgram
from flexcp.executor.run.row_moves import PAIRS, Launch, RowMoves, row_moves
from flexcp.executor.run.row_runs import Place
from flexcp.shape import Shape

assert PAIRS <= row_kernels.PAIRS, "row_moves.py, which loads no Triton, has a number of its own"


@dataclass(frozen=True)
class _OnDevice:
    """A launch that moves rows, and its table on the device."""

    made: Launch
    table: Tensor


class RowPacking:
    """Packing on a GPU: each launch moves all rows that a table lists, between shelves and messages."""

    def __init__(self, program: RankProgram, shape: Shape, types: Types, moves: RowMoves | None = None) -> None:
        found = moves or row_moves(program, shape)
        self._packs, self._unpacks, self._moves, self._rounds, self._copies_of_laid = (
            [[_OnDevice(made, uploaded(made.table, types.device)) for made in each] for each in lists]
            for lists in (found.packs, found.unpacks, found.moves, found.rounds, found.copies_of_laid)
        )

    def pack(self, stage: int, buffers: Buffers, shelves: Shelves) -> None:
        for launch in self._packs[stage]:
            _run(launch, buffers.memory, shelves)

    def unpack(self, stage: int, buffers: Buffers, shelves: Shelves) -> None:
        for launch in self._unpacks[stage]:
            _run(launch, buffers.memory, shelves)

    def move(self, stage: int, shelves: Shelves) -> None:
        for launch in self._moves[stage]:
            _run(launch, None, shelves)

    def round_sums(self, side: int, shelves: Shelves) -> None:
        for launch in self._rounds[side]:
            _run(launch, None, shelves)

    def copy_laid_to_sums(self, side: int, shelves: Shelves) -> None:
        for launch in self._copies_of_laid[side]:
            _run(launch, None, shelves)


def _run(launch: _OnDevice, memory: Tensor | None, shelves: Shelves) -> None:
    """Run one launch between shelves and ``memory``, the bytes of the stage's messages."""
    move = launch.made.pairs[0]
    pairs = [(_tensor(m.source, memory, shelves), _tensor(m.target, memory, shelves)) for m in launch.made.pairs]
    if move.what == "merge":
        source, target, source_lse, target_lse = (
            _tensor(place, memory, shelves).view(_dtype(place)) for place in move.merged
        )
        row_kernels.merge_rows(
            source, target, source_lse, target_lse, launch.table, launch.made.longest, move.length // move.heads
        )
    elif launch.made.word:
        row_kernels.copy_rows(pairs, launch.table, launch.made.word, launch.made.longest)
    else:
        act = row_kernels.add_rows if move.what == "add" else row_kernels.convert_rows
        act(pairs, launch.table, _dtype(move.source), _dtype(move.target), launch.made.longest)


def _tensor(place: Place, memory: Tensor | None, shelves: Shelves) -> Tensor:
    """Return the tensor of a place: a field of a shelf, or ``memory``, the bytes of the stage's messages."""
    if place.shelf is not None:
        return shelves[place.shelf][place.name]
    assert memory is not None
    return memory


def _dtype(place: Place) -> torch.dtype:
    found: torch.dtype = getattr(torch, place.dtype)
    return found

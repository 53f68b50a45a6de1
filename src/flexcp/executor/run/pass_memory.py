"""Pass memory: what a pass finds in the arena, namely messages and the shelves of what arrives, as views.

A view costs the host a few microseconds, and a pass needs hundreds: each message, each part of it that is sent in one
call, and each field of a shelf. They follow from the program and the address of its memory, so they are made when they
are first used, and the arena keeps them for later passes (:meth:`flexcp.executor.exchange.arena.Arena.kept`).

Nothing here knows what the bytes hold: whoever uses a shelf in a pass clears its results first.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from flexcp.executor.exchange.arena import Buffers
from flexcp.executor.kernels import lasting
from flexcp.executor.run.message_layout import Types, cleared_parts, laid_out
from flexcp.executor.run.rank_program import RankProgram
from flexcp.shape import Shape

Sizes = list[list[tuple[int, int]]]
"""(Peer, bytes) of each message, for each stage."""


class ArrivingShelf(NamedTuple):
    """The tensors of a shelf, by field; ``cleared`` has (field, bytes or rows, value to fill them with first)."""

    inputs: dict[str, Tensor]
    results: dict[str, Tensor]
    cleared: list[tuple[str, Tensor, float]]


class PassMemory:
    """Views of ``memory``, the bytes in which a program works; ``sends`` and ``receives`` are the sizes of messages."""

    def __init__(
        self,
        program: RankProgram,
        sends: Sizes,
        receives: Sizes,
        shape: Shape,
        types: Types,
        backward: bool,
        memory: Tensor,
    ) -> None:
        self._program, self._memory = program, memory
        self._sizes = {"sends": sends, "receives": receives}
        self._how = (backward, shape, types)
        self._buffers: dict[tuple[str, int], Buffers] = {}
        self._shelves: dict[int, ArrivingShelf] = {}

    def messages(self, side: str, stage: int) -> Buffers:
        """Return the messages of a stage that leave (``side`` is "sends") or arrive ("receives")."""
        found = self._buffers.get((side, stage))
        if found is None:
            with lasting():
                found = Buffers(self._sizes[side][stage], self._at(side, stage))
            self._buffers[side, stage] = found
        return found

    def shelf(self, number: int) -> ArrivingShelf:
        """Return the tensors of a shelf of what arrives, uninitialised."""
        found = self._shelves.get(number)
        if found is None:
            with lasting():
                found = self._shelf(number)
            self._shelves[number] = found
        return found

    def _shelf(self, number: int) -> ArrivingShelf:
        backward, shape, types = self._how
        shelf = self._program.shelves[number]
        inputs = {}
        if number not in self._program.kept:
            inputs = laid_out(shelf, backward, False, shape, types, self._at("inputs", *shelf.key))
        memory = self._at("results", *shelf.key)
        results = laid_out(shelf, backward, True, shape, types, memory)
        return ArrivingShelf(inputs, results, cleared_parts(results, shelf, backward, shape, memory))

    def _at(self, *tenant: str | int) -> Tensor:
        """Return the memory from a buffer's first byte on; empty if the layout does not have that buffer.

        ``tenant`` is the buffer's name in :class:`flexcp.plan.memory.Layout`, such as ``("sends", 2)``.
        """
        return self._memory[self._program.layout.offsets.get(tenant, self._memory.numel()) :]

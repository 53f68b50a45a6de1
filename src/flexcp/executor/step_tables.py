"""Step tables: what a step derives from its plan for one rank, as integers and as tensors on devices.

These are the rank's rows (their tokens, positions and order) and, for each pass, its program with work lists and index
maps. All of it is made on first use, unless a recipe brings the integers, and is kept as long as the step. Tensors on a
device may be used by several CUDA streams (:mod:`flexcp.executor.run.device_tables`).
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from flexcp.executor.exchange.arena import Arena
from flexcp.executor.kernels import lasting, uploaded
from flexcp.executor.run.device_tables import TableStreams, tables_in
from flexcp.executor.run.message_layout import Types
from flexcp.executor.run.pass_recipe import PassRecipe, pass_recipe
from flexcp.executor.run.prepared import Prepared, WorkLists, prepare
from flexcp.executor.run.rank_program import rank_program
from flexcp.executor.run.rank_recipe import RankRecipe
from flexcp.executor.run.rank_rows import RankRows, local_stream, rank_rows, row_positions
from flexcp.plan.plan import Plan

CPU = torch.device("cpu")


class StepTables:
    """The tables of one rank of a plan; ``recipe`` is what was derived of them ahead of time, if anything."""

    def __init__(self, plan: Plan, rank: int, recipe: RankRecipe | None) -> None:
        self.plan, self.rank, self._recipe = plan, rank, recipe
        self._pass_recipes: dict[tuple[int, bool], PassRecipe] = {} if recipe is None else dict(recipe.passes)
        self._prepared: dict[tuple[int, bool, str, Types], Prepared] = {}
        self._work_lists: WorkLists = {}
        self._orders: dict[torch.device, Tensor | None] = {}
        self._positions: dict[torch.device, Tensor] = {}
        self._streams = TableStreams()

    def tensors(self) -> list[Tensor]:
        """Return the tensors that were made on devices so far: work lists, index maps and positions."""
        return tables_in(self._prepared, self._work_lists, self._orders, self._positions)

    # --- rows ---------------------------------------------------------------------------------------------------------

    @cached_property
    def _rows(self) -> RankRows:
        return rank_rows(self.plan, self.rank) if self._recipe is None else self._recipe.rows

    @cached_property
    def tokens(self) -> Tensor:
        """The stream token of each local row, int64 on the CPU; -1 for a pad."""
        return uploaded(self._rows.tokens, CPU)

    @cached_property
    def positions(self) -> Tensor:
        """The position of each local row in its document, int64 on the CPU; 0 for a pad.

        Raises ValueError if the masks of a document disagree about it.
        """
        known = self._rows.positions
        if known is None:  # this raises
            known = row_positions(self.plan, local_stream(self.plan.placement, self.rank))
        return uploaded(known, CPU)

    @property
    def has_positions(self) -> bool:
        """Whether the masks of every document agree about positions."""
        return self._rows.positions is not None

    @cached_property
    def order(self) -> Tensor | None:
        """The row numbers of this rank sorted by stream token, or None if the rows are in that order already."""
        return None if self._rows.order is None else uploaded(self._rows.order, CPU)

    def order_on(self, device: torch.device) -> Tensor | None:
        """Return :attr:`order` on a device; it is copied there once."""
        if device not in self._orders:
            self._orders[device] = None if self.order is None else uploaded(self.order.numpy(), device)
        return self._orders[device]

    def positions_on(self, device: torch.device) -> Tensor:
        """Return :attr:`positions` on a device; they are copied there once, and the host does not wait for the copy."""
        self._streams.use(device, self.tensors)
        if device not in self._positions:
            self._positions[device] = uploaded(self.positions.numpy(), device)
        return self._positions[device]

    def are_positions(self, x: Tensor) -> bool:
        """Return whether ``x`` has the memory of the tensor that :meth:`positions_on` gave; its values are not read."""
        own = self._positions.get(x.device)
        return own is not None and x.data_ptr() == own.data_ptr() and x.numel() == len(own) and x.is_contiguous()

    def in_stream_order(self, local: Tensor) -> Tensor:
        """Return local rows sorted by stream token, which is the order in which programs use them."""
        order = self.order_on(local.device)
        return local if order is None else local[order]

    def in_local_order(self, kept: Tensor) -> Tensor:
        """Return rows that are sorted by stream token in local order; the inverse of :meth:`in_stream_order`."""
        order = self.order_on(kept.device)
        if order is None:
            return kept
        local = torch.empty_like(kept)
        local[order] = kept
        return local

    # --- passes -------------------------------------------------------------------------------------------------------

    def pass_recipe(self, mask: int, backward: bool) -> PassRecipe:
        """Return what this rank does in a pass (one mask, one direction), as integers; ``mask`` is the mask's index."""
        key = (mask, backward)
        if key not in self._pass_recipes:
            self._pass_recipes[key] = pass_recipe(rank_program(self.plan, self.rank, *key), backward, self.plan.shape)
        return self._pass_recipes[key]

    def prepared(self, mask: int, backward: bool, kernel: str, types: Types, arena: Arena) -> Prepared:
        """Return the program of a pass (one mask, one direction) with its work lists and index maps on the device.

        ``mask`` is the mask's index, ``types`` the dtypes and the device. With the first program, the memory of passes
        is reserved in ``arena``.
        """
        key = (mask, backward, kernel, types)
        self._streams.use(types.device, self.tensors)
        if key not in self._prepared:
            if not self._prepared:
                recipe = self._recipe
                arena.reserve(self.plan.memory(self.rank).arena if recipe is None else recipe.arena)
            made = self.pass_recipe(mask, backward)
            with lasting():
                self._prepared[key] = prepare(made, self.plan.shape, kernel, types, self._work_lists)
        return self._prepared[key]

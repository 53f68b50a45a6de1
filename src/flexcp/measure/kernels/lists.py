"""The work lists of a rank's pass, run and timed one after the other as the executor runs them.

A work list is what one kernel call computes: slices of attention between a query shelf and a key shelf (buffers of own
or received tokens).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flexcp import masks
from flexcp.executor.kernels import Settings, find_kernel, uploaded
from flexcp.executor.kernels.dq_states import dq_states
from flexcp.executor.run.finished_rows import finished_rows
from flexcp.executor.run.pass_recipe import only_lists_add_to_dq, touched_dq
from flexcp.executor.run.rank_program import RankProgram
from flexcp.measure.kernels.bench import BACKWARD, Heads, random_tensors, timed
from flexcp.plan.memory import QUERIES

SIZE = 128
"""The head size of all measured work lists."""


@dataclass(frozen=True)
class Listed:
    """A work list of a plan (what one kernel call computes), with what is needed to run it alone.

    ``rows`` and ``keys`` are the numbers of tokens on its query and key shelves (buffers), ``shelf`` is the number of
    the query shelf, and ``h0`` to ``h1`` (exclusive) are its heads among the ``shelf_heads`` heads there. ``open_dq``
    tells whether that shelf's dq may stay open (in an order and scale of the kernel's own) while the list runs, and
    ``alone`` whether nothing but the rank's lists adds to dq of own rows (other results are laid where they stay).
    ``begins`` and ``finishes`` are the runs of rows that the list begins and finishes; None if the rank's lists do not
    begin and finish all of its own rows.
    """

    slices: Any
    rows: int
    keys: int
    shelf: int
    shelf_heads: int
    h0: int
    h1: int
    open_dq: bool = False
    alone: bool = False
    begins: Any = None
    finishes: Any = None


def program_lists(program: RankProgram, backward: bool) -> list[list[Listed]]:
    """Return the work lists of each slot of a rank's program, ``[slot][list]``."""
    touched, finished = touched_dq(program), None if backward else finished_rows(program)
    alone = only_lists_add_to_dq(program, touched)
    found = []
    for at, slot in enumerate(program.slots):
        lists = []
        for i, work in enumerate(slot.work):
            queries, keys = program.shelves[work.q_shelf], program.shelves[work.kv_shelf]
            own = None if finished is None else finished[at][i]
            lists.append(
                Listed(
                    work.slices,
                    queries.rows,
                    keys.rows,
                    work.q_shelf,
                    queries.h1 - queries.h0,
                    work.h0 - queries.h0,
                    work.h1 - queries.h0,
                    at < touched[work.q_shelf],
                    alone,
                    None if own is None else own.begins,
                    None if own is None else own.finishes,
                )
            )
        found.append(lists)
    return found


class RankLists:
    """The work lists of one rank and direction with tensors of their sizes, ready to run as the executor runs them.

    Lists of a query shelf add to the same results. In a forward the LSE starts at -inf, unless the lists themselves
    begin and finish all rows. In a backward dq starts at zero. If a list leaves it open, in an order and scale of the
    kernel's own, the kernel opens it before the first list and closes it at the end.
    """

    def __init__(self, kernel: str, lists: list[Listed], backward: bool) -> None:
        self.module, self.backward = find_kernel(kernel), backward
        self.flops, self.computed = 0.0, 0.0
        """FLOPs that are useful, and FLOPs that whole tiles compute."""
        self._shelves: dict[int, tuple[Tensor, ...]] = {}
        self._begun: dict[int, bool] = {}
        self._calls: list[Callable[[Settings], Any]] = []
        self._first: dict[int, Any] = {}
        """The first work list of each shelf that leaves dq open."""
        self._shared: dict[int, Any] = {}
        finishes = getattr(self.module, "FINISHES", False)
        may_open = backward and hasattr(self.module, "close_dq")
        for x in lists:
            own = x.shelf == QUERIES and x.finishes is not None
            self._add(x, finishes and not backward and own, may_open)
        own_alone = all(x.alone for x in lists if x.shelf == QUERIES)
        self._opened = {x.shelf: x.shelf == QUERIES and own_alone and finishes for x in lists if x.open_dq and may_open}
        self._states = {shelf: self._states_of([x for x in lists if x.shelf == shelf]) for shelf in self._opened}
        self._open()

    def run(self, settings: Settings) -> None:
        """Run all lists, with what a pass does before the first and after the last."""
        for number, (*_, result, lse, _) in self._shelves.items():
            if self.backward and number not in self._first:
                result.zero_()
            elif not self.backward and not self._begun[number]:
                lse.fill_(-torch.inf)
        self._open()
        self.launch(settings)
        for shelf, finishes in self._opened.items():
            last = {"finished_THD": self._shelves[shelf][2]} if finishes else {}
            self.module.close_dq(self._shelves[shelf][3], settings, self._states[shelf], **last)

    def result(self, shelf: int) -> Tensor:
        """Return the output, or dq, of all rows of a query shelf, as the last run left it.

        What no list adds to may hold anything.
        """
        _, _, rounded, result, *_ = self._shelves[shelf]
        return rounded if self._begun[shelf] or self._opened.get(shelf, False) else result

    def launch(self, settings: Settings) -> None:
        """Run the lists alone, as in a slot that is neither the first nor the last."""
        for call in self._calls:
            call(settings)

    def _open(self) -> None:
        """Open every dq that a list leaves open."""
        for number, work in self._first.items():
            states = {"states_TH": self._states[number]} if self._opened[number] else {}
            self._shared[number] = self.module.open_dq(*self._shelves[number][3:], work, **states)

    def _states_of(self, lists: list[Listed]) -> Tensor:
        """Return the states of a shelf's dq; all that no list adds to comes from elsewhere."""
        rows, heads = self._shelves[lists[0].shelf][0].shape[:2]
        elsewhere = np.array([[0, heads, 0, rows]])
        states = dq_states(rows, heads, [(x.slices, slice(x.h0, x.h1)) for x in lists if x.open_dq], elsewhere)
        return uploaded(states, self._shelves[lists[0].shelf][0].device)

    def _add(self, x: Listed, finishes: bool, may_open: bool) -> None:
        """Make the tensors and the kernel call of one list, and count its FLOPs."""
        device, module = torch.device("cuda", torch.cuda.current_device()), self.module
        heads = Heads(x.h1 - x.h0, max(1, (x.h1 - x.h0) // 4), SIZE)
        if x.shelf not in self._shelves:
            both = random_tensors(x.rows, Heads(x.shelf_heads, 1, SIZE), device)
            lse, delta = (torch.full(both.q.shape[:2], value, device=device) for value in (10.0, 0.0))
            result = torch.zeros(both.q.shape, device=device)
            self._shelves[x.shelf] = both.q, both.do, torch.empty_like(both.q), result, lse, delta
        q, do, rounded, result, lse, delta = (t[:, x.h0 : x.h1] for t in self._shelves[x.shelf])
        kv = random_tensors(x.keys, heads, device)
        self._begun[x.shelf] = finishes
        rows = {"begins": x.begins, "finishes": x.finishes} if finishes else {}
        work = module.prepare(x.slices, heads.heads, heads.kv_heads, SIZE, SIZE, device, **rows)
        if self.backward:
            dk, dv = torch.zeros(kv.k.shape, device=device), torch.zeros(kv.v.shape, device=device)
            opened = may_open and x.open_dq
            if opened:
                self._first.setdefault(x.shelf, work)

            def call(s: Settings) -> None:
                shared = {"opened": self._shared[x.shelf], "first_head": x.h0} if opened else {}
                own = replace(s, open_dq=opened)
                module.backward(q, kv.k, kv.v, do, lse, delta, work, own, result, dk, dv, **shared)

            self._calls.append(call)
        else:
            last = {"finished_THV": rounded} if finishes else {}
            self._calls.append(lambda s: module.forward(q, kv.k, kv.v, work, s, result, lse, **last))
        useful = heads.flops(int(masks.area(x.slices).sum())) * (BACKWARD if self.backward else 1.0)
        self.flops += useful
        self.computed += useful / module.useful_share(x.slices, heads.heads // heads.kv_heads, self.backward)


def work_rate(
    kernel: str, lists: list[Listed], backward: bool, dense: Callable[[], Any], rounds: int = 3
) -> tuple[float, float, float]:
    """Return (useful TFLOP/s of a rank's work lists, useful share of what tiles compute, milliseconds of ``dense``).

    ``dense`` is another function to time. It and the lists take turns, so that both run at the same clock.
    """
    ready = RankLists(kernel, lists, backward)
    ms = timed({"all": partial(ready.run, Settings(SIZE**-0.5)), "dense": dense}, rounds)
    return ready.flops / ms["all"] / 1e9, ready.flops / ready.computed, ms["dense"]

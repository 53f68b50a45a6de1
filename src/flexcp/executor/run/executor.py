"""The executor: the loop over slots that runs a rank's program, forward or backward.

Slot s does the following, in order:

1. Take in what stage s brought: inputs are laid on their shelves, outputs are reduced into their rows in a fixed order.
2. Post the stages that the plan posts in this slot (by default stage s + 1), if this rank has messages in them. So
   transfers are always issued before the work that hides them.
3. Compute, leaving free as many multiprocessors as the plan says. A dq that is left open, that is, in a form of the
   kernel's own (:mod:`flexcp.executor.run.prepared`), is cleared before the first launch that adds to it.
4. Close the dq that no later slot leaves open.

The loop knows no strategy and never waits for the device: on a GPU it only queues work on the current CUDA stream.
Everything that exists only during a pass lies in the arena (:mod:`flexcp.executor.exchange.arena`), at offsets known
from the plan. The rank's own results, which are returned, are allocated separately.

A program that is a single launch over a rank's own rows is run by :mod:`flexcp.executor.run.one_device` instead.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flexcp.executor.exchange.arena import Arena
from flexcp.executor.exchange.transports import Exchange
from flexcp.executor.kernels import Settings
from flexcp.executor.kernels.sinks_and_delta import OutputGradient
from flexcp.executor.run.laid_rows import FINISHED
from flexcp.executor.run.message_layout import Shelves, Types, new_inputs, new_own_results
from flexcp.executor.run.one_device import local_backward, local_forward
from flexcp.executor.run.pass_memory import PassMemory
from flexcp.executor.run.pass_watch import Watch
from flexcp.executor.run.prepared import Prepared, PreparedWork
from flexcp.plan.memory import KEYS, QUERIES
from flexcp.shape import Shape

WORD = 16
"""Bytes that copies move at once; own tensors must begin at a multiple of it."""


@dataclass(frozen=True)
class Runtime:
    """What a pass runs with.

    ``settings`` are those of the kernel, ``exchange`` sends and receives the messages of this pass, and ``watch`` is
    how telemetry follows the pass, if it does. ``margin``, if given, replaces in every slot the number of
    multiprocessors that the plan leaves free.
    """

    shape: Shape
    types: Types
    settings: Settings
    exchange: Exchange
    arena: Arena
    watch: Watch | None = None
    margin: int | None = None

    def watched(self) -> AbstractContextManager[None]:
        """Return the context that surrounds a pass, so that telemetry can follow it."""
        return nullcontext() if self.watch is None else self.watch.running()


def run_forward(
    prepared: Prepared, runtime: Runtime, q: Tensor, k: Tensor, v: Tensor, rounded: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Run a forward pass and return (output, LSE, received keys and values to keep for the backward) of this rank.

    ``q``, ``k`` and ``v`` are the rank's own tokens in stream order. The output is in the accumulator dtype, or in the
    model's dtype if ``rounded`` allows that and the kernel wrote it so; the LSE is in the statistics dtype of
    ``runtime.types``. What is kept is a tensor of bytes, empty if the plan keeps nothing.
    """
    kept = torch.empty(prepared.program.kept_size, dtype=torch.uint8, device=runtime.types.device)
    with runtime.watched(), runtime.exchange:
        if prepared.alone is not None:
            kernel, work = prepared.kernel, prepared.alone
            local = (runtime.types, runtime.settings, q, k, v, rounded)
            return *local_forward(kernel, work.list, work.whole, *local), kept
        results = run_slots(prepared, runtime, kept, {QUERIES: {"q": q}, KEYS: {"k": k, "v": v}}, False, rounded)[
            QUERIES
        ]
    return _result(results, "out") if rounded else results["out"], results["lse"], kept


def run_backward(
    prepared: Prepared,
    runtime: Runtime,
    kept: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    back: OutputGradient,
) -> tuple[Tensor, Tensor, Tensor]:
    """Run a backward pass and return dq, dk and dv of the rank's own tokens, in stream order.

    Each is in the accumulator dtype, or in the model's dtype if the kernel wrote it so. ``kept`` are the bytes that
    :func:`run_forward` returned last, ``lse`` is the forward's LSE, and ``back`` holds the gradients of output and LSE.
    """
    with runtime.watched(), runtime.exchange:
        if prepared.alone is not None:
            kernel, work = prepared.kernel, prepared.alone
            return local_backward(kernel, work.list, work.whole, runtime.types, runtime.settings, q, k, v, lse, back)
        own = {QUERIES: {"q": q, "do": back.do, "lse": lse, "delta": back.delta}, KEYS: {"k": k, "v": v}}
        shelves = run_slots(prepared, runtime, kept, own, True)
    return _result(shelves[QUERIES], "dq"), _result(shelves[KEYS], "dk"), _result(shelves[KEYS], "dv")


def run_slots(
    prepared: Prepared,
    runtime: Runtime,
    kept: Tensor,
    own: dict[int, dict[str, Tensor]],
    backward: bool,
    rounded: bool = True,
) -> Shelves:
    """Run all slots of a program on the rank's own tensors and return all shelves (:meth:`_PassRun.run`).

    ``own`` has the tensors by shelf and field, ``kept`` the bytes that a forward keeps for the backward; ``rounded``
    allows results in the model's dtype. A program of a single launch may be run so as well.
    """
    with runtime.arena.lease(prepared.program.layout.size, runtime.types.device) as memory:
        what = (prepared.program, prepared.sends, prepared.receives, runtime.shape, runtime.types, backward)
        views = runtime.arena.kept(prepared, memory, lambda x: PassMemory(*what, x))
        return _PassRun(prepared, runtime, backward, views, kept, rounded).run(own)


class _PassRun:
    """One run of a prepared program.

    ``memory`` has views of the leased arena. ``kept`` holds, as bytes, the keys and values that a forward keeps for the
    backward: a forward fills it and a backward reads it. ``rounded`` allows results in the model's dtype.
    """

    def __init__(
        self,
        prepared: Prepared,
        runtime: Runtime,
        backward: bool,
        memory: PassMemory,
        kept: Tensor,
        rounded: bool = False,
    ) -> None:
        self.prepared, self.program = prepared, prepared.program
        self.runtime, self.backward = runtime, backward
        self.shelves: Shelves = {}
        self.exchange, self.memory, self.kept = runtime.exchange, memory, kept
        self.may_open = backward and not runtime.settings.deterministic
        self.open_shelves = prepared.open_shelves if self.may_open else frozenset()
        self.opened: dict[int, Any] = {}
        self._settings: dict[tuple[int, bool], Settings] = {}
        self.rounded = rounded
        self.finishes = rounded and prepared.finishes and (self.may_open or not backward)

    def run(self, own: dict[int, dict[str, Tensor]]) -> Shelves:
        """Run all slots on the rank's own tensors, given by shelf and field, and return all shelves.

        The first two shelves, ``QUERIES`` and ``KEYS``, hold own tokens and get new fields for the results: ``out`` and
        ``lse``, or ``dq``, ``dk`` and ``dv``. Fields with the names of ``FINISHED`` have them in the model's dtype, if
        the kernel writes that or some are laid.
        """
        types, packing, shelves = self.runtime.types, self.prepared.packing, self.program.shelves
        new = (self.backward, self.runtime.shape, types)
        self.shelves = {side: {name: _flat(x) for name, x in fields.items()} for side, fields in own.items()}
        for number in own:
            finishes = self.finishes and number == QUERIES
            laid, clear_dq = self.program.laid[number], number not in self.open_shelves
            self.shelves[number] |= new_own_results(shelves[number], *new, laid, finishes, self.may_open, clear_dq)
        slots = self.program.slots
        mark = None if self.runtime.watch is None else self.runtime.watch.mark
        for stage in range(len(slots)):
            early, late = self.program.posts[stage]
            for number in early:
                self._post(number)
            arrived = self.exchange.arrived(stage)
            if mark is not None:
                mark()
            for number in self.prepared.opens[stage]:
                self.shelves[number] = self._arriving(number)
            if arrived is not None:
                packing.unpack(stage, arrived, self.shelves)
            packing.move(stage, self.shelves)
            for number in late:
                self._post(number)
            if mark is not None:
                mark()
            margin = self.program.margins[stage] if self.runtime.margin is None else self.runtime.margin
            for work in self.prepared.work[stage]:
                self._compute(work, margin)
            if self.may_open:
                for number in self.prepared.closes[stage]:
                    rows, states = self.shelves[number], self.prepared.dq_states[number]
                    last = {"finished_THD": rows["finished"]} if self.finishes and number == QUERIES else {}
                    self.prepared.kernel.close_dq(rows["dq"], self.runtime.settings, states, **last)
            if mark is not None:
                mark()
        self.exchange.finish()
        for side in own:
            self._finish(side)
        return self.shelves

    def _finish(self, side: int) -> None:
        """Complete the results of own rows if some are laid: round the sums of the others.

        If results are not to be rounded, the laid ones are copied to the sums instead. Nothing is left to do if sums
        and results are the same tensors, or if the kernel has finished the other rows.
        """
        packing, rows = self.prepared.packing, self.shelves[side]
        if all(rows[FINISHED[name]] is rows[name] for name in rows if FINISHED.get(name) in rows):
            return
        if not self.rounded:
            packing.copy_laid_to_sums(side, self.shelves)
        elif not (self.finishes and side == QUERIES):
            packing.round_sums(side, self.shelves)

    def _post(self, stage: int) -> None:
        """Pack the messages of a stage and start its transfers, if this rank has any in it."""
        if not (self.prepared.sends[stage] or self.prepared.receives[stage]):
            return
        leaving = self.memory.messages("sends", stage)
        self.prepared.packing.pack(stage, leaving, self.shelves)
        self.exchange.post(stage, leaving, self.memory.messages("receives", stage))

    def _arriving(self, number: int) -> dict[str, Tensor]:
        """Return the tensors of a shelf of what arrives, with its results cleared."""
        found, kept = self.memory.shelf(number), self.program.kept.get(number)
        for name, part, value in found.cleared:
            if name == "dq" and number in self.open_shelves:
                continue
            part.fill_(value)
        if kept is None:
            return found.inputs | found.results
        how = (self.backward, self.runtime.shape, self.runtime.types)
        return new_inputs(self.program.shelves[number], *how, self.kept[kept:]) | found.results

    def _settings_with(self, margin: int, open_dq: bool) -> Settings:
        """Return the kernel's settings for this margin and whether dq may be left open."""
        found = self._settings.get((margin, open_dq))
        if found is None:
            found = replace(self.runtime.settings, sm_margin=margin, open_dq=open_dq)
            self._settings[margin, open_dq] = found
        return found

    def _compute(self, work: PreparedWork, margin: int) -> None:
        """Run one kernel launch on the tensors of its shelves, leaving so many multiprocessors free."""
        q = _of_heads(self.shelves[work.work.q_shelf], work.heads)
        kv = _of_heads(self.shelves[work.work.kv_shelf], work.groups)
        kernel = self.prepared.kernel
        if self.backward:
            inputs = (q["q"], kv["k"], kv["v"], q["do"], q["lse"], q["delta"])
            opens = self.may_open and work.open_dq
            shared = {"opened": self._opened(work), "first_head": work.heads.start} if opens else {}
            settings = self._settings_with(margin, opens)
            kernel.backward(*inputs, work.list, settings, q["dq"], kv["dk"], kv["dv"], **shared)
        else:
            finishes = self.finishes and work.work.q_shelf == QUERIES
            last = {"finished_THV": q["finished"]} if finishes else {}
            settings = self._settings_with(margin, self.runtime.settings.open_dq)
            kernel.forward(q["q"], kv["k"], kv["v"], work.list, settings, q["out"], q["lse"], **last)

    def _opened(self, work: PreparedWork) -> Any:
        """Return what the launches that leave a shelf's dq open share; the first of them, ``work``, clears dq."""
        number = work.work.q_shelf
        if number not in self.opened:
            rows = self.shelves[number]
            # Only if dq is closed into another tensor does nothing read the rest of it.
            states = {"states_TH": self.prepared.dq_states[number]} if self.finishes and number == QUERIES else {}
            tensors = (rows["dq"], rows["lse"], rows["delta"])
            self.opened[number] = self.prepared.kernel.open_dq(*tensors, work.list, **states)
        return self.opened[number]


def _result(shelf: dict[str, Tensor], name: str) -> Tensor:
    """Return a result of own rows: in the model's dtype if it was written so, else its sums."""
    return shelf.get(FINISHED[name], shelf[name])


def _of_heads(fields: dict[str, Tensor], heads: slice) -> dict[str, Tensor]:
    """Return the fields of a shelf for some of its heads, as views; for all heads, the fields themselves."""
    of_all = next(iter(fields.values())).shape[1]
    if (heads.start, heads.stop) == (0, of_all):  # each view costs host time
        return fields
    return {name: x[:, heads] for name, x in fields.items()}


def _flat(x: Tensor) -> Tensor:
    """Return the tensor in contiguous, aligned memory, as messages need it; copy it only if it is not already so."""
    return x if x.is_contiguous() and x.data_ptr() % WORD == 0 else x.clone(memory_format=torch.contiguous_format)

"""The executor: one loop that runs a rank's program, forward or backward.

In slot s: take in what stage s brought (inputs are laid on their shelves, outputs reduced into the rows they belong to, in a fixed
order), post stage s + 1, compute. The last slot has nothing left to post. Nothing here knows a strategy, and nothing waits for the
device: on a GPU the loop only queues work, in stream order. Buffers come from torch's caching allocator, which hands the same memory to
every layer.

A program that is a single launch over a rank's own rows (one rank, or a rank that needs nobody) is :mod:`flexcp.executor.local`'s.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from flexcp.executor.exchange import ALIGNMENT, Buffers, Exchange
from flexcp.executor.fields import Shelves, Types, new_inputs, new_results
from flexcp.executor.kernels import Settings
from flexcp.executor.local import local_backward, local_forward
from flexcp.executor.prepared import Prepared, PreparedWork
from flexcp.executor.program import KEYS, QUERIES
from flexcp.pieces import Shape


@dataclass(frozen=True)
class Runtime:
    """What a pass runs with: shape and dtypes, scalars, group, the counter of bytes sent to each rank, patience."""

    shape: Shape
    types: Types
    settings: Settings
    group: dist.ProcessGroup | None
    sent: list[int]
    timeout: timedelta


def run_forward(
    prepared: Prepared, runtime: Runtime, q: Tensor, k: Tensor, v: Tensor, rounded: bool
) -> tuple[Tensor, Tensor]:
    """This rank's output and LSE (statistics dtype) from its own tokens in stream order.

    The output is in the accumulator dtype, or already in the model's where ``rounded`` allows that and nothing is left to add.
    """
    if prepared.alone is not None:
        kernel, work = prepared.kernel, prepared.alone
        return local_forward(kernel, work.list, work.whole, runtime.types, runtime.settings, q, k, v, rounded)
    shelves = _Pass(prepared, runtime, backward=False).run({QUERIES: {"q": q}, KEYS: {"k": k, "v": v}})
    return shelves[QUERIES]["out"], shelves[QUERIES]["lse"]


def run_backward(
    prepared: Prepared, runtime: Runtime, q: Tensor, k: Tensor, v: Tensor, do: Tensor, lse: Tensor, delta: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv (accumulator dtype) of this rank's own tokens in stream order."""
    if prepared.alone is not None:
        kernel, work = prepared.kernel, prepared.alone.list
        return local_backward(kernel, work, runtime.types, runtime.settings, q, k, v, do, lse, delta)
    own = {QUERIES: {"q": q, "do": do, "lse": lse, "delta": delta}, KEYS: {"k": k, "v": v}}
    shelves = _Pass(prepared, runtime, backward=True).run(own)
    return shelves[QUERIES]["dq"], shelves[KEYS]["dk"], shelves[KEYS]["dv"]


class _Pass:
    def __init__(self, prepared: Prepared, runtime: Runtime, backward: bool) -> None:
        self.prepared, self.program = prepared, prepared.program
        self.runtime, self.backward = runtime, backward
        self.shelves: Shelves = {}
        self.exchange = Exchange(runtime.group, runtime.types.device, runtime.sent, runtime.timeout)

    def run(self, own: dict[int, dict[str, Tensor]]) -> Shelves:
        types, packing, shelves = self.runtime.types, self.prepared.packing, self.program.shelves
        new = (self.backward, self.runtime.shape, types)
        self.shelves = {side: {name: _flat(x) for name, x in fields.items()} for side, fields in own.items()}
        for number in own:
            self.shelves[number] |= new_results(shelves[number], *new)
        slots = self.program.slots
        for stage, slot in enumerate(slots):
            arrived = self.exchange.arrived()
            for number in self.prepared.opens[stage]:
                self.shelves[number] = new_inputs(shelves[number], *new) | new_results(shelves[number], *new)
            if arrived is not None:
                packing.unpack(stage, arrived, self.shelves)
            packing.move(stage, self.shelves)
            if stage + 1 < len(slots):
                leaving = Buffers(self.prepared.sends[stage], types.device)
                packing.pack(stage, leaving, self.shelves)
                self.exchange.post(stage + 1, leaving, Buffers(self.prepared.receives[stage + 1], types.device))
            for work in self.prepared.work[stage]:
                self._compute(work)
            for number in slot.forget:
                del self.shelves[number]
        self.exchange.finish()
        return self.shelves

    def _compute(self, work: PreparedWork) -> None:
        q = {name: x[:, work.heads] for name, x in self.shelves[work.work.q_shelf].items()}
        kv = {name: x[:, work.groups] for name, x in self.shelves[work.work.kv_shelf].items()}
        kernel, settings = self.prepared.kernel, self.runtime.settings
        if self.backward:
            inputs = (q["q"], kv["k"], kv["v"], q["do"], q["lse"], q["delta"])
            kernel.backward(*inputs, work.list, settings, q["dq"], kv["dk"], kv["dv"])
        else:
            kernel.forward(q["q"], kv["k"], kv["v"], work.list, settings, q["out"], q["lse"])


def _flat(x: Tensor) -> Tensor:
    """The tensor as aligned memory without gaps, which messages are cut from; a copy only where it is not."""
    return x if x.is_contiguous() and x.data_ptr() % ALIGNMENT == 0 else x.clone(memory_format=torch.contiguous_format)

"""The executor: one loop that runs a rank's program, forward or backward.

In slot s: take in what stage s brought (inputs are laid on their shelves, outputs reduced into the rows they belong to, in a fixed
order), post stage s + 1, compute. The last slot has nothing left to post. Nothing here knows a strategy.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flexcp.executor.exchange import FIELDS, Exchange, Shelves, Types, new_field, read_block, side_fields
from flexcp.executor.kernels import Settings, merge
from flexcp.executor.program import KEYS, QUERIES, Block, RankProgram, Work
from flexcp.pieces import OUTPUTS, Kind, Shape


@dataclass(frozen=True)
class Runtime:
    """What a pass runs with: shape and dtypes, kernel, group, the counter of bytes sent to each rank, patience."""

    shape: Shape
    types: Types
    kernel: Any
    settings: Settings
    group: dist.ProcessGroup | None
    sent: list[int]
    timeout: timedelta


def run_forward(program: RankProgram, runtime: Runtime, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """This rank's output (accumulator dtype) and LSE (statistics dtype) from its own tokens in stream order."""
    shelves = _Pass(program, runtime, backward=False).run({QUERIES: {"q": q}, KEYS: {"k": k, "v": v}})
    return shelves[QUERIES]["out"], shelves[QUERIES]["lse"]


def run_backward(
    program: RankProgram, runtime: Runtime, q: Tensor, k: Tensor, v: Tensor, do: Tensor, lse: Tensor, delta: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv (accumulator dtype) of this rank's own tokens in stream order."""
    own = {QUERIES: {"q": q, "do": do, "lse": lse, "delta": delta}, KEYS: {"k": k, "v": v}}
    shelves = _Pass(program, runtime, backward=True).run(own)
    return shelves[QUERIES]["dq"], shelves[KEYS]["dk"], shelves[KEYS]["dv"]


class _Pass:
    def __init__(self, program: RankProgram, runtime: Runtime, backward: bool) -> None:
        self.program, self.runtime, self.backward = program, runtime, backward
        self.shelves: Shelves = {}
        self.exchange = Exchange(runtime.group, runtime.shape, runtime.types, runtime.sent, runtime.timeout)

    def run(self, own: dict[int, dict[str, Tensor]]) -> Shelves:
        self.shelves = {side: dict(fields) for side, fields in own.items()}
        for number in own:
            self._add_accumulators(number)
        slots = self.program.slots
        for stage, slot in enumerate(slots):
            for block, fields in self.exchange.arrived():
                self._take_in(block, fields)
            for here, there in slot.own:
                self._take_in(there, {f.name: read_block(self.shelves, here, f) for f in FIELDS[here.kind]})
            if stage + 1 < len(slots):
                self.exchange.post(stage + 1, slot.send, slots[stage + 1].receive, self.shelves)
            for work in slot.work:
                self._compute(work)
            for number in slot.forget:
                del self.shelves[number]
        self.exchange.finish()
        return self.shelves

    def _add_accumulators(self, number: int) -> None:
        """Room for results on a shelf: out starts at zero with LSE -inf, gradients at zero."""
        shelf = self.program.shelves[number]
        if not self.backward and shelf.side == KEYS:
            return
        kind = Kind.DKV if shelf.side == KEYS else Kind.DQ if self.backward else Kind.O
        for field in FIELDS[kind]:
            types = self.runtime.types
            dtype, fill = (types.statistics, -torch.inf) if field.name == "lse" else (types.accumulator, 0.0)
            new = new_field(shelf, field, self.runtime.shape, types.device, dtype, fill)
            self.shelves[number][field.name] = new

    def _take_in(self, block: Block, fields: dict[str, Tensor]) -> None:
        if block.kind in OUTPUTS:
            self._reduce(block, fields)
            return
        if block.shelf not in self.shelves:
            self._open(block.shelf)
        rows = block.rows if isinstance(block.rows, slice) else torch.from_numpy(block.rows)
        for name, value in fields.items():
            target = self.shelves[block.shelf][name]
            target[rows, block.h0 : block.h1] = value.to(target.dtype)

    def _open(self, number: int) -> None:
        shelf = self.program.shelves[number]
        self.shelves[number] = {}
        for kind in side_fields(shelf.side, self.backward):
            for field in FIELDS[kind]:
                types = self.runtime.types
                dtype = types.accumulator if field.precise else types.model
                self.shelves[number][field.name] = new_field(
                    shelf, field, self.runtime.shape, types.device, dtype, None
                )
        self._add_accumulators(number)

    def _reduce(self, block: Block, fields: dict[str, Tensor]) -> None:
        shelf = self.shelves[block.shelf]
        rows = block.rows if isinstance(block.rows, slice) else torch.from_numpy(block.rows)
        at = (rows, slice(block.h0, block.h1))
        if block.kind == Kind.O:
            more = fields["out"].to(self.runtime.types.accumulator)
            out, lse = merge(shelf["out"][at], shelf["lse"][at], more, fields["lse"])
            shelf["out"][at], shelf["lse"][at] = out.to(more.dtype), lse
            return
        for name, value in fields.items():
            shelf[name][at] += value.to(self.runtime.types.accumulator)

    def _compute(self, work: Work) -> None:
        q_shelf, kv_shelf = self.program.shelves[work.q_shelf], self.program.shelves[work.kv_shelf]
        share = self.runtime.shape.queries_per_key
        heads = slice(work.h0 - q_shelf.h0, work.h1 - q_shelf.h0)
        groups = slice(work.h0 // share - kv_shelf.h0, -(-work.h1 // share) - kv_shelf.h0)
        q = {name: x[:, heads] for name, x in self.shelves[work.q_shelf].items()}
        kv = {name: x[:, groups] for name, x in self.shelves[work.kv_shelf].items()}
        kernel, settings = self.runtime.kernel, self.runtime.settings
        if self.backward:
            kernel.backward(
                q["q"],
                kv["k"],
                kv["v"],
                q["do"],
                q["lse"],
                q["delta"],
                work.slices,
                settings,
                q["dq"],
                kv["dk"],
                kv["dv"],
            )
        else:
            kernel.forward(q["q"], kv["k"], kv["v"], work.slices, settings, q["out"], q["lse"])

"""Proves that the GPU's row packing does what the plain packing does: same messages, same memory, under every strategy.

Runs the row kernels in Triton's interpreter on the CPU, on real programs: all inputs are random numbers (some LSEs are
-inf), and both packings pack every slot and unpack its arrivals. Skipped where Triton is not installed, or where its
interpreter cannot run with the installed NumPy (Triton before 3.7 converts arrays to numbers in a way that NumPy 2.4
refuses).
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from flexcp.executor.kernels import row_kernels
from triton_interpreter import interpreting_pool

CASES = [("ring", 3, True), ("usp:2,2", 4, False), ("usp:2,2", 4, True), ("blocks", 3, False), ("scattered", 3, True)]

SCRIPT = """
import numpy as np
import torch
import flexcp
from flexcp.executor.exchange.arena import Buffers
from flexcp.executor.run.message_layout import Types, new_inputs, new_own_results, new_results, part_view
from flexcp.executor.run.message_parts import message_bytes, message_parts
from flexcp.executor.run.packing import FieldPacking
from flexcp.executor.run.rank_program import rank_program
from flexcp.executor.run.row_packing import RowPacking

def shelves_of(program, shape, types, backward, generator):
    how = (backward, shape, types)
    own = zip(program.shelves, program.laid)
    made = [new_inputs(shelf, *how) | new_own_results(shelf, *how, laid, False, False) for shelf, laid in own]
    made += [new_inputs(s, *how) | new_results(s, *how) for s in program.shelves[2:]]
    return {number: {name: random(x, generator) for name, x in fields.items()} for number, fields in enumerate(made)}

def random(x, generator):
    x.copy_(torch.randn(x.shape, generator=generator))
    if x.dim() == 2 and x.numel():
        x.view(-1)[::5] = -torch.inf
    return x

def same(a, b):
    for number in a:
        for name in a[number]:
            where, rounded = f"{number} {name}: ", a[number][name].dtype == torch.bfloat16
            bounds = {"atol": 1e-6, "rtol": 0.008 if rounded else 1e-6}  # the interpreter rounds its own way
            torch.testing.assert_close(a[number][name], b[number][name], **bounds, msg=where.__add__)

launches, ended = [], set()
for strategy, ranks, backward in cases:
    named = strategy.replace("scattered", "blocks")
    planner = flexcp.Planner(4, 2, 8, 6, "bfloat16", flexcp.cluster("cpu", 1, ranks), strategy=named)
    lengths = [17, 1, 22, 2]
    options = {}
    if strategy == "scattered":
        order = np.random.default_rng(0).permutation(sum(lengths))
        options["layout"] = [order[r::ranks].tolist() for r in range(ranks)]
    plan = planner(lengths, flexcp.window(20, 3), **options)
    types = Types(torch.bfloat16, torch.float32, torch.float32, torch.device("cpu"))
    for rank in (0, ranks - 1):
        program = rank_program(plan, rank, 0, backward)
        packings = [FieldPacking(program, plan.shape, types), RowPacking(program, plan.shape, types)]
        for slot, stage in enumerate(program.slots):
            shelves = [
                shelves_of(program, plan.shape, types, backward, torch.Generator().manual_seed(slot)) for _ in packings
            ]
            leaving, arriving = [], []
            for packing, held in zip(packings, shelves):
                buffers = Buffers.alone([(m.peer, message_bytes(m, plan.shape)) for m in stage.send], types.device)
                buffers.memory.zero_()
                packing.pack(slot, buffers, held)
                leaving.append([
                    part_view(part, memory, types)
                    for message, (_, memory) in zip(stage.send, buffers.messages)
                    for part in message_parts(message, plan.shape)
                ])
                buffers = Buffers.alone([(m.peer, message_bytes(m, plan.shape)) for m in stage.receive], types.device)
                generator = torch.Generator().manual_seed(100 + slot)
                for message, (_, memory) in zip(stage.receive, buffers.messages):
                    for part in message_parts(message, plan.shape):
                        random(part_view(part, memory, types), generator)
                packing.unpack(slot, buffers, held)
                packing.move(slot, held)
                for side in (0, 1):
                    if len(program.laid[side]):
                        (packing.round_sums if slot % 2 else packing.copy_laid_to_sums)(side, held)
                        ended.add((side, slot % 2))
            for a, b in zip(*leaving, strict=True):  # the interpreter rounds to bfloat16 its own way
                torch.testing.assert_close(a, b, atol=0, rtol=0.008 if a.dtype == torch.bfloat16 else 0)
            same(*shelves)
            launches.append((len(packings[1]._packs[slot]), sum(len(m.blocks) for m in stage.send)))
"""

TWICE = """
import numpy as np
import torch
from flexcp.executor.exchange.arena import Buffers
from flexcp.executor.run.message_layout import Types, new_inputs, new_results, part_view
from flexcp.executor.run.message_parts import message_bytes, message_parts
from flexcp.executor.run.packing import FieldPacking
from flexcp.executor.run.rank_program import Block, Message, RankProgram, Shelf, Slot
from flexcp.plan.memory import KEYS, QUERIES, Layout
from flexcp.executor.run.row_packing import RowPacking
from flexcp.shape import Kind, Shape

shape = Shape(7, 7, 8, 8, "float32")
types = Types(torch.float32, torch.float32, torch.float32, torch.device("cpu"))
shelves = (Shelf(QUERIES, 6, 0, 7, 0), Shelf(KEYS, 6, 0, 7, 0))
for kind, backward in ((Kind.O, False), (Kind.DQ, True), (Kind.DKV, True)):
    side = KEYS if kind == Kind.DKV else QUERIES
    blocks = (Block(kind, side, slice(0, 4), 4, 0, 2, True), Block(kind, side, np.array([3, 5, 1]), 3, 0, 1, True))
    # The last 5 heads are merged by three programs, of 2, 2 and 1.
    others = (Block(kind, side, slice(2, 6), 4, 1, 2, True), Block(kind, side, slice(0, 6), 6, 2, 7, True))
    received = [Message(1, blocks), Message(2, others), Message(3, blocks[1:])]
    program = RankProgram(shelves, (Slot(receive=received),), Layout(0, {}), (([], []),), (0,), {}, 0)
    results = []
    for packing in (FieldPacking(program, shape, types), RowPacking(program, shape, types)):
        buffers = Buffers.alone([(m.peer, message_bytes(m, shape)) for m in received], types.device)
        generator = torch.Generator().manual_seed(0)
        for message, (_, memory) in zip(received, buffers.messages):
            for part in message_parts(message, shape):
                part_view(part, memory, types).copy_(torch.randn(part.size, generator=generator))
        held = {n: new_results(s, backward, shape, types) for n, s in enumerate(shelves)}
        packing.unpack(0, buffers, held)
        results.append(held)
    assert len(packing._unpacks[0]) == 1, "one launch takes in the results of all messages"
    for number in held:
        for name in held[number]:
            bounds = {"atol": 0, "rtol": 0} if backward else {}  # gradients are added in the order of messages
            torch.testing.assert_close(results[0][number][name], results[1][number][name], **bounds)
"""

DELTA = """
import torch
from flexcp.executor.kernels.row_kernels import delta_rows
for dtype in (torch.float32, torch.bfloat16):
    for width, dlse in ((6, True), (16, False)):
        do = torch.randn(9, 5, width * 2, dtype=dtype)[..., ::2]
        out = torch.randn(9, 11, width, dtype=dtype)[:, 1:6]
        more = torch.randn(5, 9).T if dlse else None
        delta = torch.full((9, 5), 7.0)
        delta_rows(do, out, more, delta)
        exact = (do.double() * out.double()).sum(-1) - (more.double() if dlse else 0)
        torch.testing.assert_close(delta.double(), exact, atol=1e-5, rtol=1e-5)
"""


def counted_launches(group: object, cases: list[tuple[str, int, bool]]) -> list[tuple[int, int]]:
    """Run all scripts and return, for each slot, the launches that pack it and the blocks of its messages."""
    names: dict[str, Any] = {"cases": cases}
    exec(TWICE + DELTA + SCRIPT, names)
    assert names["ended"] == {(0, 0), (0, 1), (1, 0), (1, 1)}, "both sides are rounded and copied back somewhere"
    found: list[tuple[int, int]] = names["launches"]
    return found


def version(name: str) -> tuple[int, ...]:
    return tuple(int(part) for part in importlib.metadata.version(name).split(".")[:2])


@pytest.mark.skipif(
    version("triton") < (3, 7) and version("numpy") >= (2, 4), reason="this Triton's interpreter needs NumPy < 2.4"
)
def test_row_packing_equals_plain_packing_and_takes_rows_in_turn() -> None:
    with interpreting_pool(1) as pool:
        [launches] = pool.run(counted_launches, CASES)
    assert any(blocks > 4 for _, blocks in launches)
    assert max(count for count, _ in launches) <= 4, "launches must not grow with blocks"


def test_outputs_are_merged_by_one_warp(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel reads a row's LSEs and then overwrites them, so with several warps a late warp could read what an
    early one wrote.
    """
    asked = {}

    class Launched:
        def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
            return lambda *arguments, **options: asked.update(options)

    monkeypatch.setattr(row_kernels, "_merge", Launched())
    row_kernels.merge_rows(*(torch.zeros(8) for _ in range(4)), torch.zeros(11, 1, dtype=torch.int64), 1, 8)
    assert asked == {"num_warps": 1}

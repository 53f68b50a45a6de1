"""Packing on a GPU: speed of copying rows, placing them on shelves and merging them, and the bytes simulated for it.

``python benchmarks/packing_gpu.py [--json FILE]`` runs on a GPU machine. A stage is made by hand: a number of tokens of
one kind of piece, 32 / 8 heads of 128 in bf16, in messages of several peers. The executor's launches for it are queued
behind other work, so that the host is ahead, and timed between events: what a repeat adds to a queue of repeats. Rows
are contiguous, scattered in runs of 64, or only some heads of each, or all messages bring the same rows. Before it is
timed, what a stage's messages leave on the shelves is compared with what the plain packing leaves, bit by bit unless
outputs are merged.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from flexcp.executor.exchange.arena import Buffers
from flexcp.executor.run.message_layout import Shelves, Types, new_inputs, new_results, part_view, types_of
from flexcp.executor.run.message_parts import message_bytes, message_parts
from flexcp.executor.run.packing import FieldPacking
from flexcp.executor.run.rank_program import Block, Message, RankProgram, Rows, Shelf, Slot
from flexcp.executor.run.row_packing import RowPacking
from flexcp.measure.calibrate.kernels import keep_busy
from flexcp.plan.memory import KEYS, QUERIES, Layout
from flexcp.shape import OUTPUTS, QUERY_SIDED, Kind, Shape

SHAPE = Shape(32, 8, 128, 128)
RUN, REPEATS = 64, 7
QUEUED = 8
"""How many repeats are queued after a first one."""
TOKENS = (256, 2048, 16_384)
KINDS = (
    (Kind.Q, False),
    (Kind.KV, False),
    (Kind.O, False),
    (Kind.O, True),
    (Kind.DQ, True),
    (Kind.DKV, False),
    (Kind.DKV, True),
)


@dataclass(frozen=True)
class Stage:
    """Tokens of one kind that are exchanged with some peers, with all heads or one of ``parts`` of them."""

    kind: Kind
    partial: bool
    tokens: int
    peers: int
    scattered: bool
    parts: int
    shared: bool = False

    def message(self, peer: int, order: np.ndarray) -> Message:
        """Return the message of one peer, which is sent and received."""
        runs = self.tokens // RUN // self.peers
        rows: Rows = slice(0, runs * RUN) if self.shared else slice(peer * runs * RUN, (peer + 1) * runs * RUN)
        if self.scattered:
            chosen = np.sort(order[peer * runs : (peer + 1) * runs])
            rows = (chosen[:, None] * RUN + np.arange(RUN)).reshape(-1)
        side = QUERIES if self.kind in QUERY_SIDED else KEYS
        heads = (SHAPE.heads if side == QUERIES else SHAPE.kv_heads) // self.parts
        return Message(peer + 1, (Block(self.kind, side, rows, runs * RUN, 0, heads, self.partial),))


def stages() -> list[Stage]:
    """Return all stages that are timed."""
    found = []
    for tokens in TOKENS:
        for kind, partial in KINDS:
            for peers, scattered, parts in ((1, False, 1), (min(8, tokens // RUN // 2), True, 1), (4, False, 8)):
                found.append(Stage(kind, partial, tokens, peers, scattered, parts))
        if tokens >= 8 * RUN:
            found += [Stage(kind, True, tokens, 8, False, 1, shared=True) for kind in (Kind.O, Kind.DQ, Kind.DKV)]
    return found


def measure(stage: Stage) -> dict[str, float]:
    """Return bytes, microseconds and GB/s of packing and unpacking a stage;
    bytes are counted as in :mod:`flexcp.simulator.copies`.
    """
    device, backward = torch.device("cuda"), stage.kind in (Kind.DQ, Kind.DKV)
    types = types_of(torch.empty(0, dtype=torch.bfloat16, device=device))
    order = np.random.default_rng(0).permutation(stage.tokens // RUN)
    messages = [stage.message(peer, order) for peer in range(stage.peers)]
    both = (Shelf(QUERIES, stage.tokens, 0, SHAPE.heads, 0), Shelf(KEYS, stage.tokens, 0, SHAPE.kv_heads, 0))
    slot = Slot(receive=messages, send=messages)
    program = RankProgram(both, (slot,), Layout(0, {}), (([], []),), (0,), {}, 0)
    shelves = {
        n: new_inputs(s, backward, SHAPE, types) | new_results(s, backward, SHAPE, types) for n, s in enumerate(both)
    }
    packing, sizes = RowPacking(program, SHAPE, types), [(m.peer, message_bytes(m, SHAPE)) for m in messages]
    buffers = Buffers.alone(sizes, device)
    compare(packing, FieldPacking(program, SHAPE, types), buffers, shelves, messages, types)
    wire, output = sum(size for _, size in sizes), stage.kind in OUTPUTS
    whole = sum(m.blocks[0].count * (m.blocks[0].h1 - m.blocks[0].h0) for m in messages)
    kept = whole * int(SHAPE.bytes_per_token_head()[stage.kind, 1]) if output else wire
    target = kept // stage.peers if stage.shared else kept
    row: dict[str, float] = {}
    for name, size, work in (
        ("pack", wire + kept, lambda: packing.pack(0, buffers, shelves)),
        ("take in", wire + (1 + output) * target, lambda: packing.unpack(0, buffers, shelves)),
    ):
        us = timed(work)
        row |= {f"{name} MB": size / 1e6, f"{name} us": us, f"{name} GB/s": size / us / 1e3}
    return row


def compare(
    by_rows: RowPacking, plain: FieldPacking, buffers: Buffers, shelves: Shelves, messages: list[Message], types: Types
) -> None:
    """Raise if random messages leave other numbers on shelves by one packing than by the other."""
    generator = torch.Generator(types.device).manual_seed(0)
    for message, (_, memory) in zip(messages, buffers.messages, strict=True):
        for part in message_parts(message, SHAPE):
            view = part_view(part, memory, types)
            view.copy_(torch.randn(view.shape, generator=generator, device=types.device))
    left = []
    for packing in (by_rows, plain):
        copies = {n: {name: x.clone() for name, x in fields.items()} for n, fields in shelves.items()}
        packing.unpack(0, buffers, copies)
        left.append(copies)
    merged = messages[0].blocks[0].kind == Kind.O
    for number, fields in left[0].items():
        for name, found in fields.items():
            expected = left[1][number][name]
            bounds = {"atol": 1e-5, "rtol": 1e-5} if merged else {"atol": 0.0, "rtol": 0.0}
            torch.testing.assert_close(found, expected, equal_nan=True, **bounds)


def timed(work: Callable[[], None]) -> float:
    """Return the median microseconds that a repeat of the work adds to a queue of repeats."""
    work()
    samples = [(_queued(work, 1 + QUEUED) - _queued(work, 1)) / QUEUED for _ in range(REPEATS)]
    return float(np.median(samples))


def _queued(work: Callable[[], None], count: int) -> float:
    """Return the microseconds of ``count`` repeats that the host has queued before the first one begins."""
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    keep_busy()
    first.record()
    for _ in range(count):
        work()
    last.record()
    torch.cuda.synchronize()
    return first.elapsed_time(last) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = []
    for stage in stages():
        found = measure(stage)
        rows.append({**asdict(stage), "kind": stage.kind.name, **found})
        how = "scattered" if stage.scattered else "the same rows" if stage.shared else "together"
        words = f"{stage.kind.name:4} partial={stage.partial!s:5} {stage.tokens:6} tokens {stage.peers} peers"
        print(
            f"{words} {how} 1/{stage.parts} heads",
            *(f"{name} {value:.1f}" for name, value in found.items()),
            sep="  ",
            flush=True,
        )
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"device": torch.cuda.get_device_name(), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()

"""Proves that a row which a work list finishes is written by the last list that adds to it, and that nothing reads it
or adds to it afterwards.

The CPU kernel is replaced by one that can begin and finish rows: it clears the rows it begins, and writes the rows it
finishes to the rounded output and NaN to their sums. A row that is begun too late, or finished too early, twice or
never, therefore changes the output; otherwise the output equals the plain kernel's bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import flexcp
from flexcp import masks
from flexcp.executor.kernels import Ints, Settings, cpu
from flexcp.executor.run.finished_rows import finished_rows
from flexcp.executor.run.rank_program import Message, rank_program
from flexcp.measure.ranks import RankPool
from flexcp.plan.memory import QUERIES
from flexcp.plan.plan import Plan
from flexcp.shape import Kind

LENGTHS = [33, 1, 50, 2, 8]
HEADS, KV_HEADS, HEAD_DIM, V_HEAD_DIM = 4, 2, 8, 6
NO_ROWS = np.zeros((0, 2), np.int64)


@dataclass(frozen=True)
class Listed:
    slices: Ints
    begins: Ints
    finishes: Ints


def plan_for(ranks: int, strategy: str, mask: masks.Mask | None = None) -> Plan:
    where = flexcp.cluster("cpu", 1, ranks)
    planner = flexcp.Planner(HEADS, KV_HEADS, HEAD_DIM, V_HEAD_DIM, "float64", where, strategy=strategy)
    return planner(LENGTHS, mask or masks.causal())


@contextmanager
def finishing() -> Iterator[list[int]]:
    """Make the CPU kernel finish rows; yields a list of how many rows each work list finished."""
    plain, rows = cpu.forward, []

    def prepare(slices: Ints, *sizes: Any, begins: Ints = NO_ROWS, finishes: Ints = NO_ROWS) -> Listed:
        return Listed(slices, begins, finishes)

    def forward(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        work: Listed,
        settings: Settings,
        out: Tensor,
        lse: Tensor,
        finished_THV: Tensor | None = None,
    ) -> None:
        if finished_THV is None:
            plain(q, k, v, work.slices, settings, out, lse)
            return
        for first, last in work.begins.tolist():
            out[first:last], lse[first:last] = 0.0, -torch.inf
        plain(q, k, v, work.slices, settings, out, lse)
        rows.append(int((work.finishes[:, 1] - work.finishes[:, 0]).sum()))
        for first, last in work.finishes.tolist():
            finished_THV[first:last] = out[first:last]
            out[first:last] = torch.nan

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "FINISHES", True, raising=False)
        patch.setattr(cpu, "prepare", prepare)
        patch.setattr(cpu, "forward", forward)
        yield rows


def outputs(group: dist.ProcessGroup, plan: Plan) -> dict[str, Any]:
    """Return whether the rank's output equals the plain kernel's, and the rows that each of its work lists finished."""
    plain = output_of(flexcp.bind(plan, group))
    with finishing() as rows:
        found = output_of(flexcp.bind(plan, group))
    return {"same": bool(np.array_equal(plain, found)), "rows": rows, "own": len(plain)}


def output_of(step: Any) -> np.ndarray:
    generator = torch.Generator().manual_seed(0)
    sizes = ((HEADS, HEAD_DIM), (KV_HEADS, HEAD_DIM), (KV_HEADS, V_HEAD_DIM))
    streams = (torch.randn(step.plan.batch.tokens, *size, dtype=torch.float64, generator=generator) for size in sizes)
    return flexcp.attention(*(step.shard(stream) for stream in streams), step).numpy()


@pytest.mark.parametrize(
    ("strategy", "ranks"),
    [
        ("ring", 3),
        ("zigzag", 4),
        ("groups", 4),
        ("blocks", 3),
        ("blocks", 4),
        ("ulysses", 2),
        ("usp:2,2", 4),
        ("hypergraph", 3),
    ],
)
def test_finished_rows_are_what_sums_come_to(pool: RankPool, strategy: str, ranks: int) -> None:
    """A rank finishes all rows and heads that do not arrive complete, unless parts of sums arrive: then it finishes
    none.
    """
    if strategy == "hypergraph":
        pytest.importorskip("mtkahypar")
    plan = plan_for(ranks, strategy)
    found = pool.run(outputs, plan, ranks=ranks)
    assert all(rank["same"] for rank in found)
    transfers = plan.programs[0][0].transfers
    arriving = transfers.take(transfers.kind == Kind.O)
    parts = set(arriving.target[arriving.partial == 1].tolist())
    if strategy == "ulysses":  # each rank computes its own heads of all rows
        assert not parts and len(arriving) == ranks * (ranks - 1)
        assert [sum(rank["rows"]) for rank in found] == [rank["own"] for rank in found]
    elif strategy in ("ring", "zigzag"):
        assert len(arriving) == 0
    finished = [sum(rank["rows"]) for rank in found]
    assert all((count == 0) == (number in parts) for number, count in enumerate(finished))


def test_rows_of_which_parts_arrive_are_finished_by_nobody() -> None:
    program = rank_program(plan_for(4, "ulysses"), 0, 0, False)
    arriving = [block for slot in program.slots for message in slot.receive for block in message.blocks]
    assert finished_rows(program) is not None
    part = replace(arriving[0], kind=Kind.O, shelf=QUERIES, rows=slice(0, 1), count=1, partial=True, laid=False)
    program.slots[-1].receive.append(Message(1, (part,)))
    assert finished_rows(program) is None


def test_a_row_that_sees_no_key_is_finished_by_nobody() -> None:
    half = masks.from_slices(20, [(0, 10, 0, 10, None, 0)])
    plan = flexcp.Planner(4, 2, 8, cluster=flexcp.cluster("cpu", 1, 1))([20], half)
    assert finished_rows(rank_program(plan, 0, 0, False)) is None


def test_every_row_of_a_ring_is_begun_and_finished_once() -> None:
    plan = plan_for(4, "ring")
    for rank in range(4):
        found = finished_rows(rank_program(plan, rank, 0, False))
        assert found is not None
        for runs in ([x.begins for slot in found for x in slot], [x.finishes for slot in found for x in slot]):
            rows = np.concatenate([np.arange(a, b) for a, b in np.concatenate(runs).tolist()])
            assert sorted(rows.tolist()) == list(range(int(plan.placement.tokens[rank])))

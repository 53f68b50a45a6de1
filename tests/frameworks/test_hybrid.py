"""Proves what hybrid models need: rows in stream order for layers that read in order, and back, differentiably.

A running sum over the stream stands for every recurrent layer. Rows move between the plan's layout and the contiguous
one, the zigzag one, and one that a user lists; plans place tokens freely, in a fixed layout, or with pads.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist

import flexcp
from flexcp.measure.ranks import RankPool
from flexcp.plan.plan import Plan

LENGTHS = [19, 1, 30, 4]
TOKENS = sum(LENGTHS)


def plan_for(ranks: int, strategy: str = "blocks", **options: object) -> Plan:
    planner = flexcp.Planner(2, 2, 4, dtype="float64", cluster=flexcp.cluster("cpu", 1, ranks), strategy=strategy)
    return planner(LENGTHS, flexcp.causal(), **options)


def stream() -> torch.Tensor:
    return torch.randn(TOKENS, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def there_and_back(group: dist.ProcessGroup, plan: Plan, to: object) -> tuple[np.ndarray, bool, bool]:
    step = flexcp.bind(plan, group)
    full = stream()
    x = step.shard(full).requires_grad_()
    moved = step.relayout(x, to)
    weights = torch.arange(len(moved), dtype=torch.float64)[:, None]
    back = step.restore(moved * weights, to)
    real = step.indices >= 0
    (step.restore(moved, to) * 2 + back)[real].sum().backward()
    place = step.restore(weights.expand(-1, 3), to)
    same = torch.equal(step.restore(moved, to)[real], x[real]) and torch.equal(back[real], (x * place)[real])
    grad = torch.equal(x.grad[real], (2 + place)[real]) and not bool(x.grad[~real].any())
    return moved.detach().numpy(), same, grad


@pytest.mark.parametrize(
    ("ranks", "options", "to"),
    [
        (1, {}, "contiguous"),
        (3, {}, "contiguous"),
        (4, {"tokens": "equal", "pad_to": 8}, "contiguous"),
        (2, {"layout": "contiguous"}, "zigzag"),
        (3, {"strategy": "zigzag"}, [list(range(0, TOKENS, 2)), [], list(range(TOKENS - 1, 0, -2))]),
    ],
)
def test_rows_go_to_another_layout_and_come_back(pool: RankPool, ranks: int, options: dict, to: object) -> None:
    answers = pool.run(there_and_back, plan_for(ranks, **options), to, ranks=ranks)
    if to == "contiguous":
        maps = np.array_split(np.arange(TOKENS), ranks)
    elif to == "zigzag":
        parts = np.array_split(np.arange(TOKENS), 2 * ranks)
        maps = [np.concatenate([parts[r], parts[-1 - r]]) for r in range(ranks)]
    else:
        maps = to
    for (moved, same, grad), index in zip(answers, maps, strict=True):
        np.testing.assert_array_equal(moved, stream().numpy()[np.asarray(index, int)])
        assert same
        assert grad


def recurrent_in_between(group: dist.ProcessGroup, plan: Plan) -> list[np.ndarray]:
    """A running sum of the stream between two moves: each rank adds what the ranks before it summed."""
    step = flexcp.bind(plan, group)
    x = step.shard(stream()).requires_grad_()
    rows = step.relayout(x).cumsum(0)
    ends = [torch.zeros(3, dtype=torch.float64) for _ in range(step.cp_size)]
    dist.all_gather(ends, rows[-1].detach().clone() if len(rows) else ends[0], group=group)
    rows = rows + sum(ends[: step.cp_rank], torch.zeros(3, dtype=torch.float64))
    return [step.gather(step.restore(rows).detach()).numpy()]


def test_a_layer_that_reads_in_order_sees_the_stream(pool: RankPool) -> None:
    for (found,) in pool.run(recurrent_in_between, plan_for(3), ranks=3):
        np.testing.assert_allclose(found, stream().cumsum(0).numpy(), atol=1e-12)


def test_the_index_map_says_what_a_rank_holds(pool: RankPool) -> None:
    plan = plan_for(1)
    step = flexcp.bind(plan)
    assert torch.equal(stream()[step.indices], step.shard(stream()))
    starts = torch.from_numpy(plan.batch.starts)
    documents = torch.searchsorted(starts, step.indices, right=True) - 1
    assert torch.equal(step.positions, step.indices - starts[documents])


def test_layouts_that_are_none_are_refused() -> None:
    step = flexcp.bind(plan_for(1))
    with pytest.raises(ValueError, match=r"'free' is the plan's own layout"):
        step.relayout(stream(), "free")
    with pytest.raises(ValueError, match=r"holds 54 tokens in the layout 'contiguous'.*53 rows"):
        step.restore(stream()[1:])

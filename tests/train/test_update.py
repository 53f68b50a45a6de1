"""Tests of the optimizer update of the training loop: gradients are summed over ranks, also of parameters that a rank
did not use, so that all ranks keep the same weights.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from flexcp.measure.ranks import RankPool
from flexcp.train.update import sum_gradients, total_loss, update


def trained(group: dist.ProcessGroup | None, rank: int) -> tuple[list[float], float, bool]:
    """Update two weights once with learning rate 1; return the weights, the total loss, and whether gradients are
    cleared.

    The loss of a rank is (rank + 1) times the first weight; that of rank 0 also has twice the second weight.
    """
    weights = [nn.Parameter(torch.tensor(5.0)), nn.Parameter(torch.tensor(7.0))]
    optimizer = torch.optim.SGD([{"params": weights[:1]}, {"params": weights[1:]}], lr=1.0)
    loss = (rank + 1) * weights[0] + (2 * weights[1] if rank == 0 else 0)
    update(optimizer, loss, group)
    return [float(w.detach()) for w in weights], total_loss(loss, group), all(w.grad is None for w in weights)


def on_rank(group: dist.ProcessGroup) -> tuple[list[float], float, bool]:
    return trained(group, dist.get_rank(group))


def test_shares_are_summed(pool: RankPool) -> None:
    for found in pool.run(on_rank, ranks=3):
        assert found == ([5.0 - (1 + 2 + 3), 7.0 - 2], (1 + 2 + 3) * 5.0 + 2 * 7.0, True)


def test_a_process_alone_sums_nothing() -> None:
    assert trained(None, 0) == ([4.0, 5.0], 19.0, True)
    unused = nn.Parameter(torch.ones(2))
    sum_gradients([unused], None)
    assert unused.grad is not None
    assert unused.grad.tolist() == pytest.approx([0.0, 0.0])

"""Proves that ranks which post all inputs before any work compute what one rank computes alone, forward and backward,
and send the plan's bytes; on real processes, one and several ranks a node.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist

import flexcp
from flexcp.measure.ranks import RankPool
from flexcp.plan.plan import Plan
from flexcp.schedule import analysis, inputs_first

LENGTHS = [6000, 500, 64]
HEADS, KV_HEADS, HEAD_DIM = 2, 1, 8


def planned(strategy: str, nodes: int, ranks: int) -> Plan:
    machine = flexcp.cluster("h100", nodes, ranks)
    planner = flexcp.Planner(HEADS, KV_HEADS, HEAD_DIM, dtype="float64", cluster=machine, strategy=strategy)
    return planner(LENGTHS, flexcp.causal())


@pytest.fixture
def always_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Post all inputs first in every pass, what crosses nodes in three parts, although documents are short."""
    monkeypatch.setattr(inputs_first, "CUTS", ((3, 1),))
    monkeypatch.setattr(analysis, "FLATTERED_RELAYS_PERMILLE", 1 << 30)
    monkeypatch.setattr(analysis, "well_hidden", lambda *_: False)
    monkeypatch.setattr(analysis, "faster_way", lambda stages, another, up_to: another._replace(ns=stages.ns))


def on_ranks(group: dist.ProcessGroup | None, plan: Plan) -> tuple[list[np.ndarray], list[int]]:
    """Return output, dq, dk and dv of all tokens, and the bytes that this rank sent to each rank in attention."""
    step = flexcp.bind(plan, group)
    draw = torch.Generator().manual_seed(0)
    stream = [torch.randn(sum(LENGTHS), h, HEAD_DIM, dtype=torch.float64, generator=draw) for h in (2, 1, 1, 2)]
    q, k, v, do = (step.shard(x) for x in stream)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = flexcp.attention(*leaves, step)
    assert isinstance(out, torch.Tensor)
    (out * do).sum().backward()
    sent = [sum(both) for both in zip(*step.sent_bytes.values(), strict=True)]
    return [step.gather(x).numpy() for x in (out.detach(), *(x.grad for x in leaves))], sent


@pytest.mark.usefixtures("always_first")
@pytest.mark.parametrize("strategy", ["groups:team=1", "blocks"])
@pytest.mark.parametrize("nodes, ranks", [(3, 1), (2, 2)])
def test_ranks_that_post_all_inputs_first_are_right(pool: RankPool, nodes: int, ranks: int, strategy: str) -> None:
    plan = planned(strategy, nodes, ranks)
    for program in plan.programs[0]:
        inputs = np.unique(program.transfers.stage[~program.transfers.is_output])
        assert len(inputs) >= 3 and not program.execution.posted[inputs].any(), "the example posts nothing early"
    exact, _ = on_ranks(None, planned("dp", 1, 1))
    for rank, (found, sent) in enumerate(pool.run(on_ranks, plan, ranks=plan.ranks)):
        for name, mine, whole in zip(("out", "dq", "dk", "dv"), found, exact, strict=True):
            np.testing.assert_allclose(mine, whole, atol=1e-11, rtol=1e-11, err_msg=name)
        assert sent == (plan.bytes(False) + plan.bytes(True))[rank].tolist()

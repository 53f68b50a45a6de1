"""Proves the edges of token trees (a token and one that follows it) against hand-made values and against the sequences
laid out one by one: which token follows which, counts, weights, and log-probabilities computed in chunks.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import flexcp
from flexcp.executor.losses import log_probs as chunked
from flexcp.executor.losses.edges import Edges
from flexcp.executor.step import Step
from flexcp.measure.ranks import RankPool
from flexcp.plan.plan import Plan

TREE = flexcp.tree([-1, 0, 1, 0], [2, 1, 2, 3], ends=[3, 1, 2, 3])
"""Tokens 0 1 | 2 | 3 4 and 5 6 7; sequences 0 1 5 6 7 (twice), 0 1 2 and 0 1 2 3 4."""
PATHS = [[3, 4, 8, 9, 10], [3, 4, 5], [3, 4, 5, 6, 7], [3, 4, 8, 9, 10]]
"""The tree's sequences when the tree follows a plain document of 3 tokens."""
IDS = torch.tensor([5, 1, 2, 9, 8, 7, 6, 5, 4, 3, 2])
LOGITS = torch.randn(11, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def planned(ranks: int = 1, strategy: str = "blocks", **options: Any) -> Plan:
    where = flexcp.cluster("cpu", 1, ranks)
    return flexcp.Planner(2, 1, 8, dtype="float64", cluster=where, strategy=strategy)(
        [3, 8], [flexcp.causal(), TREE], **options
    )


def step_and_edges(ids: Tensor = IDS, **options: Any) -> tuple[Step, Edges]:
    step = flexcp.bind(planned(**options))
    return step, step.edges(ids)


def test_edges_by_hand() -> None:
    _, edges = step_and_edges(layout="contiguous")
    found = list(
        zip(*(x.tolist() for x in (edges.rows, edges.parents, edges.children, edges.labels, edges.counts)), strict=True)
    )
    assert found == [
        (0, 0, 1, 1, 1),
        (1, 1, 2, 2, 1),
        (3, 3, 4, 8, 4),
        (4, 4, 5, 7, 2),
        (4, 4, 8, 4, 2),
        (5, 5, 6, 6, 1),
        (6, 6, 7, 5, 1),
        (8, 8, 9, 3, 2),
        (9, 9, 10, 2, 2),
    ]
    assert edges.sequences == 5 and edges.lengths.tolist() == [3, 5, 3, 5, 5]


def test_pairs_are_every_position_of_every_sequence_once() -> None:
    _, edges = step_and_edges()
    edge, sequence, position = edges.pairs()
    wanted = {(0, p, t) for p, t in enumerate([0, 1, 2]) if p}
    wanted |= {(s + 1, p, t) for s, path in enumerate(PATHS) for p, t in enumerate(path) if p}
    found = list(zip(sequence.tolist(), position.tolist(), edges.children[edge].tolist(), strict=True))
    assert set(found) == wanted and len(found) == len(wanted)


@pytest.mark.parametrize("ids", [IDS, torch.where(IDS % 3 == 0, -100, IDS)], ids=["all", "some"])
@pytest.mark.parametrize("per", ["token", "sequence", "sum"])
@pytest.mark.parametrize("given", ["nothing", "advantages", "masks", "both"])
def test_weights_are_sums_over_sequences(ids: Tensor, per: Any, given: str) -> None:
    rng = np.random.default_rng(0)
    paths = [[0, 1, 2], *PATHS]
    advantages = rng.normal(size=5)
    masks = [torch.from_numpy(rng.integers(0, 2, len(path))) for path in paths]
    _, edges = step_and_edges(ids)
    found = edges.weights(
        advantages.tolist() if given in ("advantages", "both") else None,
        masks if given in ("masks", "both") else None,
        per=per,
    )
    a = advantages if given in ("advantages", "both") else np.ones(5)
    m = [x.tolist() for x in masks] if given in ("masks", "both") else [[1] * len(path) for path in paths]
    m = [
        [w * (int(ids[t]) != -100) * (p > 0) for p, (t, w) in enumerate(zip(path, w_s, strict=True))]
        for path, w_s in zip(paths, m, strict=True)
    ]
    counts = [sum(x) for x in m]
    wanted = dict.fromkeys(edges.children.tolist(), 0.0)
    for s, path in enumerate(paths):
        for p, t in enumerate(path[1:], 1):
            divisor = {"token": sum(counts), "sequence": counts[s] * sum(n > 0 for n in counts), "sum": 1}[per]
            wanted[t] += a[s] * m[s][p] / max(1, divisor)
    assert found.tolist() == pytest.approx([wanted[t] for t in edges.children.tolist()], abs=1e-14)


def on_rank(group: dist.ProcessGroup, plan: Plan) -> tuple[list[Tensor], Tensor, Tensor, int]:
    """Return (log-probabilities by sequence, this rank's share of the mean loss, the logits' gradient, number of
    pairs).
    """
    step = flexcp.bind(plan, group)
    logits = step.shard(LOGITS).requires_grad_()
    edges = step.edges(IDS)
    loss = step.loss(logits, edges, without_attention=True)
    loss.backward()
    assert logits.grad is not None
    values = step.gather_sequences(step.log_probs(logits, edges), edges)
    return [v.detach() for v in values], loss.detach(), step.gather(logits.grad), len(edges.pairs()[0])


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("options", [{}, {"layout": "zigzag"}, {"tokens": "equal", "pad_to": 3}], ids=str)
def test_log_probs_and_losses_of_ranks(pool: RankPool, ranks: int, options: dict[str, Any]) -> None:
    full = LOGITS.clone().requires_grad_()
    values = [
        torch.cat([full.new_zeros(1), torch.log_softmax(full, -1)[path[:-1], IDS[path[1:]]]])
        for path in ([0, 1, 2], *PATHS)
    ]
    right = -torch.cat(values).sum() / sum(len(v) - 1 for v in values)
    right.backward()
    answers = pool.run(on_rank, planned(ranks, **options), ranks=ranks)
    assert sum(pairs for *_, pairs in answers) == sum(len(v) - 1 for v in values)
    assert torch.stack([loss for _, loss, _, _ in answers]).sum().item() == pytest.approx(right.item(), abs=1e-14)
    for found, _, grad, _ in answers:
        for mine, wanted in zip(found, values, strict=True):
            torch.testing.assert_close(mine, wanted.detach(), atol=1e-14, rtol=0)
        torch.testing.assert_close(grad, full.grad, atol=1e-14, rtol=0)


def test_log_probs_in_chunks_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows without an edge, with several edges, and with the same edge twice, for chunks of several sizes."""
    rows, labels = torch.tensor([0, 0, 2, 2, 2, 6]), torch.tensor([1, 1, 0, 3, 3, 11])
    scale = torch.arange(1.0, 7, dtype=torch.float64)
    full = LOGITS.clone().requires_grad_()
    right = torch.log_softmax(full, -1)[rows, labels]
    (right * scale).sum().backward()
    for size in (1, 12, 25, 36, 1 << 20):
        monkeypatch.setattr(chunked, "CHUNK", size)
        mine = LOGITS.clone().requires_grad_()
        found = chunked.log_probs(mine, rows, labels)
        (found * scale).sum().backward()
        torch.testing.assert_close(found, right, atol=1e-14, rtol=0)
        torch.testing.assert_close(mine.grad, full.grad, atol=1e-14, rtol=0)


def test_low_precision_logits_are_widened() -> None:
    step, edges = step_and_edges()
    logits = step.shard(LOGITS).bfloat16().requires_grad_()
    found = step.log_probs(logits, edges)
    assert found.dtype == torch.float32
    found.sum().backward()
    assert logits.grad is not None and logits.grad.dtype == torch.bfloat16


def test_a_share_may_count_a_row_once_for_each_sequence(pool: RankPool) -> None:
    """The prompt's rows belong to all sequences, so a rank can have more pairs of edge and sequence than rows."""
    plan = planned(2, layout="contiguous")
    assert pool.run(share_of_pairs, plan, ranks=2) == [True, True]


def share_of_pairs(group: dist.ProcessGroup, plan: Plan) -> bool:
    step = flexcp.bind(plan, group)
    logits = step.shard(LOGITS)
    edges = step.edges(IDS)
    edge, _, _ = edges.pairs()
    total = -step.log_probs(logits, edges)[edge].sum()
    shared = step.share(total, len(edge), without_attention=True)
    return bool(torch.isclose(shared, step.loss(logits, edges, without_attention=True), atol=1e-14))


def test_what_is_wrong_is_told() -> None:
    step, edges = step_and_edges()
    logits = step.shard(LOGITS)
    other = flexcp.bind(planned())
    with pytest.raises(ValueError, match="got the edges of another step"):
        other.loss(logits, edges, without_attention=True)
    with pytest.raises(ValueError, match=r"weights are a tensor of one number for each of this rank's 9 edges"):
        step.loss(logits, edges, weights=torch.ones(3), without_attention=True)
    with pytest.raises(ValueError, match=r"got \(1, 11, 12\); pass logits\[0\]"):
        step.log_probs(logits[None], edges)
    with pytest.raises(ValueError, match="got logits of 10 rows, but this rank keeps 11 tokens"):
        step.log_probs(logits[1:], edges)
    with pytest.raises(ValueError, match=r"has the id \d+, outside of the vocabulary 0\.\.4"):
        step.log_probs(logits[:, :5], IDS)
    with pytest.raises(ValueError, match=r"\[4\] weights for the 5 sequences"):
        edges.weights([1.0] * 4)
    with pytest.raises(ValueError, match="sequence 1 has 5 tokens, but its weights have shape"):
        edges.weights(tokens=[[1] * 3, [1] * 4, [1] * 3, [1] * 5, [1] * 5])
    with pytest.raises(ValueError, match="per='mean' is none of"):
        edges.weights(per="mean")  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="its attention never ran"):
        step.loss(logits, edges)
    with pytest.raises(ValueError, match="weights are for edges"):
        plain = flexcp.bind(flexcp.Planner(2, 1, 8, cluster=flexcp.cluster("cpu", 1, 1))([11]))
        plain.loss(logits, IDS, weights=torch.ones(11), without_attention=True)


def test_masks_that_disagree_about_sequences_are_refused() -> None:
    where = flexcp.cluster("cpu", 1, 1)
    masks = {"a": (flexcp.tree([-1, 0, 0], [4, 2, 3]), 1), "b": (flexcp.tree([-1, 0, 0], [4, 2, 3], ends=[2, 1]), 1)}
    step = flexcp.bind(flexcp.Planner(2, 1, 8, dtype="float64", cluster=where)([9], masks=masks))
    assert step.positions.tolist() == [0, 1, 2, 3, 4, 5, 4, 5, 6]
    with pytest.raises(ValueError, match="disagree about its sequences"):
        step.edges(torch.arange(9))

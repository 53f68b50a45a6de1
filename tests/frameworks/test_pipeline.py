"""Tests that plans go with their micro-batches through two stages of torch's pipeline: losses and gradients are those
of one process.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from megatron_runs import Case, alone, check, planned
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

import flexcp
from flexcp.frameworks.pipeline import PlannedMicroBatches, PlannedStage
from flexcp.measure.ranks import RankPool
from flexcp.train.gpt import Gpt, GptConfig

CONFIG = GptConfig(vocabulary=32, layers=2, heads=4, kv_heads=2, head_dim=8)
LENGTHS = [41, 3, 17, 1, 9, 26, 2, 12]
ROOM = 48
"""Tokens of a micro-batch on all ranks that share a plan."""
SCHEDULES = {"1F1B": Schedule1F1B, "GPipe": ScheduleGPipe}


def model() -> Gpt:
    torch.manual_seed(0)
    return Gpt(CONFIG).double()


def documents() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(CONFIG.vocabulary, (n,), generator=generator) for n in LENGTHS]


def planner(ranks: int) -> flexcp.Planner:
    where = flexcp.cluster("cpu", 1, ranks)
    return flexcp.Planner(4, 2, 8, dtype="float64", cluster=where, strategy="blocks", max_tokens_per_rank=ROOM // ranks)


def one_process() -> tuple[float, dict[str, np.ndarray]]:
    """Return loss and gradients without flexcp, document by document."""
    gpt, given = model(), [d for d in documents() if len(d) > 1]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out[0].transpose(0, 1)

    losses = [
        nn.functional.cross_entropy(gpt(d, torch.arange(len(d)), attend)[:-1], d[1:], reduction="sum") for d in given
    ]
    loss = sum(losses, torch.zeros(())) / sum(len(d) - 1 for d in given)
    loss.backward()
    return float(loss.detach()), {n: p.grad.numpy() for n, p in gpt.named_parameters()}


class Part(nn.Module):
    """Half of the model: embedding and a block, or a block and the head, which is a copy of the embedding."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        gpt = model()
        self.stage, self.embedding, self.block = stage, gpt.embedding, gpt.blocks[stage]
        self.norm = gpt.norm if stage else nn.Identity()

    def forward(self, x: Tensor, step: flexcp.Step) -> Tensor:
        rows = x[0] if self.stage else self.embedding(x[0])
        rows = self.block(rows, step.positions, lambda q, k, v: flexcp.attention(q, k, v, step))
        return (self.norm(rows) @ self.embedding.weight.T if self.stage else rows)[None]

    def full_names(self) -> dict[str, nn.Parameter]:
        return {n.replace("block.", f"blocks.{self.stage}."): p for n, p in self.named_parameters()}


def two_stages(
    group: dist.ProcessGroup, schedule: str, pool_size: int
) -> tuple[int, float, dict[str, np.ndarray], list[int]]:
    """Return this rank's stage, the loss (of the last stage), gradients summed over the ranks that share a plan by
    their names in the whole model, and this rank's tokens of each micro-batch.

    If there are more ranks than two stages need, the others run the same pipeline once more.
    """
    numbers = torch.arange(dist.get_world_size()).view(-1, 2, pool_size)
    _, stage, at = (numbers == dist.get_rank()).nonzero()[0].tolist()
    pool = dist.new_subgroups_by_enumeration(numbers.flatten(0, 1).tolist())[0]
    pipe = dist.new_subgroups_by_enumeration(numbers.transpose(1, 2).flatten(0, 1).tolist())[0]
    parts = planner(pool_size).micro_batches(LENGTHS, tokens="equal", pad_to=ROOM // pool_size)
    batches = PlannedMicroBatches(parts, pool)
    part = Part(stage)
    run = SCHEDULES[schedule](
        PipelineStage(PlannedStage(part), stage, 2, torch.device("cpu"), group=pipe),
        len(batches),
        loss_fn=batches.loss(documents()),
        scale_grads=False,
    )
    losses: list[Tensor] = []
    if stage == 0:
        run.step(batches.shard(documents()), **batches.keywords())
    else:
        run.step(target=batches.labels(documents()), losses=losses, **batches.keywords())
    loss = torch.stack([x.detach() for x in losses]).sum() if losses else torch.zeros((), dtype=torch.float64)
    gradients = {}
    for name, parameter in part.full_names().items():
        dist.all_reduce(parameter.grad, group=pool)
        gradients[name] = parameter.grad.numpy()
    dist.all_reduce(loss, group=pool)
    return stage, float(loss), gradients, [int(s.plan.placement.tokens[at]) for s in batches.steps]


def test_labels_that_are_left_out_do_not_count() -> None:
    """The first half of every document is a prompt, whose labels are -100."""
    batches = PlannedMicroBatches(planner(1).micro_batches(LENGTHS, tokens="equal", pad_to=ROOM))
    marked = [torch.cat([torch.full_like(d[: len(d) // 2], -100), d[len(d) // 2 :]]) for d in documents()]
    logits = torch.randn(len(batches), ROOM, CONFIG.vocabulary, dtype=torch.float64)
    labels, loss = batches.labels(marked), batches.loss(marked)
    found = sum(loss(x, y) for x, y in zip(logits, labels, strict=True))
    torch.testing.assert_close(found, torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()))


@pytest.mark.parametrize(("pool_size", "schedule"), [(1, "GPipe"), (2, "1F1B")])
def test_two_stages_equal_one_process(four: RankPool, pool_size: int, schedule: str) -> None:
    loss, gradients = one_process()
    results = four.run(two_stages, schedule, pool_size)
    for stage, found, _, counts in results:
        assert len(counts) > 2
        assert set(counts) == {ROOM // pool_size}
        if stage:
            np.testing.assert_allclose(found, loss, rtol=1e-12)
    first, last = results[0][2], results[2 * pool_size - 1][2]
    # The head is the embedding: both stages hold a copy, and the gradients of both copies are added.
    whole = first | last | {"embedding.weight": first["embedding.weight"] + last["embedding.weight"]}
    assert set(whole) == set(gradients)
    for name, wanted in gradients.items():
        np.testing.assert_allclose(whole[name], wanted, atol=1e-12, err_msg=name)


def test_megatron_stages_of_one_shape_equal_stock_megatron(four: RankPool) -> None:
    case = Case(pp=2, micro_batches=2, pad_to=40, strategy="blocks")
    own = four.run(alone, case, 2)[0]
    results = four.run(planned, case, 2, own[2])
    check(results, own)
    assert all(set(share.counts) == {40} for _, _, share in results)


def test_shapes_that_change_are_refused_with_the_way_out() -> None:
    parts: list[Any] = planner(1).micro_batches(LENGTHS)
    with pytest.raises(ValueError, match=r"tokens='equal', pad_to=\d+"):
        PlannedMicroBatches(parts)
    with pytest.raises(ValueError, match="at least 1 micro-batch"):
        PlannedMicroBatches([])

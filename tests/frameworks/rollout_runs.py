"""Functions that run on ranks in tests of shared rollouts; light to import (see parallel_runs.py)."""

from __future__ import annotations

import torch
import torch.distributed as dist
from leak_runs import made
from torch import Tensor

import flexcp

LENGTHS = [[9, 3, 1, 30], [2, 17, 5], [12]]
"""Lengths of the rollouts of each rank; the last rank has none in most micro-batches."""
CAP = 12


def rollouts(rank: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randint(64, (n,), generator=generator) for n in LENGTHS[rank]]


def weights(rank: int) -> list[Tensor]:
    """Return the weights of the loss, another one for every token."""
    return [torch.linspace(rank + 1, 2, len(x), dtype=torch.float64) for x in rollouts(rank)]


def learned_together(group: dist.ProcessGroup) -> tuple[list[list[int]], list[Tensor], list[Tensor]]:
    """Return the numbers of this rank's rollouts in each micro-batch, their log-probabilities in the caller's order,
    and gradients summed over ranks.
    """
    from flexcp.frameworks import huggingface
    from flexcp.frameworks.rollouts import shared_rollouts

    rank = dist.get_rank(group)
    model = made("gemma3")
    huggingface.turn_on(model)
    machine = flexcp.cluster("cpu", 1, group.size())
    planner = huggingface.planner(model, machine, strategy="blocks", max_tokens_per_rank=CAP)
    numbers, found = [], {}
    for part in shared_rollouts(rollouts(rank), planner, group, masks=huggingface.masks(model.config)):
        log_probs = part.log_probs(model(**part.inputs).logits[0], temperature=0.7)
        (log_probs.exp() * part.of(weights(rank))).sum().backward()
        numbers.append(part.rollouts)
        found |= dict(zip(part.rollouts, log_probs.detach().split(part.lengths), strict=True))
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    for gradient in gradients:
        dist.all_reduce(gradient, group=group)
    return numbers, [found[number] for number in range(len(found))], gradients


def learned_alone() -> tuple[list[list[Tensor]], list[Tensor]]:
    """Return the log-probabilities of all ranks' rollouts, and gradients, computed one rollout after another with
    Transformers' own attention.
    """
    model = made("gemma3")
    found: list[list[Tensor]] = []
    for rank in range(len(LENGTHS)):
        found.append([])
        for ids, weight in zip(rollouts(rank), weights(rank), strict=True):
            scores = torch.log_softmax(model(ids[None], use_cache=False).logits[0, :-1] / 0.7, -1)
            log_probs = torch.cat([torch.zeros(1, dtype=torch.float64), scores.gather(1, ids[1:, None])[:, 0]])
            (log_probs.exp() * weight).sum().backward()
            found[-1].append(log_probs.detach())
    return found, [p.grad for p in model.parameters() if p.grad is not None]

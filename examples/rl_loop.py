"""A policy-gradient loop of one's own, as RL trainers have it: rollouts in micro-batches,
one log-probability a token; ranks share them.

    torchrun --nproc-per-node 2 examples/rl_loop.py

Rollouts, advantages and old log-probabilities are made up. Every rank has rollouts of its own, and DDP averages
gradients.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import flexcp
import made_text
from flexcp.frameworks import huggingface
from flexcp.frameworks.rollouts import shared_rollouts


def rollouts(step: int, rank: int, ranks: int) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """This rank's rollouts of a step, with the advantage and the old log-probability of each token;
    the first tokens are prompts.
    """
    texts = made_text.prompts(16, seed=step)["prompt"]
    ids = [torch.tensor(made_text.tokenizer()(text)["input_ids"]) for text in texts]
    draw = torch.Generator().manual_seed(step)
    advantages = [torch.randn((), generator=draw) * (torch.arange(len(x)) >= 2) for x in ids]
    old = [-4 + 0.1 * torch.randn(len(x), generator=draw) for x in ids]
    mine = slice(rank * len(ids) // ranks, (rank + 1) * len(ids) // ranks)
    return ids[mine], advantages[mine], old[mine]


def main() -> list[dict[str, float]]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    if ranks > 1 and not dist.is_initialized():
        dist.init_process_group("gloo")
    rank = dist.get_rank() if ranks > 1 else 0
    inner = made_text.model()
    huggingface.turn_on(inner)
    planner = huggingface.planner(inner, flexcp.cluster("cpu", ranks_per_node=ranks), max_tokens_per_rank=128)
    model = DistributedDataParallel(inner) if ranks > 1 else inner
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    logs = []
    for number in range(options.steps):
        mine, advantages, old = rollouts(number, rank, ranks)
        count = torch.tensor(sum(len(x) for x in mine) / ranks)
        if ranks > 1:
            dist.all_reduce(count)
        logged = torch.zeros(())
        for part in shared_rollouts(mine, planner):
            log_probs = part.log_probs(model(**part.inputs).logits[0])
            before, advantage = part.of(old), part.of(advantages)
            ratio = torch.exp(log_probs - before)
            loss = -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).sum() / count
            loss.backward()
            logged += loss.detach() / ranks
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if ranks > 1:
            dist.all_reduce(logged)
        logs.append({"loss": float(logged), "grad_norm": float(norm)})
        if rank == 0:
            print(f"step {number} loss {logs[-1]['loss']:.6f} gradient norm {norm:.6f}")
    return logs


if __name__ == "__main__":
    main()

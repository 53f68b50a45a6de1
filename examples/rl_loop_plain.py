"""A policy-gradient loop of one's own, as RL trainers have it: rollouts in micro-batches,
one log-probability a token; before flexcp.

    python examples/rl_loop_plain.py

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
from torch.nn.utils.rnn import pad_sequence

import made_text


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
    model = DistributedDataParallel(inner) if ranks > 1 else inner
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    logs = []
    for number in range(options.steps):
        mine, advantages, old = rollouts(number, rank, ranks)
        count = torch.tensor(sum(len(x) for x in mine) / ranks)
        if ranks > 1:
            dist.all_reduce(count)
        logged = torch.zeros(())
        for start in range(0, len(mine), 4):
            ids = pad_sequence(mine[start : start + 4], batch_first=True)
            keep = pad_sequence([torch.ones_like(x) for x in mine[start : start + 4]], batch_first=True).bool()
            logits = model(input_ids=ids, attention_mask=keep).logits
            scores = torch.log_softmax(logits[:, :-1], -1).gather(2, ids[:, 1:, None])[..., 0]
            log_probs = torch.nn.functional.pad(scores, (1, 0))[keep]
            before, advantage = torch.cat(old[start : start + 4]), torch.cat(advantages[start : start + 4])
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

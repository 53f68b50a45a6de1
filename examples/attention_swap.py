"""Attention-only swap: a training script that already has its loader, labels, RoPE, optimizer and DDP,
and changes only how it attends.

    torchrun --nproc-per-node 4 examples/attention_swap.py

Every rank holds one contiguous part of the packed stream, as it did before. ``layout="contiguous"`` keeps it that way;
the plan only decides who computes what. The marked lines are all that is new. Nothing else of this file knows flexcp.

Ranks hold shares of one loss. DDP averages gradients, hence ``gradients="averaged"``; a loop that sums them itself
leaves it out. With a cross entropy of your own the rule is: this rank's sum / valid labels of all ranks, times the
number of ranks where gradients are averaged.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import rms_norm, silu
from torch.nn.parallel import DistributedDataParallel

import flexcp

VOCABULARY, WIDTH, LAYERS, HEADS, KV_HEADS = 128, 64, 2, 4, 2
HEAD_DIM = WIDTH // HEADS
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class Layer(nn.Module):
    """Attention and a gated MLP, each after a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * KV_HEADS) * HEAD_DIM, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, angles: Tensor, attend: Attend) -> Tensor:
        rows = self.qkv(rms_norm(x, (WIDTH,))).unflatten(1, (-1, HEAD_DIM))
        q, k, v = rows.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        x = x + self.out(attend(rotated(q, angles), rotated(k, angles), v).flatten(1))
        gate, value = self.up(rms_norm(x, (WIDTH,))).chunk(2, dim=1)
        return x + self.down(silu(gate) * value)


class Model(nn.Module):
    """A small language model on rows ``[tokens]`` of packed documents."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        x = self.embedding(tokens)
        angles = positions[:, None] * 10_000.0 ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
        for layer in self.layers:
            x = layer(x, angles, attend)
        logits: Tensor = self.head(rms_norm(x, (WIDTH,)))
        return logits


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    """RoPE: ``[tokens, heads, HEAD_DIM]`` turned by each token's angles."""
    (a, b), cos, sin = x.chunk(2, dim=2), angles.cos()[:, None], angles.sin()[:, None]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=2)


def documents(number: int, tokens: int) -> tuple[list[int], Tensor]:
    """Lengths and ids of the documents of a step: one takes half of it, and each counts in a stride of its own."""
    generator = torch.Generator().manual_seed(number)
    lengths = [tokens // 2]
    while left := tokens - sum(lengths):
        lengths.append(min(left, int(torch.randint(1, tokens // 8, (), generator=generator))))
    strides = torch.randint(1, 4, (len(lengths),), generator=generator).tolist()
    ids = [torch.arange(n) * stride % VOCABULARY for n, stride in zip(lengths, strides, strict=True)]
    return lengths, torch.cat(ids)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=2048)
    options = parser.parse_args()

    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DistributedDataParallel(Model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    cluster = flexcp.cluster("cpu", ranks_per_node=ranks)  # new
    planner = flexcp.Planner(HEADS, KV_HEADS, HEAD_DIM, dtype="float32", cluster=cluster)  # new

    for number in range(options.steps):
        # The loader: the same packed documents everywhere, each rank takes its part.
        lengths, stream = documents(number, options.tokens)
        labels = stream.roll(-1).index_fill(0, torch.tensor(lengths).cumsum(0) - 1, -100)
        positions = torch.cat([torch.arange(n) for n in lengths])
        mine, my_labels, my_positions = (x.tensor_split(ranks)[rank] for x in (stream, labels, positions))

        step = flexcp.bind(planner(lengths, flexcp.causal(), layout="contiguous"), dist.group.WORLD)  # new
        logits = model(mine, my_positions, lambda q, k, v, step=step: flexcp.attention(q, k, v, step))  # new
        loss = step.loss(logits, my_labels, gradients="averaged")  # new: DDP averages gradients

        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        dist.all_reduce(total := loss.detach().clone())
        if rank == 0:
            print(f"step {number} loss {total / ranks:.6f} gradient norm {norm:.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

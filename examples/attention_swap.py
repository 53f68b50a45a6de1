"""Attention-only swap: a training loop that already has its loader, labels, RoPE and shapes, and changes only how it attends.

    torchrun --nproc-per-node 4 examples/attention_swap.py

Every rank holds one contiguous part of the packed stream, as it did before. ``layout="contiguous"`` keeps it that way; the plan only
decides who computes what. The marked lines are all that is new.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

import flexcp
from flexcp.train.documents import phrases, shrunk_lengths
from flexcp.train.gpt import Gpt, GptConfig
from flexcp.train.update import total_loss, update


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=2048)
    options = parser.parse_args()

    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    config = GptConfig()
    model = Gpt(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    planner = flexcp.Planner(config.heads, config.kv_heads, config.head_dim, dtype="float32",
                             cluster=flexcp.cluster("cpu", ranks_per_node=ranks))  # fmt: skip  # new

    for number in range(options.steps):
        # The user's loader: the same packed documents everywhere, each rank takes its part.
        lengths = shrunk_lengths("longtail", options.tokens, number, 16)
        stream = phrases(number, lengths, config.vocabulary)
        ends = torch.tensor(lengths).cumsum(0) - 1
        labels = stream.roll(-1).index_fill(0, ends, -100)
        positions = torch.cat([torch.arange(n) for n in lengths])
        mine, my_labels, my_positions = (x.tensor_split(ranks)[rank] for x in (stream, labels, positions))

        step = flexcp.bind(planner(lengths, flexcp.causal(), layout="contiguous"), dist.group.WORLD)  # new

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, step: flexcp.Step = step) -> torch.Tensor:
            return flexcp.attention(q, k, v, step)  # new

        logits = model(mine, my_positions, attend)
        loss = cross_entropy(logits, my_labels, ignore_index=-100, reduction="sum") / int((labels != -100).sum())
        update(optimizer, loss, dist.group.WORLD)
        total = total_loss(loss, dist.group.WORLD)
        if rank == 0:
            print(f"step {number} loss {total:.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

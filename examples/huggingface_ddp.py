"""A Hugging Face model under DDP: a training script of one's own whose ranks share every batch of packed documents.

    torchrun --nproc-per-node 4 examples/huggingface_ddp.py

All ranks see the same stream; the plan says which tokens each keeps. ``huggingface.inputs`` makes this rank's keywords
of the forward, with labels shifted inside documents. Ranks hold shares of one loss and DDP averages gradients, hence
``gradients="averaged"``.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, LlamaConfig

import flexcp
from flexcp.frameworks import huggingface

CONFIG = LlamaConfig(
    vocab_size=128,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)


def documents(number: int, tokens: int) -> tuple[list[int], Tensor]:
    """Lengths and ids of the documents of a step: one takes half of it, and each counts in a stride of its own."""
    lengths = [tokens // 2, tokens // 4, tokens - tokens // 2 - tokens // 4]
    return lengths, torch.cat([torch.arange(n) * (1 + number + i) % CONFIG.vocab_size for i, n in enumerate(lengths)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=1024)
    options = parser.parse_args()

    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    inner = AutoModelForCausalLM.from_config(CONFIG)
    huggingface.turn_on(inner)
    model = DistributedDataParallel(inner)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    planner = huggingface.planner(model, flexcp.cluster("cpu", ranks_per_node=ranks))
    masks = huggingface.masks(inner.config)

    for number in range(options.steps):
        lengths, stream = documents(number, options.tokens)
        step = flexcp.bind(planner(lengths, masks=masks), dist.group.WORLD)
        loss = model(**huggingface.inputs(stream, step, gradients="averaged")).loss

        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        dist.all_reduce(total := loss.detach().clone())
        if rank == 0:
            print(f"step {number} loss {total / ranks:.8f} gradient norm {norm:.8f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

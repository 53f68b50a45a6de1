"""Pre-train a Hugging Face model sharded by FSDP2, layers compiled and recomputed, on documents of any length.

    torchrun --nproc-per-node 4 examples/fsdp2_pretrain.py

Parameters, gradients and optimizer states are sharded over the ranks that share every batch; on a cluster shard over
all ranks and give ``bind`` the mesh axis that shares a batch.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

import flexcp
from flexcp.frameworks import fsdp, huggingface
from flexcp.train.documents import Documents
from flexcp.train.update import total_loss

TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", help="a Hugging Face config.json; a tiny Llama without one")
    parser.add_argument("--data", default="longtail", help="a length distribution or a text file")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args()

    gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if gpu else "gloo")
    device = torch.device("cuda", dist.get_rank() % torch.cuda.device_count()) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("cp",))
    dtype = torch.bfloat16 if gpu else torch.float32

    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(options.config) if options.config else LlamaConfig(vocab_size=256, **TINY)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).to(device)
    huggingface.turn_on(model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    for layer in model.model.layers:
        if options.compile:
            layer.compile()
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    fsdp.sum_gradients(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3 if not options.config else 3e-4)

    where = flexcp.cluster("h100" if gpu else "cpu", ranks_per_node=mesh.size())
    planner = huggingface.planner(config, where, dtype)
    documents = Documents(options.data, options.tokens, config.vocab_size)
    for number in range(options.steps):
        parts = documents.step(number)
        step = flexcp.bind(planner([len(part) for part in parts], masks=huggingface.masks(config)), mesh["cp"])
        tokens = torch.cat(parts).to(device)
        loss = model(**huggingface.inputs(tokens, step)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = total_loss(loss, dist.group.WORLD)
        if dist.get_rank() == 0:
            print(f"step {number} loss {total:.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

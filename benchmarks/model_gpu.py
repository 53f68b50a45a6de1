"""A 1B model on one GPU: flexcp against cuDNN attention and FlexAttention, and four NCCL ranks against one. Not yet run: no GPU was there.

    python benchmarks/model_gpu.py --write docs/model_gpu.md

1. One rank, one long document: the model's step time with flexcp against ``attn_implementation="sdpa"`` with cuDNN (at most 3 % slower).
2. One rank, packed documents: against ``attn_implementation="flex_attention"`` (faster).
3. The loss of flexcp over 200 steps beside the baseline's, from the same weights on the same documents.
4. Four NCCL ranks that share the GPU (``NCCL_HOSTID`` of their own, sockets: right, not fast), FSDP2, 50 steps, beside the one-rank losses.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import flexcp
from flexcp.frameworks import fsdp, huggingface
from flexcp.train.documents import Documents

SIZES: dict[str, Any] = {
    "vocab_size": 32_768, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 131_072, "tie_word_embeddings": True,
}  # fmt: skip
SHARED_GPU = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}


def make_model(attention: str) -> Any:
    from transformers import AutoModelForCausalLM, LlamaConfig

    huggingface.register()
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.bfloat16).cuda()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    return model


def losses_of(model: Any, parts: list[Tensor], step: flexcp.Step | None) -> Tensor:
    """The loss of one batch: packed, by flexcp's step or by positions that start anew."""
    tokens = torch.cat(parts).cuda()
    if step is not None:
        logits = model(**huggingface.inputs(tokens, step)).logits[0]
        return step.loss(logits[: step.local_tokens], step.labels(tokens))
    positions = torch.cat([torch.arange(len(part)) for part in parts]).cuda()
    labels = tokens.roll(-1).index_fill(0, torch.tensor([len(part) for part in parts]).cumsum(0).cuda() - 1, -100)
    logits = model(tokens[None], position_ids=positions[None], use_cache=False).logits[0]
    return torch.nn.functional.cross_entropy(logits.float(), labels, ignore_index=-100)


def trained(attention: str, documents: Callable[[int], list[Tensor]], steps: int) -> tuple[list[float], float]:
    """Losses, and the median of a step's milliseconds after five to warm up."""
    model = make_model(attention)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    planner = huggingface.planner(model.config, flexcp.cluster("h200", ranks_per_node=1))
    losses, times = [], []
    for number in range(steps):
        parts = documents(number)
        step = None
        if attention == huggingface.NAME:
            step = flexcp.bind(planner([len(p) for p in parts], masks=huggingface.masks(model.config)))
            step.prepare("cuda")
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        backend = [SDPBackend.CUDNN_ATTENTION] if attention == "sdpa" else [SDPBackend.MATH, SDPBackend.CUDNN_ATTENTION]
        with sdpa_kernel(backend):
            loss = losses_of(model, parts, step)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        end.record()
        losses.append(float(loss.detach()))
        times.append(begin.elapsed_time(end))
    return losses, statistics.median(times[5:] or times)


def on_nccl_ranks(tokens: int, steps: int) -> None:
    """What torchrun starts four times: FSDP2 over ranks that share one GPU; rank 0 prints the losses."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    os.environ.update(SHARED_GPU, NCCL_HOSTID=f"rank{os.environ['RANK']}")
    torch.cuda.set_device(0)
    dist.init_process_group("nccl")
    mesh = init_device_mesh("cuda", (dist.get_world_size(),), mesh_dim_names=("cp",))
    model = make_model(huggingface.NAME)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    fsdp.sum_gradients(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    planner = huggingface.planner(model.config, flexcp.cluster("h200", ranks_per_node=mesh.size()))
    source, losses = Documents("longtail", tokens, SIZES["vocab_size"], shrink=1), []
    for number in range(steps):
        parts = source.step(number)
        step = flexcp.bind(planner([len(p) for p in parts], masks=huggingface.masks(model.config)), mesh["cp"])
        loss = losses_of(model, parts, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(float(total))
    if dist.get_rank() == 0:
        print(json.dumps(losses), flush=True)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path)
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--ranks-steps", type=int, default=50)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        on_nccl_ranks(options.tokens, options.ranks_steps)
        return
    long = Documents("longtail", options.tokens, SIZES["vocab_size"], shrink=1)

    def one(number: int) -> list[Tensor]:
        return [torch.cat(long.step(number))]

    cudnn, ours = (trained(name, one, 25) for name in ("sdpa", huggingface.NAME))
    flex, packed = (trained(name, long.step, options.steps) for name in ("flex_attention", huggingface.NAME))
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "4",
        __file__,
        "--tokens",
        str(options.tokens),
    ]
    command += ["--ranks-steps", str(options.ranks_steps)]
    answer = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip().splitlines()[-1]
    four: list[float] = json.loads(answer)
    gap = max(abs(a - b) / b for a, b in zip(four, packed[0], strict=False))
    overlay = max(abs(a - b) / b for a, b in zip(packed[0], flex[0], strict=True))
    lines = [
        "# A 1B model on one GPU",
        "",
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bf16, {options.tokens} tokens a step.",
        "",
        "| what | flexcp | baseline | ratio |",
        "| --- | --- | --- | --- |",
        f"| one document, ms a step (baseline cuDNN) | {ours[1]:.1f} | {cudnn[1]:.1f} | {ours[1] / cudnn[1]:.3f} |",
        f"| packed, ms a step (baseline FlexAttention) | {packed[1]:.1f} | {flex[1]:.1f} | {packed[1] / flex[1]:.3f} |",
        f"| largest relative loss difference over {options.steps} steps | {overlay:.2e} | | |",
        f"| the same, four NCCL ranks with FSDP2 over {options.ranks_steps} steps | {gap:.2e} | | |",
    ]
    text = "\n".join(lines) + "\n"
    if options.write:
        options.write.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
